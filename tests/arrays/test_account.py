"""What the start says of weights: bytes by role as the arrays have them, and formats that had to give way."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxinfer.arrays.account import count_bytes, tell_fitted, tell_weights
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import ParamSpec, flatten_specs

SPECS = {
    "embed": {"tokens": ParamSpec((100, 96), ("vocab", "embed"), "embedding")},
    "layers": tuple(
        {
            "up": ParamSpec((256, 96), ("ffn", "embed")),
            "down": ParamSpec((96, 256), ("embed", "ffn")),
            "norm": ParamSpec((96,), ("embed",), "norm"),
        }
        for _ in range(2)
    ),
}


@pytest.mark.parametrize(
    "text", ["float32", "w8a8", "w4a16", "weights=nvfp4,layers.0.down=int8", "weights=fp8:g32"]
)
def test_bytes_are_those_of_the_arrays(text: str):
    policy = Policy.parse(text)
    total = 0
    for path, spec in flatten_specs(SPECS):
        fmt, x = policy.format_of(path, spec), np.ones(spec.shape, np.float32)
        parts = x if fmt.is_plain else quantize(x, spec, fmt)
        total += sum(leaf.nbytes for leaf in jax.tree.leaves(parts))
    counts = count_bytes(SPECS, policy)
    assert sum(by.total() for by in counts.values()) == total
    assert list(counts) == ["embedding", "matrices", "the rest"]
    assert counts["the rest"].total() == 2 * 96 * 4


def test_the_line_names_each_role_and_format():
    specs = {**SPECS, "head": {"w": ParamSpec((2**20, 16), ("vocab", "embed"), "head")}}
    line = tell_weights(specs, Policy.parse("w4a16,layers.0.up=bf16,head=bf16"))
    assert line.startswith(
        "weights 32 MiB: embedding bfloat16 0.01831 MiB, head bfloat16 32 MiB, matrices bfloat16 "
    )
    for part in ("+ int4:g64 0.0", "+ int4:g32 0.0", ", the rest float32 0.0007324 MiB"):
        assert part in line


def test_formats_that_give_way_are_told_once():
    lines = tell_fitted(SPECS, Policy.parse("w4a16"))
    assert lines == [
        "int4:g32 in place of int4:g64, which does not suit 96 inputs: 2 weights (layers.0.up, ...)"
    ]
    assert tell_fitted(SPECS, Policy.parse("w8a8")) == []
