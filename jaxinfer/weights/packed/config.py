"""``quantization_config`` of a Hugging Face folder: which format it names, and whether that is one that is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.weights.errors import UnsupportedFormatError
from jaxinfer.weights.packed.codecs import (
    Packed,
    Parts,
    read_awq,
    read_gptq,
    read_mxfp4,
    read_nvfp4,
    read_packed,
    read_scaled,
)

Settings = Mapping[str, Any]
SCALE_MARKS = ("weight_scale_inv", "weight_scale")
# Scales of activations and of the KV cache: ours are computed as they are needed, so a file's are left aside.
UNUSED = frozenset(
    "input_scale input_zero_point input_global_scale input_g_idx output_scale k_scale v_scale q_scale".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Codec:
    """How the weight of one module lies.

    Attributes:
      name: in words, for what is said of a tensor.
      read: gives the weight of a module's tensors.
      marks: tensors of a module of which one says that its weight lies so, by what follows the module's name.
      parts: tensors that must be beside it. optional: that may be.
      settings: what ``read`` needs to know beside them.
    """

    name: str
    read: Callable[[Parts, Settings], Packed]
    marks: tuple[str, ...]
    parts: tuple[str, ...]
    optional: tuple[str, ...] = ()
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantised.

    Attributes:
      name: the method, as configurations name it.
      groups: codecs, each with the targets it is for: names, patterns ``re:...``, or the class ``Linear``.
      ignored: modules that are said to be left alone: names, parts of names, or patterns.
      notes: what is said of the configuration at the start.
    """

    name: str
    groups: tuple[tuple[tuple[str, ...], Codec], ...]
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def codec_of(self, module: str) -> Codec | None:
        """Returns how a module's weight lies; None for one that no target names."""
        named = [codec for targets, codec in self.groups if any(_names(t, module) for t in targets)]
        others = [codec for targets, codec in self.groups if "Linear" in targets]
        return next(iter(named + others), None)

    def ignores(self, module: str) -> bool:
        """Returns whether the configuration says that a module is left alone."""
        return any(_names(pattern, module) for pattern in self.ignored)


