"""Rotary embeddings out of a configuration, in every spelling that Hugging Face and GGUF have used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.config import RopeConfig, RopeKind
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.source import TensorSource

_KINDS: Mapping[str, RopeKind] = {
    kind: kind for kind in ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
}
# What goes to `RopeConfig.extra` by kind: what it may have, and what it must.
_OPTIONAL: Mapping[RopeKind, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_NEEDED: Mapping[RopeKind, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def read_hf_rope(
    keys: ConfigReader, head_dim: int, theta: float, *, old_kinds: Mapping[str, RopeKind] | None = None
) -> RopeConfig:
    """Returns the one rotary embedding of a Hugging Face configuration.

    The block may be ``rope_parameters`` (transformers 5) or ``rope_scaling``, its kind ``rope_type`` or ``type``;
    theta and the rotated share may stand in the block or beside it.

    Args:
      keys: the configuration.
      head_dim: H.
      theta: the family's base, for a configuration without.
      old_kinds: names that the family once used for a kind.
    """
    block = _block(keys)
    theta, share = keys.get("rope_theta", theta), keys.get("partial_rotary_factor", 1.0)
    return read_rope_block(keys, block, head_dim, theta=theta, share=share, old_kinds=old_kinds)


def _block(keys: ConfigReader) -> ConfigReader:
    scaling = keys.section("rope_scaling", harmless=("finetuned",))
    parameters = keys.section("rope_parameters", harmless=("finetuned",))
    if scaling.values and parameters.values:
        raise keys.refuse("rope_scaling", dict(scaling.values), "absent where rope_parameters is given")
    return parameters if parameters.values else scaling


def read_rope_block(
    keys: ConfigReader,
    block: ConfigReader,
    head_dim: int,
    *,
    theta: float,
    share: float = 1.0,
    old_kinds: Mapping[str, RopeKind] | None = None,
) -> RopeConfig:
    """Returns the rotary embedding that a block describes; a key of it that its kind does not read is refused.

    Args:
      keys: the configuration around the block.
      block: ``rope_parameters`` or ``rope_scaling``, or one layer type's part of it.
      head_dim: H.
      theta: base of the frequencies where the block has none.
      share: part of a head that rotates where the block does not say.
      old_kinds: names that the family once used for a kind.

    Raises:
      ConfigError: names the key, what it is and what would work.
    """
    theta, share = block.get("rope_theta", theta), block.get("partial_rotary_factor", share)
    kind = _read_kind(block, {**_KINDS, **(old_kinds or {})})
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2:
        raise keys.refuse(
            "partial_rotary_factor", share, f"a share that rotates an even part of head_dim {head_dim}"
        )
    max_len = keys.need("max_position_embeddings")
    trained = _read_trained_len(keys, block, kind, max_len)
    factor = 1.0 if kind == "default" else block.get("factor")
    if factor is None and trained and kind in ("yarn", "longrope"):
        factor = max_len / trained
    if factor is None or factor < 1:
        raise block.refuse("factor", factor, "a number of at least 1")
    extra = {key: block.need(key) for key in _NEEDED.get(kind, ())}
    extra |= {key: value for key in _OPTIONAL.get(kind, ()) if (value := block.get(key)) is not None}
    for key in ("short_factor", "long_factor"):
        if key in extra and len(extra[key]) != rotary_dim // 2:
            raise block.refuse(
                key, f"{len(extra[key])} numbers", f"{rotary_dim // 2} numbers, half of the rotary part"
            )
    scale = block.get("attention_factor") if kind in ("yarn", "longrope") else None
    block.finish()
    return RopeConfig(
        theta=float(theta),
        rotary_dim=rotary_dim,
        kind=kind,
        factor=float(factor),
        original_max_len=trained,
        attention_factor=None if scale is None else float(scale),
        extra=tuple(sorted((key, _plain(value)) for key, value in extra.items())),
    )


def _read_kind(block: ConfigReader, kinds: Mapping[str, RopeKind]) -> RopeKind:
    new, old = block.get("rope_type"), block.get("type")
    key = "type" if new is None else "rope_type"
    if new is not None and old is not None and kinds.get(new) != kinds.get(old):
        raise block.refuse("type", old, f"absent or the same as rope_type, {new!r}")
    return block.choose(key, kinds) if new or old else "default"


def _read_trained_len(keys: ConfigReader, block: ConfigReader, kind: RopeKind, max_len: int) -> int | None:
    """Returns the length before stretching; Phi-3 keeps it beside the block, and that one wins as in transformers."""
    if kind == "dynamic":
        return max_len
    beside = keys.get("original_max_position_embeddings")
    if kind in ("yarn", "llama3", "longrope"):
        inside = block.get("original_max_position_embeddings")
        return int(beside or inside or max_len)
    return None


def _plain(value: Any) -> float | bool | tuple[float, ...]:
    if isinstance(value, list | tuple):
        return tuple(float(v) for v in value)
    return value if isinstance(value, bool) else float(value)


def read_gguf_rope(keys: ConfigReader, source: TensorSource, head_dim: int, max_len: int) -> RopeConfig:
    """Returns the rotary embedding of a GGUF file, factors that it holds as tensors included.

    Llama 3's stretching comes as the tensor ``rope_freqs.weight`` (numbers that divide the frequencies), LongRoPE's
    as ``rope_factors_short.weight`` and ``rope_factors_long.weight``.

    Args:
      keys: metadata below the architecture's prefix.
      source: the file.
      head_dim: H.
      max_len: the model's length in tokens.
    """
    long = {"longrope": "longrope"} if "rope_factors_long.weight" in source.tensors else {}
    kind: RopeKind = "default"
    if keys.get("rope.scaling.type") is not None:
        kind = keys.choose(
            "rope.scaling.type", {"none": "default", "linear": "linear", "yarn": "yarn", **long}
        )
    factor = float(keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0)
    trained = keys.get("rope.scaling.original_context_length")
    scale = keys.get("rope.scaling.attn_factor")
    extra: dict[str, Any] = {}
    if long:
        kind = "longrope"
        extra = {
            f"{size}_factor": _read_factors(source, f"rope_factors_{size}.weight")
            for size in ("short", "long")
        }
        scale = 1.0 if scale is None else scale
        factor = max(1.0, max_len / trained) if trained else 1.0
    elif keys.get("rope.scaling.type") is None and factor != 1.0:
        kind = "linear"  # the oldest files hold the factor alone
    if kind == "yarn":
        extra = {
            key: float(value)
            for key in ("beta_fast", "beta_slow")
            if (value := keys.get(f"rope.scaling.yarn_{key}")) is not None
        }
        if scale is not None:  # llama.cpp multiplies YaRN's own factor by it
            scale *= 0.1 * math.log(factor) + 1.0
        keys.require("rope.scaling.yarn_ext_factor", 1.0)
        keys.require("rope.scaling.yarn_attn_factor", 1.0)
    if "rope_freqs.weight" in source.tensors:
        extra["freq_factors"] = _read_factors(source, "rope_freqs.weight")
    return RopeConfig(
        theta=float(keys.get("rope.freq_base", 10_000.0)),
        rotary_dim=int(keys.get("rope.dimension_count", head_dim)),
        kind=kind,
        factor=factor,
        original_max_len=int(trained or max_len) if kind in ("yarn", "longrope") else None,
        attention_factor=None if scale is None else float(scale),
        extra=tuple(sorted(extra.items())),
    )


def _read_factors(source: TensorSource, name: str) -> tuple[float, ...]:
    return tuple(float(v) for v in np.asarray(source.read(name), np.float32))
