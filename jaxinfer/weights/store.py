"""Our own checkpoints: the canonical tree by Orbax, beside it all that a start needs. Only this module imports orbax.

folder/jaxinfer.json   format version, configuration, generation defaults, shape and format of every leaf, the policy
folder/params/         the leaves by their dotted paths, row-major and uncompressed (read twice as fast); a weight of
                       codes as its components, layers.0.attn.q.values and layers.0.attn.q.scale
folder/tokenizer/      the source's tokenizer files, or tokenizer.gguf.json with a GGUF's tokenizer metadata
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.arrays.formats import FLOAT32, Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import dequantize
from jaxinfer.arrays.quantized import abstract, fit_format, is_quantized
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import ParamSpec, flatten_specs, is_spec, path_name
from jaxinfer.config import GenerationDefaults, ModelConfig
from jaxinfer.model.layout import Layout
from jaxinfer.weights.buffers import may_overflow
from jaxinfer.weights.errors import (
    CheckpointError,
    CorruptFileError,
    ExtraTensorsError,
    MisshapenTensorsError,
    MissingFilesError,
    MissingTensorsError,
    NonFiniteTensorsError,
    UnsupportedFormatError,
)
from jaxinfer.weights.load import describe_leaf, fit_sharding, leaf_shardings, put_leaf
from jaxinfer.weights.records import from_json, read_json, to_json
from jaxinfer.weights.settle import Held
from jaxinfer.weights.source import HALF_WRITTEN, STORE_FILE
from jaxinfer.weights.tensors import TensorSource

FORMAT_VERSION = 2  # 1 knew no codes, and had experts as [E, in, out]
PARAMS_FOLDER = "params"
TOKENIZER_FOLDER = "tokenizer"
GGUF_TOKENIZER_FILE = "tokenizer.gguf.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class StoreMeta:
    """What a converted checkpoint says of itself.

    Attributes:
      config: the model. generation: its end tokens and default sampling.
      leaves: ``(shape, format)`` of every parameter by its dotted path.
      policy: that it was converted with, where weights lie in few bits.
    """

    config: ModelConfig
    generation: GenerationDefaults
    leaves: dict[str, tuple[tuple[int, ...], Format]]
    policy: str | None = None

    def look(self, path: str, spec: ParamSpec) -> Held:
        """Returns how the checkpoint has a parameter."""
        _, fmt = self.leaves.get(path, (spec.shape, FLOAT32))
        return Held(str(fmt), not fmt.is_plain, None if fmt.is_plain else fmt)


def save(
    path: str | Path,
    params: Any,
    config: ModelConfig,
    generation: GenerationDefaults,
    source: TensorSource,
    policy: str | None = None,
) -> None:
    """Writes a self-contained checkpoint; the folder appears whole or not at all.

    Args:
      path: the folder to make; it must not exist.
      params: the canonical tree of arrays.
      config, generation: what the family read.
      source: where the parameters came from; its tokenizer is copied.
      policy: that the parameters lie in, where some have few bits: what a run takes that asks for no other.

    Raises:
      FileExistsError: ``path`` exists.
    """
    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"{path}: exists; name a new folder, or remove this one first")
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = {path_name(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(params)}
    weights = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    meta = {
        "format_version": FORMAT_VERSION,
        "config": to_json(config),
        "generation": to_json(generation),
        "leaves": {path_name(key): [list(w.shape), _format_name(w)] for key, w in weights},
        "policy": policy,
    }
    temporary = Path(tempfile.mkdtemp(prefix=f"{path.name}{HALF_WRITTEN}", dir=path.parent))
    try:
        _write_params(temporary / PARAMS_FOLDER, leaves)
        _write_tokenizer(temporary / TOKENIZER_FOLDER, source)
        meta["files"] = _file_sizes(temporary / PARAMS_FOLDER)
        # Written last: without it the folder is not a checkpoint.
        (temporary / STORE_FILE).write_text(json.dumps(meta))
        temporary.chmod(0o755)  # mkdtemp's is the owner's alone
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_meta(path: str | Path) -> StoreMeta:
    """Returns what a converted checkpoint says of itself, without reading a parameter.

    Raises:
      CheckpointError: the folder is half written, of a newer version, or damaged.
    """
    path = Path(path)
    if HALF_WRITTEN in path.name or ((path / PARAMS_FOLDER).exists() and not (path / STORE_FILE).exists()):
        raise CheckpointError(f"{path}: was only half written; remove it and convert again")
    meta = read_json(path / STORE_FILE)
    version = meta.get("format_version")
    if version != FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{path}: format version {version!r} is not {FORMAT_VERSION}, which this jaxinfer writes; convert its "
            "source again"
        )
    absent = [name for name in (PARAMS_FOLDER, TOKENIZER_FOLDER) if not (path / name).is_dir()]
    if absent:
        raise MissingFilesError(path, absent)
    try:
        _check_files(path / PARAMS_FOLDER, meta["files"])
        return StoreMeta(
            from_json(ModelConfig, meta["config"]),
            from_json(GenerationDefaults, meta["generation"]),
            {
                name: (tuple(shape), Format.parse(text, name))
                for name, (shape, text) in meta["leaves"].items()
            },
            meta.get("policy"),
        )
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(path / STORE_FILE, str(error)) from error


def read_tokenizer_metadata(path: str | Path) -> dict[str, Any] | None:
    """Returns the tokenizer metadata of a converted GGUF file; None where ``tokenizer/`` holds files instead."""
    file = Path(path) / TOKENIZER_FOLDER / GGUF_TOKENIZER_FILE
    return read_json(file) if file.exists() else None


def restore(
    path: str | Path, specs: Any, *, policy: Policy, shardings: Any = None, layout: Layout | None = None
) -> Any:
    """Reads the parameters of a converted checkpoint straight into their shardings, each process its devices' shares.

    A leaf that is rounded anew or filled up comes whole to the host first, on every process that has some of it.

    Args:
      path: the folder.
      specs: the wanted tree of `ParamSpec`.
      policy: names the format of each leaf; plain ones kept in another are cast, and what lies in other codes than it
        names (or in none) is rounded anew, on the host.
      shardings: one sharding for all leaves or a tree of them like ``specs``; None is the default device.
      layout: over a mesh: makes leaves the sizes that divide.

    Returns:
      The tree of ``specs`` with an array, or a `Quantized`, for each leaf, or what `describe_leaf` does.

    Raises:
      CheckpointError: see `read_meta`; or the leaves are not those of ``specs``, each fault with every name.
    """
    path = Path(path).absolute()
    meta = read_meta(path)
    leaves = dict(flatten_specs(specs))
    _check_leaves(path, meta, leaves)
    where = leaf_shardings(specs, shardings)
    formats = {name: fit_format(spec, policy.format_of(name, spec)) for name, spec in leaves.items()}
    stored = {name: fmt for name, (_, fmt) in meta.leaves.items()}
    here = {name: spec for name, spec in leaves.items() if where[name].addressable_devices}
    changed = {n for n in here if _is_changed(leaves[n], stored[n], formats[n], layout)}
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    casts: dict[str, Any] = {}
    for name, spec in here.items():
        whole = {name: abstract(spec, stored[name])}
        for key, part in jax.tree_util.tree_leaves_with_path(whole):
            sharding = None if name in changed else fit_sharding(where[name], part.shape)
            wanted[path_name(key)] = jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding)
            # A dtype of None is the stored one; naming it would send every leaf through a cast (a third of the time).
            plain = stored[name].is_plain and formats[name].is_plain and stored[name] != formats[name]
            casts[path_name(key)] = formats[name].dtype if plain else None
    parts = _read_params(path / PARAMS_FOLDER, wanted, casts)
    restored = {
        name: _gather(parts, name, spec, stored[name])
        if name in here
        else describe_leaf(spec, formats[name], where[name], layout)
        for name, spec in leaves.items()
    }
    narrowed = [
        n
        for n in here
        if formats[n].is_plain and stored[n].is_plain and may_overflow(stored[n].dtype, formats[n].dtype)
    ]
    if bad := [(n, f"overflows {formats[n]}") for n in narrowed if not jnp.isfinite(restored[n]).all()]:
        raise NonFiniteTensorsError(path, bad)
    for name in changed:
        spec, leaf = leaves[name], restored[name]
        if stored[name] != formats[name] and not (stored[name].is_plain and formats[name].is_plain):
            leaf = _round_anew(leaf, spec, formats[name])
        restored[name] = put_leaf(leaf, spec, where[name], layout)
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), [restored[name] for name in leaves])


def _check_leaves(path: Path, meta: StoreMeta, leaves: dict[str, ParamSpec]) -> None:
    """Holds the checkpoint's leaves against those that the model wants."""
    if missing := leaves.keys() - meta.leaves.keys():
        raise MissingTensorsError(path, [(name, "") for name in missing])
    if extra := meta.leaves.keys() - leaves.keys():
        raise ExtraTensorsError(path, [(name, "") for name in extra])
    shapes = {name: shape for name, (shape, _) in meta.leaves.items()}
    if bad := [
        (n, f"got {shapes[n]}, expected {s.shape}") for n, s in leaves.items() if shapes[n] != s.shape
    ]:
        raise MisshapenTensorsError(path, bad)


