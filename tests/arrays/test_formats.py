"""Formats: what strings name them, what they hold, and what cannot be."""

from __future__ import annotations

from itertools import product

import jax.numpy as jnp
import pytest

from jaxinfer.arrays.formats import ALIASES, CODED, KINDS, PLAIN, Format


def every_format() -> list[Format]:
    """Returns all kinds with all the groups and offsets that they may have."""
    formats = []
    for kind, group, offset, scale, rotation in product(
        KINDS,
        (None, 8, 32, 64, 128, 16),
        (False, True),
        ("", "float16", "float32", "bfloat16"),
        (None, 0, 576),
    ):
        try:
            formats.append(Format(kind, group, offset, scale, rotation))
        except ValueError:
            continue
    return formats


def test_every_format_is_named_by_its_string():
    formats = every_format()
    assert {f.kind for f in formats} == set(KINDS)
    for fmt in formats:
        assert Format.parse(str(fmt)) == fmt


@pytest.mark.parametrize(
    ("text", "fmt"),
    [
        *((short, Format(kind)) for short, kind in ALIASES.items()),
        ("int4", Format("int4", 64)),
        ("int4:channel", Format("int4")),
        (" INT4 : g32 : zero ", Format("int4", 32, offset=True)),
        ("int8:g128", Format("int8", 128)),
        ("fp8:g128", Format("fp8_e4m3", 128)),
        ("mxfp4", Format("mxfp4", 32)),
        ("nvfp4:g16", Format("nvfp4", 16)),
        ("int4:g32:zero:f16", Format("int4", 32, offset=True, scale="float16")),
        ("int8:f32", Format("int8")),  # the usual scales need no name
        ("int8:g32:bf16", Format("int8", 32)),
        ("int8:rot", Format("int8", rotation=0)),
        ("int8:R576:g32", Format("int8", 32, rotation=576)),
    ],
)
def test_strings_name_formats(text: str, fmt: Format):
    assert Format.parse(text) == fmt


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int9", "kv: unknown format 'int9'; formats: float32, bfloat16"),
        ("int4:32", "unknown option '32'; options: g32"),
        ("int4:g48", "a power of two"),
        ("int4:g4", "from 8"),
        ("mxfp4:g16", "groups are of 32"),
        ("bf16:g32", "no scales"),
        ("fp8:zero", "no offsets; int4 and int8"),
        ("mxfp4:f16", "scales cannot be chosen"),
        ("bf16:f16", "scales cannot be chosen"),
        ("int4:g²", "unknown option"),
        ("int4:rot", "only int8 is rotated"),
        ("bf16:r64", "only int8 is rotated"),
        ("int8:rotten", "unknown option 'rotten'"),
    ],
)
def test_other_strings_are_refused_with_what_there_is(text: str, says: str):
    with pytest.raises(ValueError, match=says):
        Format.parse(text, "kv")


def test_bits_are_those_of_the_array():
    for kind in PLAIN | CODED:
        fmt = Format(kind)
        assert fmt.bits in (4, 8 * fmt.dtype.itemsize)
        assert (fmt.dtype == jnp.uint8) == (fmt.bits == 4)
