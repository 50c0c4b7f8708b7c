"""Precision as an argument: one record names the number format of every role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import jax.numpy as jnp

from jaxinfer.arrays.formats import FLOAT32, PLAIN, Format
from jaxinfer.arrays.specs import FLOAT32_ROLES, ParamSpec, Role

# Pages of int4: groups of 32 hold 3.56 times bfloat16's tokens and raise SmolLM2's perplexity by 3.7 %, groups of 64
# hold 3.76 times. A head of 64 numbers must have two groups at least for their errors to cancel (`pages.encode`).
KV_INT4 = "int4:g32"
# A word in place of settings.
ALIASES = {
    "w8a16": "weights=int8",
    # Rotated, or a row's few large numbers set the scale of all: perplexity x 1.058 of bfloat16's (SmolLM2).
    "w8a8": "weights=int8:rot,act=int8",
    "w4a16": "weights=int4:g64",
    "w4a8": "weights=int4:g64,act=int8",
    "kv8": "kv=int8",
    "kv4": f"kv={KV_INT4}",
}
_KV_DEFAULTS = {"int4": KV_INT4}
ROLES = ("weights", "embedding", "head", "kv", "act", "compute")
_ROLE_ALIASES = {"lm_head": "head", "embed": "embedding", "activations": "act"}
_ACT_ALIASES = {"fp8": "fp8_e4m3", "e4m3": "fp8_e4m3"}
# Which weights a format of activations multiplies.
ACTS: dict[str, tuple[str, ...]] = {
    "compute": (),
    "int8": ("int8", "int4"),
    "fp8_e4m3": ("fp8_e4m3", "fp8_e5m2"),
}


@dataclass(frozen=True)
class Policy:
    """Number formats by role.

    Attributes:
      weights: matrices of the layers. embedding, head: the two tables (one where the model ties them).
      kv: pages of the KV cache.
      act: what rows are rounded to before they meet a weight of codes: ``int8`` or ``fp8_e4m3``, dynamically with a
        scale a row; ``compute`` leaves them.
      compute: activations between matmuls, and the operands of matmuls that are not of ``act``.
      keep: whether weights lie as their checkpoint has them (``weights=checkpoint``), those that it holds in full in
        ``compute``. Such a policy is settled against a checkpoint (`weights.settle`) before it says a format.
      exceptions: patterns of dotted paths (`fnmatch`, or what a path begins with) and the format of what they match;
        of several that match, the last holds.
      matmul: what multiplies rows by weights, chosen by the build (`kernels.matmul.api`); not part of the text.
    Sums inside matmuls, norms, softmax, rope angles, router, logits and sampling are always float32.
    """

    weights: Format = FLOAT32
    embedding: Format = FLOAT32
    head: Format = FLOAT32
    kv: Format = FLOAT32
    act: str = "compute"
    compute: str = "float32"
    exceptions: tuple[tuple[str, Format], ...] = ()
    keep: bool = False
    matmul: str = "xla"

    def __post_init__(self) -> None:
        if self.compute not in PLAIN:
            raise ValueError(f"compute: got {self.compute}; must be one of {', '.join(PLAIN)}")
        if self.act not in ACTS:
            raise ValueError(f"act: got {self.act!r}; must be one of {', '.join(ACTS)}")
        kinds = ACTS[self.act]
        coded = {f.kind: f for f in self.weight_formats() if not f.is_plain}
        if kinds and not self.keep and (not coded or not coded.keys() <= set(kinds)):
            got = ", ".join(map(str, coded.values())) or str(self.weights)
            raise ValueError(
                f"act={self.act} multiplies weights of {' or '.join(kinds)}, got {got}; take such weights, or "
                "act=compute, which multiplies all"
            )
        if self.kv.offset:
            raise ValueError(f"kv: got {self.kv}; pages have no offsets, leave `zero` out")
        if self.kv.rotation is not None:
            raise ValueError(f"kv: got {self.kv}; keys of codes are always rotated, leave `rot` out")
        if self.kv.scale:
            raise ValueError(
                f"kv: got {self.kv}; the scales of pages cannot be chosen, leave their dtype out"
            )

    @classmethod
    def parse(cls, text: str, base: str = "float32") -> Policy:
        """Returns the policy that a string names.

        Args:
          text: settings and words with commas between: ``role=format`` of the roles above, ``pattern=format`` of an
            exception (``layers.0=bf16``, ``*.down=int8``), ``weights=checkpoint``, one plain format for all roles
            (``bf16``), or a word of `ALIASES` (``w8a8,kv8``).
          base: the plain format of what the string leaves open.

        A role left out: compute takes the format of plain weights, else ``base``; weights and kv take compute's;
        embedding and head each other's, else the weights', but int8 where those have 4 bits: rounding the tables to 4
        costs more than the bytes are worth.

        Raises:
          ValueError: an unknown role or format, or a combination that cannot be, with the ones that exist.
        """
        given: dict[str, str] = {}
        for name, value in _settings(text):
            if name in given:
                raise ValueError(f"policy {text!r}: {name!r} is named twice")
            given[name] = value
        everything = given.pop("", None)
        if everything is not None:
            given = {"weights": everything, "compute": everything} | given
        keep = given.get("weights", "").lower() == "checkpoint"
        if keep:
            del given["weights"]
        formats = {
            name: Format.parse(_KV_DEFAULTS.get(value.lower(), value) if name == "kv" else value, name)
            for name, value in given.items()
            if name not in ("act", "compute")
        }
        weights = formats.pop("weights", None)
        compute = given.get("compute")
        compute = Format.parse(compute or (str(weights) if weights and weights.is_plain else base), "compute")
        weights = weights or compute
        table = Format("int8") if weights.bits == 4 else weights
        embedding, head = formats.pop("embedding", None), formats.pop("head", None)
        act = given.get("act", "compute").lower()
        return cls(
            weights=weights,
            embedding=embedding or head or table,
            head=head or embedding or table,
            kv=formats.pop("kv", compute),
            act=_ACT_ALIASES.get(act, act),
            compute=str(compute),
            exceptions=tuple(formats.items()),
            keep=keep,
        )

    def format_of(self, path: str, spec: ParamSpec) -> Format:
        """Returns the format in which a parameter lies in memory.

        Args:
          path: its dotted path, ``layers.3.attn.q``.
          spec: its description; norms, biases and routers are float32.
        """
        if spec.role in FLOAT32_ROLES:
            return FLOAT32
        for pattern, fmt in reversed(self.exceptions):
            if _matches(pattern, path):
                return fmt
        return {"embedding": self.embedding, "head": self.head}.get(spec.role, self.weights)

    def keeps(self, path: str, spec: ParamSpec) -> bool:
        """Returns whether a parameter lies as its checkpoint has it: so ``weights=checkpoint``, but for exceptions."""
        if not self.keep or spec.role in FLOAT32_ROLES:
            return False
        role = {"embedding": self.embedding, "head": self.head}.get(spec.role, self.weights)
        return role == self.weights and not any(_matches(pattern, path) for pattern, _ in self.exceptions)

    def check_model(self, paths: Iterable[str], tied: bool) -> None:
        """Holds the policy against a model.

        Args:
          paths: of its parameters. tied: whether the embedding is the head.

        Raises:
          ValueError: an exception that matches nothing, or two formats for one table.
        """
        paths = list(paths)
        for pattern, _ in self.exceptions:
            if not any(_matches(pattern, path) for path in paths):
                raise ValueError(
                    f"policy: {pattern!r} matches no parameter; paths are such as {paths[0]}, layers.0.attn.q, *.down"
                )
        if tied and self.embedding != self.head:
            raise ValueError(
                f"policy: the model's head is its embedding, got embedding={self.embedding} and head={self.head}; "
                "name one of them, or both alike"
            )

    def dtype_of(self, role: Role) -> jnp.dtype:
        """Returns the dtype in which a parameter of ``role`` lies in memory, exceptions apart."""
        return self.format_of("", ParamSpec((), (), role)).dtype

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations."""
        return PLAIN[self.compute].dtype

    @property
    def kv_dtype(self) -> jnp.dtype:
        """The dtype of numbers in KV pages."""
        return self.kv.dtype

    def __str__(self) -> str:
        settings = {role: str(getattr(self, role)) for role in ("weights", "kv", "compute")}
        if self.keep:
            settings["weights"] = "checkpoint"
        if {*settings.values(), str(self.embedding), str(self.head)} == {
            self.compute
        } and not self.exceptions:
            return self.compute
        settings |= {role: str(getattr(self, role)) for role in ("embedding", "head")}
        settings |= {"act": self.act} | {pattern: str(fmt) for pattern, fmt in self.exceptions}
        left_out = Policy.parse(f"weights={settings['weights']},compute={settings['compute']}")
        for role in ("embedding", "head"):
            if self.embedding == self.head == getattr(left_out, role):
                del settings[role]
        if self.act == "compute":
            del settings["act"]
        return ",".join(f"{name}={value}" for name, value in settings.items())

    def weight_formats(self) -> list[Format]:
        """Returns the formats that weights may have, some of them several times."""
        return [self.weights, self.embedding, self.head, *(fmt for _, fmt in self.exceptions)]


def _settings(text: str) -> Iterable[tuple[str, str]]:
    """Yields the settings of a policy's string by name; a plain format for all roles has the name ""."""
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name.lower() in ALIASES and not equals:
            yield from _settings(ALIASES[name.lower()])
        elif not equals:
            if not (fmt := Format.parse(name, "policy")).is_plain:
                raise ValueError(
                    f"policy: {name} is no format for all roles; say weights={name}, or a word: {', '.join(ALIASES)}"
                )
            yield "", str(fmt)
        else:
            name = _ROLE_ALIASES.get(name, name)
            if name not in ROLES and not name.startswith(("layers.", "embed.", "head.")) and "*" not in name:
                raise ValueError(
                    f"policy {text!r}: role {name!r} is unknown; roles: {', '.join(ROLES)}; or a pattern of "
                    "parameters, as layers.0 or *.down"
                )
            yield name, value


def _matches(pattern: str, path: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
