"""A model, opened: its configuration and tokenizer at once, its weights when they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxinfer.arrays.precision import Policy
from jaxinfer.config import GenerationDefaults, ModelConfig
from jaxinfer.model.decoder import param_specs
from jaxinfer.model.layout import Layout
from jaxinfer.text import Tokenizer
from jaxinfer.weights.families import find_family, read_config
from jaxinfer.weights.fetch import resolve_model
from jaxinfer.weights.load import Progress, load_params
from jaxinfer.weights.settle import settle, settle_formats
from jaxinfer.weights.source import TensorSource, find_kind, open_source

Settle = Callable[[Policy], tuple[Policy, tuple[str, ...]]]
Load = Callable[[Policy, Layout | None, Progress | None], Any]


@dataclass(frozen=True)
class Model:
    """A checkpoint whose headers are read.

    Attributes:
      name: as it was asked for. path: where it lies.
      cfg: the decoder. defaults: end tokens and sampling defaults.
      tokenizer: its own.
      settle: ``settle(policy)`` gives the policy that names the very format of every parameter, and what is to be said
        of it: which weights lie in few bits as the checkpoint has them. Shapes and `load` want a settled one.
      load: ``load(policy, layout, progress)`` gives the tree of `param_specs` on the devices of a mesh, filled up as
        the layout says, or on the default device for None. ``progress`` may be None, and a converted checkpoint, read
        by orbax at once, never calls it.
      source: the opened checkpoint, None for one that `jaxinfer convert` wrote.
      policy: that it was converted with, where its weights lie in few bits; None elsewhere.
    """

    name: str
    path: Path
    cfg: ModelConfig
    defaults: GenerationDefaults
    tokenizer: Tokenizer
    settle: Settle
    load: Load
    source: TensorSource | None
    policy: str | None = None


def open_model(name: str) -> Model:
    """Opens a model by registered name, local path or ``hf:org/name[@revision]``.

    Raises:
      FetchError: no such model, or it cannot be brought here. CheckpointError: what is wrong with its files.
    """
    path = resolve_model(name)
    if find_kind(path) == "store":
        return _open_stored(name, path)
    source = open_source(path)
    cfg, defaults = read_config(source)
    gguf = source.kind == "gguf"
    tokenizer = Tokenizer.from_gguf(source.config) if gguf else Tokenizer.from_folder(source.path)
    defaults = with_end_tokens(defaults, tokenizer)
    return Model(name, path, cfg, defaults, tokenizer, *_doors(source, cfg), source)


def _open_stored(name: str, path: Path) -> Model:
    from jaxinfer.weights import store  # orbax takes a second to import

    meta = store.read_meta(path)
    metadata = store.read_tokenizer_metadata(path)
    tokenizer = (
        Tokenizer.from_gguf(metadata) if metadata else Tokenizer.from_folder(path / store.TOKENIZER_FOLDER)
    )

    specs = param_specs(meta.config)

    def load(policy: Policy, layout: Layout | None, progress: Progress | None) -> Any:
        if layout is None:
            return store.restore(path, specs, policy=policy)
        where = layout.shardings(specs)
        return store.restore(path, specs, policy=policy, shardings=where, layout=layout)

    def settle_stored(policy: Policy) -> tuple[Policy, tuple[str, ...]]:
        return settle_formats(policy, specs, meta.look)

    defaults = with_end_tokens(meta.generation, tokenizer)
    return Model(name, path, meta.config, defaults, tokenizer, settle_stored, load, None, meta.policy)


def with_end_tokens(defaults: GenerationDefaults, tokenizer: Tokenizer) -> GenerationDefaults:
    """Returns the defaults with the tokenizer's end tokens where the checkpoint's configuration names none."""
    return defaults if defaults.eos_ids else replace(defaults, eos_ids=tokenizer.eos_ids)


def _doors(source: TensorSource, cfg: ModelConfig) -> tuple[Settle, Load]:
    """Returns how a model's policy is settled, and how its weights are loaded."""
    family = find_family(source)
    recipes, specs = family.mapping(cfg, source.kind, source.tensors), param_specs(cfg)

    def load(policy: Policy, layout: Layout | None, progress: Progress | None) -> Any:
        return load_params(
            source,
            specs,
            recipes,
            policy=policy,
            ignorable=family.ignorable(source.kind),
            shardings=layout.shardings(specs) if layout else None,
            layout=layout,
            progress=progress,
        )

    return lambda policy: settle(policy, source, specs, recipes), load
