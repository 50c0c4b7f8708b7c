"""A tiny model's steps through a store: run as a program, it prints what it loaded and what it computed."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.specs import map_specs
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, RopeConfig
from jaxinfer.model.cache import init_cache
from jaxinfer.model.decoder import Static, param_specs, stack_layers, stack_sizes
from jaxinfer.steps.compiled import StepTable
from jaxinfer.steps.keep import ExecutableStore
from jaxinfer.steps.shape import Shape
from jaxinfer.steps.slots import init_slots
from jaxinfer.steps.steps import PrefillRows

TINY = ModelConfig(
    family="llama",
    vocab_size=61,
    d_model=16,
    max_len=64,
    layers=(LayerKind(),),
    attention=AttentionConfig(2, 1, 8, 8**-0.5),
    mlp=MlpConfig(24),
    ropes=(RopeConfig(1e4, 8),),
)
POLICY = Policy.parse("float32")
SHAPE = Shape(0, (1, 8), 2)


def make_state(cfg: ModelConfig) -> tuple[Any, Any, Any]:
    """Returns random parameters, an empty cache and slots."""
    sizes = stack_sizes(cfg, 1)
    rng = np.random.default_rng(1)
    params = map_specs(
        lambda s: jax.device_put(rng.normal(0, 0.3, s.shape).astype(np.float32)), param_specs(cfg)
    )
    return (
        stack_layers(params, sizes),
        init_cache(cfg, POLICY, sizes, 4, 8),
        init_slots(1, 16, cfg.vocab_size),
    )


def make_table(store: ExecutableStore | None, **changes: Any) -> StepTable:
    """Returns compiled or loaded steps of the tiny model, with changes of its configuration."""
    cfg = replace(TINY, **changes)
    table = StepTable(Static(cfg, POLICY), *make_state(cfg), store)
    table.compile([SHAPE])
    return table


def run(table: StepTable) -> tuple[np.ndarray, int]:
    """Returns the logits after a prompt of five tokens, and the likeliest token."""
    params, cache, slots = make_state(table.static.cfg)
    packed = np.array([[0, 0, 5, -1, 7, 3, 9, 1, 4, 0, 0, 0, 0, 1]], np.int32)
    (ahead,), _, slots = table.forward(SHAPE)(params, cache, slots, jax.device_put(PrefillRows(packed)))
    tokens, _ = table.draw(len(ahead.rows), greedy=True)(slots, ahead.logits, ahead.rows)
    return np.asarray(ahead.logits[0]), int(tokens[0])


if __name__ == "__main__":
    table = make_table(ExecutableStore(Path(sys.argv[1])))
    logits, token = run(table)
    print(sum(c.is_loaded for c in table.executables.values()), logits.tobytes().hex(), token)
