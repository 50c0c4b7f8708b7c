"""Number formats: how a number lies in memory, alone or as a code under a scale that it shares with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp


class Kind(NamedTuple):
    """A family of formats.

    Attributes:
      bits: of a stored number. dtype: of the array that holds it; two numbers of 4 bits lie in a byte.
      largest: magnitude of a code (symmetric integers: what the scale is sized by).
      group: numbers that share a scale where the format fixes it, None where the user chooses.
    """

    bits: int
    dtype: jnp.dtype
    largest: float
    group: int | None = None


def _plain(dtype: jnp.dtype) -> Kind:
    return Kind(8 * dtype.itemsize, dtype, float(jnp.finfo(dtype).max))


_BYTE = jnp.dtype(jnp.uint8)
PLAIN = {name: _plain(jnp.dtype(name)) for name in ("float32", "bfloat16", "float16")}
CODED = {
    "int8": Kind(8, jnp.dtype(jnp.int8), 127),
    "fp8_e4m3": _plain(jnp.dtype(jnp.float8_e4m3fn)),
    "fp8_e5m2": _plain(jnp.dtype(jnp.float8_e5m2)),
    "int4": Kind(4, _BYTE, 8),
    "mxfp4": Kind(4, _BYTE, 6, 32),
    "nvfp4": Kind(4, _BYTE, 6, 16),
}
KINDS = PLAIN | CODED
ALIASES = {
    "fp32": "float32",
    "f32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp8": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "fp4": "mxfp4",
}
SCALES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}  # how a format's name says its scales
INT4_GROUP = 64  # of `int4` where no group is named


@dataclass(frozen=True)
class Format:
    """How numbers lie in memory: ``w = code * scale``, or ``code * scale + offset``.

    Attributes:
      kind: a key of `KINDS`.
      group: numbers along the last axis that share a scale; None is one scale for all inputs of an output.
      offset: whether an offset lies beside each scale; only integers have one.
      scale: dtype of scales and offsets where it is not the usual one (bfloat16 in groups, float32 per channel):
        checkpoints bring float16 or float32, and rounding those again would change the weights.
      rotation: of inputs before they were rounded (`arrays.rotation`): in blocks of so many, 0 for what suits a weight
        (`fit_format`), None for none. Rows are rotated likewise when they meet it.
    """

    kind: str
    group: int | None = None
    offset: bool = False
    scale: str = ""
    rotation: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown format {self.kind!r}; formats: {', '.join(KINDS)}")
        if fixed := KINDS[self.kind].group:
            if self.group not in (None, fixed):
                raise ValueError(
                    f"{self.kind}: its groups are of {fixed}, got g{self.group}; leave the group out"
                )
            object.__setattr__(self, "group", fixed)
        if self.is_plain and (self.group or self.offset):
            raise ValueError(f"{self.kind} has no scales, so neither groups nor offsets")
        if self.group is not None and (self.group < 8 or self.group & (self.group - 1)):
            raise ValueError(
                f"{self.kind}: got groups of {self.group}; must be a power of two from 8, as g32, g64, g128"
            )
        if self.offset and not self.is_integer:
            raise ValueError(f"{self.kind} has no offsets; int4 and int8 have")
        if self.scale and (self.is_plain or fixed):
            raise ValueError(f"{self.kind}: the dtype of its scales cannot be chosen, got {self.scale}")
        if self.scale not in ("", *PLAIN):
            raise ValueError(f"{self.kind}: got scales of {self.scale!r}; must be one of {', '.join(PLAIN)}")
        if self.rotation is not None and self.kind != "int8":
            raise ValueError(f"{self.kind}: only int8 is rotated, leave `rot` out")
        if self.scale == ("float32" if self.group is None else "bfloat16"):
            object.__setattr__(self, "scale", "")

    @property
    def is_plain(self) -> bool:
        """Whether numbers lie as they are, without scales."""
        return self.kind in PLAIN

    @property
    def is_integer(self) -> bool:
        """Whether codes are whole numbers."""
        return self.kind in ("int8", "int4")

    @property
    def bits(self) -> int:
        """Bits of a stored number, without its share of the scale."""
        return KINDS[self.kind].bits

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array that holds the numbers: uint8 for two of 4 bits."""
        return KINDS[self.kind].dtype

    @property
    def largest(self) -> float:
        """The largest magnitude of a code, which a scale is sized by."""
        return KINDS[self.kind].largest

    def __str__(self) -> str:
        fixed = KINDS[self.kind].group
        group = "" if self.group == fixed else f":g{self.group}"
        channel = ":channel" if self.kind == "int4" and self.group is None else ""
        scale = f":{SCALES[self.scale]}" if self.scale else ""
        rotation = "" if self.rotation is None else f":r{self.rotation}" if self.rotation else ":rot"
        return f"{self.kind}{group}{channel}{':zero' * self.offset}{scale}{rotation}"

    @classmethod
    def parse(cls, text: str, what: str = "format") -> Format:
        """Returns the format that a string names.

        Args:
          text: a kind or its short name, then ``:g64`` for groups (``:channel`` for none), ``:zero`` for offsets,
            ``:f16`` or ``:f32`` for scales and ``:rot`` for rotated inputs (``:r64``, in blocks of 64): ``bf16``,
            ``int8``, ``int8:rot``, ``int4`` (groups of 64), ``int4:g32:zero``, ``int8:g32:f16``, ``mxfp4``.
          what: named by the error.

        Raises:
          ValueError: no such format, with the ones that exist.
        """
        name, *options = (part.strip().lower() for part in text.split(":"))
        kind = ALIASES.get(name, name)
        group = INT4_GROUP if kind == "int4" else None
        offset, scale, rotation = False, "", None
        names = {short: name for name, short in SCALES.items()}
        for option in options:
            if option == "zero":
                offset = True
            elif option in names:
                scale = names[option]
            elif option == "channel":
                group = None
            elif option == "rot":
                rotation = 0
            elif option[:1] in ("g", "r") and option[1:].isascii() and option[1:].isdigit():
                group, rotation = (
                    (int(option[1:]), rotation) if option[0] == "g" else (group, int(option[1:]))
                )
            else:
                raise ValueError(
                    f"{what}: {text!r} has unknown option {option!r}; options: g32 (a group), channel, zero, f16, rot"
                )
        if kind not in KINDS:
            raise ValueError(
                f"{what}: unknown format {text!r}; formats: {', '.join(KINDS)} (short: {', '.join(ALIASES)})"
            )
        try:
            return cls(kind, group, offset, scale, rotation)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None


FLOAT32 = Format("float32")
BFLOAT16 = Format("bfloat16")