def _names(pattern: str, module: str) -> bool:
    """Returns whether a pattern names a module or one around it; ``*`` stands for any one part."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    inner = re.escape(pattern).replace(r"\*", "[^.]+")
    return re.search(rf"(^|\.){inner}($|\.)", module) is not None


def read_scheme(where: Path, config: Mapping[str, Any]) -> Scheme:
    """Returns how a checkpoint is quantised.

    Args:
      where: the file that says so, for errors.
      config: its ``quantization_config``.

    Raises:
      UnsupportedFormatError: a method, or an option of one, that is not read; the message says which are.
    """
    refusal = _Refusal(where)
    method = config.get("quant_method")
    if method not in _METHODS:
        refusal("quant_method", method, ", ".join(_METHODS))
    return _METHODS[method](config, refusal)


@dataclass(frozen=True)
class _Refusal:
    where: Path

    def __call__(self, key: str, got: Any, known: str) -> None:
        raise UnsupportedFormatError(
            f"{self.where}: quantization_config: {key} {got!r} is not read; known: {known}"
        )

    def unless(self, config: Settings, key: str, known: Iterable[Any], default: Any = None) -> Any:
        """Returns a value that must be one of those known."""
        value = config.get(key, default)
        if value not in (known := list(known)):
            self(key, value, ", ".join(map(repr, known)))
        return value


def _read_gptq(config: Settings, refuse: _Refusal) -> Scheme:
    bits = refuse.unless(config, "bits", (4, 8))
    form = refuse.unless(config, "checkpoint_format", ("gptq", "gptq_v2", "", None), "gptq")
    if config.get("is_marlin_format"):
        refuse("is_marlin_format", True, "false")
    overrides = {k: v for k, v in (config.get("dynamic") or {}).items() if not k.startswith("-:")}
    if overrides:
        refuse("dynamic", overrides, "modules left out ('-:pattern')")
    settings = {
        "bits": bits,
        "group_size": _group_size(config, refuse, 128),
        "zeros_as_they_are": form == "gptq_v2",
    }
    codec = Codec("GPTQ", read_gptq, ("qweight",), ("qzeros", "scales"), ("g_idx",), settings)
    return Scheme("gptq", ((("Linear",), codec),))


def _read_awq(config: Settings, refuse: _Refusal) -> Scheme:
    refuse.unless(config, "bits" if "bits" in config else "w_bit", (4,), 4)
    refuse.unless({"version": str(config.get("version", "gemm")).lower()}, "version", ("gemm",))
    refuse.unless(config, "backend", ("autoawq",), "autoawq")
    zeros = ("qzeros",)
    parts, optional = (("scales", *zeros), ()) if config.get("zero_point", True) else (("scales",), zeros)
    codec = Codec("AWQ", read_awq, ("qweight",), parts, optional)
    return Scheme("awq", ((("Linear",), codec),), _ignored(config, "modules_to_not_convert"))


def _read_fp8(config: Settings, refuse: _Refusal) -> Scheme:
    refuse.unless(config, "fmt", ("e4m3", "e5m2"), "e4m3")
    refuse.unless(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = config.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        refuse("weight_block_size", block, "two numbers, as [128, 128]")
    ignored = _ignored(config, "modules_to_not_convert") + _ignored(config, "ignored_layers")
    return Scheme("fp8", ((("Linear",), _scaled("FP8", block)),), ignored)


def _scaled(name: str, block: list[int] | None) -> Codec:
    settings = {"block": tuple(block) if block else None}
    return Codec(name, read_scaled, SCALE_MARKS, ("weight",), ("weight_zero_point",), settings)


_MXFP4 = Codec("MXFP4", read_mxfp4, ("weight_blocks",), ("weight_scales",))


def _read_mxfp4(config: Settings, refuse: _Refusal) -> Scheme:
    return Scheme("mxfp4", ((("Linear",), _MXFP4),), _ignored(config, "modules_to_not_convert"))


_PACKED = ("weight_packed",)


def _read_compressed(config: Settings, refuse: _Refusal) -> Scheme:
    refuse.unless(config, "quantization_status", ("compressed", "frozen", None))
    for key in ("sparsity_config", "transform_config"):
        held = config.get(key) or {}
        if {k: v for k, v in held.items() if v and (k, v) != ("format", "dense")}:
            refuse(key, held, "none")
    groups = []
    for name, group in (config.get("config_groups") or {}).items():
        form = group.get("format") or config.get("format")
        codec = _compressed_codec(f"config_groups.{name}", form, group.get("weights") or {}, refuse)
        groups.append((tuple(group.get("targets") or ()), codec))
    if not groups:
        refuse("config_groups", config.get("config_groups"), "at least one group")
    notes = ()
    if config.get("kv_cache_scheme"):
        notes = ("kv_cache_scheme of the checkpoint is left aside: the policy's kv= says how pages are kept",)
    return Scheme("compressed-tensors", tuple(groups), _ignored(config, "ignore"), notes)


def _compressed_codec(where: str, form: Any, weights: Settings, refuse: _Refusal) -> Codec:
    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    name = f"{form} {kind}{bits}"
    scaled = (
        "int-quantized int8",
        "float-quantized float8",
        "naive-quantized int8",
        "naive-quantized float8",
    )
    if name in ("pack-quantized int4", "pack-quantized int8"):
        refuse.unless(weights, "strategy", ("group", "channel", "tensor", None))
        parts, optional = ("weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")
        return Codec(name, read_packed, _PACKED, parts, optional, {"bits": bits})
    if name in scaled:
        refuse.unless(weights, "strategy", ("channel", "tensor", "group", "block", None))
        block = weights.get("block_structure") if strategy == "block" else None
        return _scaled(name, [int(n) for n in block.split("x")] if isinstance(block, str) else block)
    if name == "mxfp4-pack-quantized float4":
        return Codec(name, read_mxfp4, _PACKED, ("weight_scale",))
    if name != "nvfp4-pack-quantized float4":
        known = ("pack-quantized int4", "pack-quantized int8", *scaled)
        refuse(where, name, ", ".join((*known, "mxfp4-pack-quantized float4", "nvfp4-pack-quantized float4")))
    return Codec(name, read_nvfp4, _PACKED, ("weight_scale", "weight_global_scale"))


def _group_size(config: Settings, refuse: _Refusal, default: int) -> int | None:
    """Returns inputs that share a scale, None for all of them."""
    size = config.get("group_size", default)
    if type(size) is not int or (size < 8 and size != -1):
        refuse("group_size", size, "-1 (one for all inputs) or a number from 8")
    return None if size == -1 else size


def _ignored(config: Settings, key: str) -> tuple[str, ...]:
    return tuple(config.get(key) or ())


_METHODS: Mapping[Any, Callable[[Settings, _Refusal], Scheme]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
}
