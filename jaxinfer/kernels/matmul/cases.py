"""The shapes that every implementation of rows times weights is held to, in tests and in benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import ParamSpec


@dataclass(frozen=True)
class Case:
    """One problem: ``rows`` of ``num_in`` numbers times ``[num_out, num_in]`` in ``format``."""

    format: str
    rows: int
    num_in: int
    num_out: int


CASES = (
    Case("int8", 1, 576, 576),
    Case("int8", 2, 64, 32),
    Case("int8", 3, 80, 33),
    Case("int8", 17, 1536, 100),
    Case("int8", 100, 272, 40),
    Case("int8:rot", 1, 576, 64),
    Case("int8:rot", 17, 80, 33),
    Case("int8:r16", 3, 96, 32),
    Case("int8:r128", 5, 1536, 40),
    Case("int8:g32:rot", 2, 2048, 32),
    Case("int8:g32", 1, 576, 64),
    Case("int8:g32:f16", 16, 96, 40),
    Case("int8:g16:zero", 9, 112, 47),
    Case("int4", 1, 576, 576),
    Case("int4:g32", 2, 1536, 65),
    Case("int4:g32:zero:f16", 16, 256, 48),
    Case("int4:g128:f32", 64, 384, 96),
    Case("int4:channel", 17, 144, 33),
    Case("int4:channel:zero", 3, 576, 32),
)

# Of plain weights: every size of tile, a last chunk and a last block that overlap, more rows than meet a block at once.
FLOAT_CASES = (
    Case("bfloat16", 1, 576, 576),
    Case("bfloat16", 2, 32, 32),
    Case("bfloat16", 3, 82, 33),
    Case("bfloat16", 7, 1536, 100),
    Case("bfloat16", 16, 2050, 65),
    Case("bfloat16", 17, 272, 40),
    Case("bfloat16", 100, 576, 47),
    Case("bfloat16", 513, 96, 64),
    Case("float16", 5, 576, 96),
    Case("float16", 40, 130, 33),
)


def make_inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, Quantized]:
    """Returns float32 rows ``[rows, num_in]``, of sizes that differ by row, and a weight of codes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.rows, case.num_in)) * 10.0 ** rng.integers(-3, 3, (case.rows, 1))
    spec = ParamSpec((case.num_out, case.num_in), (None, None))
    w = rng.standard_normal(spec.shape).astype(np.float32) + 0.5
    return x.astype(np.float32), quantize(w, spec, Format.parse(case.format))


def make_floats(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 rows ``[rows, num_in]``, of sizes that differ by row, and plain weights of the case's format."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.rows, case.num_in)) * 10.0 ** rng.integers(-3, 3, (case.rows, 1))
    w = rng.standard_normal((case.num_out, case.num_in)) + 0.5
    dtype = Format.parse(case.format).dtype
    return x.astype(dtype).astype(np.float32), w.astype(dtype)