def _gather(parts: dict[str, Any], name: str, spec: ParamSpec, fmt: Format) -> Any:
    """Returns a leaf of its restored components."""
    whole = {name: abstract(spec, fmt)}
    return jax.tree_util.tree_map_with_path(lambda key, _: parts[path_name(key)], whole)[name]


def _is_changed(spec: ParamSpec, stored: Format, wanted: Format, layout: Layout | None) -> bool:
    """Returns whether a leaf lies otherwise on the devices than in the files, but for a cast of plain numbers."""
    if stored != wanted and not (stored.is_plain and wanted.is_plain):
        return True
    whole = abstract(spec, wanted)
    return layout is not None and layout.fill(spec, whole) != whole


def _round_anew(leaf: Any, spec: ParamSpec, fmt: Format) -> Any:
    """Returns a leaf of the host in another format, by way of float32."""
    wide = np.asarray(dequantize(leaf, jnp.dtype(jnp.float32)) if is_quantized(leaf) else leaf)
    return wide.astype(fmt.dtype) if fmt.is_plain else quantize(wide, spec, fmt)


def _format_name(weight: Any) -> str:
    return str(weight.format if is_quantized(weight) else weight.dtype)


def _file_sizes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _check_files(folder: Path, wanted: dict[str, int]) -> None:
    """Holds the files against the sizes that were written."""
    found = _file_sizes(folder)
    if absent := wanted.keys() - found.keys():
        raise MissingFilesError(folder, absent)
    if cut := [
        f"{name} ({found[name]} bytes of {size})" for name, size in wanted.items() if found[name] != size
    ]:
        raise CorruptFileError(folder, f"has files of another size than was written: {', '.join(cut)}")


def _write_params(path: Path, leaves: dict[str, jax.Array]) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(leaves))


def _read_params(
    path: Path, wanted: dict[str, jax.ShapeDtypeStruct], casts: dict[str, jnp.dtype | None]
) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    restore_args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=casts[name])
        if part.sharding is None
        else ocp.ArrayRestoreArgs(sharding=part.sharding, dtype=casts[name])
        for name, part in wanted.items()
    }
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            # Partial: leaves of which this process has nothing are not asked for.
            args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
            return checkpointer.restore(path, args=args)
    except (ValueError, KeyError, OSError) as error:  # orbax's and tensorstore's, for files that are damaged
        raise CorruptFileError(path, str(error)) from error


def _write_tokenizer(folder: Path, source: TensorSource) -> None:
    folder.mkdir()
    if source.kind == "gguf":
        metadata = {key: value for key, value in source.config.items() if key.startswith("tokenizer.")}
        (folder / GGUF_TOKENIZER_FILE).write_text(json.dumps(metadata))
        return
    for name in TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, folder / name)
