"""Every family computes what transformers computes, at every position, whichever way the tokens come."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.config import ModelConfig
from jaxinfer.model.cache import KVCache, init_cache
from jaxinfer.model.decoder import Block, Static, forward, param_specs, stack_layers, stack_sizes, unembed
from jaxinfer.model.layers import norm
from jaxinfer.steps.steps import full_logits
from jaxinfer.weights.families import find_family, read_config
from jaxinfer.weights.load import load_params
from jaxinfer.weights.source import open_source
from tests.families.cases import NAMES, Case, load_case, make_checkpoint

FLOAT32 = Policy.parse("float32")
TOLERANCE = 1e-4
PAGE = 16
# Cases that differ from another one only in what a rotary table, a tied head or a router holds: whole prompts tell.
CHUNKED = sorted(
    set(NAMES)
    - {
        "llama_dynamic",
        "llama_linear",
        "llama_tied",
        "mistral_yarn",
        "qwen2_yarn",
        "gemma3_linear",
        "qwen3_moe_raw",
    }
)
FULL = jax.jit(full_logits, static_argnums=1)


@pytest.fixture(scope="module", params=NAMES)
def model(request, tmp_path_factory) -> tuple[Case, ModelConfig, dict[str, Any]]:
    """A case, and what is loaded from its folder."""
    case = load_case(request.param)
    source = open_source(make_checkpoint(case, tmp_path_factory.mktemp(case.name)))
    cfg, _ = read_config(source)
    family = find_family(source)
    recipes = family.mapping(cfg, "hf", source.tensors)
    params = load_params(source, param_specs(cfg), recipes, policy=FLOAT32, ignorable=family.ignorable("hf"))
    return case, cfg, params


def groups_of(case: Case, cfg: ModelConfig) -> Iterator[tuple[int | None, list[int]]]:
    """Yields the length that a rotary table serves, and the rows which transformers ran with that table."""
    rows = range(len(case.rows))
    rope = cfg.ropes[0] if cfg.ropes else None
    if rope is None or rope.kind not in ("dynamic", "longrope"):
        yield None, list(rows)
        return
    trained = rope.original_max_len or 0
    yield trained, [i for i in rows if len(case.rows[i]) <= trained]
    beyond = [i for i in rows if len(case.rows[i]) > trained]
    if rope.kind == "longrope":
        yield cfg.max_len, beyond
    else:
        yield from ((len(case.rows[i]), [i]) for i in beyond)


def pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, length - len(row))) for row in rows])


def assert_close(got: Any, wanted: np.ndarray, what: str) -> None:
    np.testing.assert_allclose(np.asarray(got), wanted, atol=TOLERANCE, rtol=0, err_msg=what)


def test_traps_19_to_22_whole_prompts_give_the_logits_of_transformers(model):
    """A batch of mixed lengths, and each row with the others empty."""
    case, cfg, params = model
    stacks = stack_layers(dict(params), stack_sizes(cfg, 1))
    for context, rows in groups_of(case, cfg):
        tokens = [case.rows[i] for i in rows]
        lengths = np.array([len(row) for row in tokens], np.int32)
        run = partial(FULL, stacks, Static(cfg, FLOAT32, context=context), pad(tokens, int(lengths.max())))
        together = run(lengths)
        for place, i in enumerate(rows):
            assert_close(together[place, : lengths[place]], case.logits[i], f"row {i} in a batch")
        alone = run(np.where(np.arange(len(rows)) == len(rows) - 1, lengths, 0))
        assert_close(alone[-1, : lengths[-1]], case.logits[rows[-1]], f"row {rows[-1]} alone")


@partial(jax.jit, static_argnums=3, donate_argnums=1)
def run_block(
    params: dict[str, Any], pages: KVCache, block: Block, static: Static
) -> tuple[jax.Array, KVCache]:
    """Returns the logits at every position of a block."""
    x, pages = forward(params, pages, [block], static)
    return unembed(params, static, x).reshape(*block.tokens.shape, -1), pages


@pytest.mark.parametrize("model", CHUNKED, indirect=True)
def test_trap_18_chunks_and_decode_give_the_logits_of_transformers(model):
    """Chunks of 16 up to three tokens before each row's end, then a token at a time, over scattered pages."""
    case, cfg, params = model
    sizes = stack_sizes(cfg, cfg.num_layers)
    stacks = stack_layers(dict(params), sizes)
    for context, rows in groups_of(case, cfg):
        B = len(rows)
        lengths = np.array([len(case.rows[i]) for i in rows], np.int32)
        prompt = np.maximum(lengths - 3, 1)
        width = -(-int(lengths.max()) // PAGE)
        pages = np.random.RandomState(0).permutation(B * width).reshape(B, width).astype(np.int32)
        kv = init_cache(cfg, FLOAT32, sizes, B * width, PAGE)
        static = Static(cfg, FLOAT32, context=context)
        tokens = pad([case.rows[i] for i in rows], width * PAGE)
        spans = [
            (np.full(B, s, np.int32), np.clip(prompt - s, 0, PAGE), PAGE)
            for s in range(0, prompt.max(), PAGE)
        ]
        spans += [(prompt + n, (prompt + n < lengths).astype(np.int32), 1) for n in range(3)]
        for start, length, T in spans:
            at = np.minimum(start[:, None] + np.arange(T), width * PAGE - 1)
            block = Block(*map(jnp.asarray, (np.take_along_axis(tokens, at, 1), start, length, pages)))
            got, kv = run_block(stacks, kv, block, static)
            for place in np.flatnonzero(length):
                span = slice(start[place], start[place] + length[place])
                assert_close(
                    got[place, : length[place]], case.logits[rows[place]][span], f"row {rows[place]}, {span}"
                )


@pytest.mark.parametrize("num_layers", [0, 1])
def test_the_stream_below_and_above_the_first_layer_is_transformers_(model, num_layers):
    case, cfg, params = model
    cfg = replace(cfg, layers=cfg.layers[:num_layers])
    sizes = stack_sizes(cfg, 1)
    stacks = stack_layers(params | {"layers": params["layers"][:num_layers]}, sizes)
    row = case.rows[case.hidden_row]
    width = -(-len(row) // PAGE)
    block = Block(
        row[None], jnp.zeros(1, jnp.int32), jnp.array([len(row)]), jnp.arange(width, dtype=jnp.int32)[None]
    )
    kv = init_cache(cfg, FLOAT32, sizes, width, PAGE)
    got, _ = jax.jit(forward, static_argnums=3)(stacks, kv, [block], Static(cfg, FLOAT32))
    wanted = norm(jnp.asarray(case.hidden[num_layers]), params["final_norm"], cfg.norm)
    assert_close(got, np.asarray(wanted), f"after {num_layers} layers")
