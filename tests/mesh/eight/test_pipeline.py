"""Stages at work: how much of the time they idle, several steps on end, and what is computed of prompts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.sharding import parse_mesh, shard_index
from jaxinfer.model import decoder
from jaxinfer.model.decoder import Static, stack_sizes
from jaxinfer.model.layout import lay_out
from jaxinfer.steps import steps
from jaxinfer.steps.compiled import StepTable
from jaxinfer.steps.shape import Shape
from jaxinfer.steps.state import make_state, stack_params
from jaxinfer.steps.steps import DecodeRows, PrefillRows
from tests.mesh.eight.test_logits import llama, make_params

POLICY = Policy.parse("float32")
ROWS, PAGE, WIDTH = 8, 4, 12


def make_run(mesh_text: str) -> tuple[StepTable, Any, Any]:
    """Returns the table of a run over five layers, its weights and its state."""
    cfg, mesh = llama(num_layers=5), parse_mesh(mesh_text)
    layout = lay_out(cfg, POLICY, mesh) if mesh else None
    sizes = stack_sizes(cfg, 2, POLICY, layout.deal if layout else ())
    state = make_state(cfg, POLICY, sizes, (ROWS * WIDTH, PAGE), (ROWS, WIDTH * PAGE), layout)
    params = stack_params(make_params(cfg, POLICY, layout), sizes, layout)
    static = Static(layout.local if layout else cfg, POLICY, "blocked", 64)
    return StepTable(static, state.shapes, state.cache, state.slots, mesh=mesh), params, state


def pack_prompts(num_rows: int, num_tokens: int) -> PrefillRows:
    packed = np.zeros((num_rows, 4 + num_tokens + WIDTH), np.int32)
    packed[:, 0] = np.arange(num_rows)
    packed[:, 2:4] = num_tokens, -1
    packed[:, 4 : 4 + num_tokens] = np.random.default_rng(1).integers(0, 61, (num_rows, num_tokens))
    packed[:, -WIDTH:] = np.arange(num_rows * WIDTH).reshape(num_rows, WIDTH)
    return PrefillRows(packed)


def pack_rows(num_rows: int, num_live: int, position: int) -> DecodeRows:
    packed = np.zeros((num_rows, 3 + WIDTH), np.int32)
    packed[:, 0], packed[:num_live, 0] = ROWS, np.arange(num_live)
    packed[:num_live, 1:3] = position, 1
    packed[:, 3:] = np.arange(num_rows * WIDTH).reshape(num_rows, WIDTH)
    return DecodeRows(packed)


def generate(mesh: str, num_live: int) -> np.ndarray:
    """Returns eight greedy tokens of each row after prompts of three, drawn without return to the host."""
    table, params, state = make_run(mesh)
    shapes = [Shape(0, (ROWS, 3), WIDTH), Shape(ROWS, (0, 0), WIDTH, 8)]
    table.compile(shapes, ("greedy",))
    prompts = table.put(pack_prompts(ROWS, 3), "rows")
    (ahead,), cache, slots = table.forward(shapes[0])(params, state.cache, state.slots, prompts)
    first, slots = table.draw(ROWS, greedy=True)(slots, ahead.logits, ahead.rows)
    drawn, _, slots = table.forward(shapes[1])(
        params, cache, slots, table.put(pack_rows(ROWS, num_live, 3), "rows")
    )
    tokens = np.concatenate([np.asarray(first)[None], drawn.tokens])[:, :num_live].T
    np.testing.assert_array_equal(np.asarray(slots.history)[:num_live, 3:12], tokens)
    return tokens


def test_several_steps_on_end_draw_the_tokens_of_one_device():
    np.testing.assert_array_equal(generate("tensor=2,stage=4", 5), generate("", 5))


@pytest.mark.parametrize(
    ("shape", "rows", "bound"),
    [
        (Shape(0, (1, 40), WIDTH), pack_prompts(1, 40), 3 / 7),
        (Shape(0, (8, 4), WIDTH), pack_prompts(8, 4), 3 / 7),
        (Shape(8, (0, 0), WIDTH, 40), pack_rows(8, 4, 0), 0.02),
    ],
    ids=["a prompt", "prompts", "decode, a row for each stage"],
)
def test_measured_stages_idle_as_long_as_they_must(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, rows: Any, bound: float
):
    """Counted where the layers run: a stage idles at a tick at which it has no live token."""
    seen: Counter[tuple[int, bool]] = Counter()

    def note(stage: Any, busy: Any) -> None:
        seen[int(stage), bool(busy)] += 1

    run_layers = decoder.run_layers

    def noted(x: Any, stacks: Any, cache: Any, blocks: Any, static: Any, keep: Any = None) -> Any:
        busy = jnp.any(jnp.concatenate([block.length for block in blocks]) > 0)
        jax.debug.callback(note, shard_index("layers"), busy)
        return run_layers(x, stacks, cache, blocks, static)

    monkeypatch.setattr(decoder, "run_layers", noted)
    monkeypatch.setattr(steps, "run_layers", noted)
    table, params, state = make_run("stage=4")
    flow = table.flow(shape)
    done = table.lower(shape).compile()(params, state.cache, state.slots, table.put(rows, "rows"))
    jax.block_until_ready(done)
    jax.effects_barrier()
    assert {stage for stage, _ in seen} == set(range(4))
    assert seen.total() == 4 * flow.num_ticks
    for stage in range(4):
        share = seen[stage, False] / flow.num_ticks
        assert share == pytest.approx(flow.idle_share)
        assert share == pytest.approx(bound, rel=0.1)


def test_prompts_are_scored_and_embedded_as_on_one_device():
    shape = Shape(0, (2, 12), WIDTH)
    found = []
    for mesh in ("", "tensor=2,stage=2"):
        table, params, state = make_run(mesh)
        table.compile([shape], ("greedy", "score", "embed"))
        rows = table.put(pack_prompts(2, 12), "rows")
        ahead, *_ = table.forward(shape)(params, state.cache, state.slots, rows)
        scored, pooled = table.score(shape)(params, ahead[-1].x, rows), table.embed(shape)(ahead[-1].x, rows)
        found.append((scored.logprob, scored.top_logprobs, pooled))
    for wanted, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
