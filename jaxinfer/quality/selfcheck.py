"""Whether this machine computes a model as it should: one run against another, layer by layer.

The oracle is the model in float32 on one device, each prompt whole, by the reference kernels. What must give the same
(other kernels, chunks, the cache, batches, meshes, the steps that an engine serves with) is held to `SAME`; number
formats, which round, to what they cost at most when they are right (`PRECISION_BOUNDS`).
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.sharding import parse_mesh
from jaxinfer.config import ModelConfig
from jaxinfer.kernels.attention.api import IMPLEMENTATIONS, choose_attention
from jaxinfer.kernels.matmul.api import choose_matmul
from jaxinfer.quality.trace import Prompts, Subject, Trace, Way, make_prompts, serve, trace

ORACLE = "reference"  # of IMPLEMENTATIONS
CHUNK = 5  # tokens of a chunk: divides neither pages nor prompts
# Of float32 runs that differ in the order of their sums only: toys stray by 1e-6, SmolLM2's 30 layers by 1.4e-5.
SAME = 1e-3
# The same, where both round numbers to codes or 16 bits: some fall to the other side of an edge (SmolLM2, kv8: 0.012).
SAME_CODES = 0.1
# The same, where activations are rounded to codes before every product (SmolLM2, native and XLA's kernels: 0.13).
SAME_ACTS = 0.4
# Policies that are compared with float32, and how far they may stray: see `Finding.errors`. Numbers that are laid,
# scaled or packed wrongly stray by 1. Measured on toys, SmolLM2 and Gemma 3:
PRECISION_BOUNDS = {
    "bfloat16": 0.1,
    "w8a16": 0.15,
    "w8a8": 0.4,
    "w4a16": 0.8,
    "weights=fp8": 0.4,
    "kv8": 0.1,
    "kv=fp8": 0.2,
    "kv4": 0.4,
}
OTHER_PRECISION = 0.8
# Rounding sends a token between two experts to the other one: the toy mixture strays by 0.11 in bfloat16, not by 0.01.
MIXTURE = 2.5


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
      model, check: what was run, and which of its runs. bound: of the errors.
      errors: by place (``embedding``, ``layer 0``, ..., ``logits``; ``prefill`` and ``decode`` are the logits of served
        steps), relative: the norm of a token's difference by the norm of what it should be. Of runs that should be the
        same it is the largest of all tokens, of precisions the root of the mean square.
      note: why it could not be run. is_failure: whether that is a fault, or a check that is not for this machine.
    """

    model: str
    check: str
    bound: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""
    is_failure: bool = False

    @property
    def strays(self) -> str | None:
        """The first place whose error is beyond the bound, None where all are within it."""
        return next((place for place, error in self.errors.items() if not error <= self.bound), None)

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong; a check that is not for this machine is not."""
        return not self.is_failure and self.strays is None

    @property
    def largest(self) -> tuple[str, float]:
        """The place of the largest error, and that error."""
        return max(self.errors.items(), key=lambda item: item[1])


Check = tuple[str, Callable[[], Finding]]


class SelfCheck:
    """The checks of one model on the devices that are here.

    Args:
      subject: the model. meshes: as `parse_mesh` reads them. policies: to hold against the reference.
      reference: policy of the oracle and of what must equal it. num_tokens: of the longest prompt.
    """

    def __init__(
        self,
        subject: Subject,
        meshes: Sequence[str] = (),
        policies: Sequence[str] = tuple(PRECISION_BOUNDS),
        reference: str = "float32",
        num_tokens: int = 23,
    ) -> None:
        self._subject = subject
        self._reference = Policy.parse(reference, base="float32")
        self._meshes, self._policies = meshes, policies
        self._prompts: Prompts = make_prompts(subject.cfg.vocab_size, 8, num_tokens)
        self._kept: dict[Way, Trace] = {}

    def checks(self) -> list[Check]:
        """Returns the checks by name, each a function that runs it; what fails is a finding, never an exception."""
        found: list[Check] = []
        for name, run in self._list():
            found.append((name, lambda name=name, run=run: self._guard(name, run)))
        return found

    def _list(self) -> Iterator[Check]:
        own = Way(self._reference)
        for name in IMPLEMENTATIONS:
            if name != ORACLE:
                yield f"attention {name} = {ORACLE}", lambda name=name: self._attention(name)
        if self._reference.kv.is_plain:
            yield f"chunks of {CHUNK} = whole", lambda: self._same(replace(own, chunk=CHUNK))
            yield "cached, token by token = whole", lambda: self._same(replace(own, chunk=1))
        yield "solo = batch", lambda: self._same(replace(own, solo=True))
        yield "served steps = layers", lambda: self._served(own)
        for mesh in self._meshes:
            over = f"mesh {mesh}"
            yield f"{over} = single", lambda mesh=mesh: self._same(replace(own, mesh=parse_mesh(mesh)))
            yield f"{over}, served steps", lambda mesh=mesh: self._served(replace(own, mesh=parse_mesh(mesh)))
        for text in self._policies:
            yield f"precision {text}", lambda text=text: self._precision(text)
            if not Policy.parse(text, base="bfloat16").kv.is_plain:
                name = f"attention = {ORACLE}, {text}"
                yield name, lambda text=text: self._coded_pages(text)
        for text in dict.fromkeys((str(self._reference), "w8a8")):
            yield f"matmul native = xla, {text}", lambda text=text: self._native(text)

    def _guard(self, name: str, run: Callable[[], Finding]) -> Finding:
        try:
            return replace(run(), model=self._subject.name, check=name)
        except _NotHere as reason:
            return Finding(self._subject.name, name, note=str(reason))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            note = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            return Finding(self._subject.name, name, note=note, is_failure=True)

    def _trace(self, way: Way) -> Trace:
        return trace(self._subject, self._prompts, way)

    def _oracle(self) -> Trace:
        way = Way(self._reference, ORACLE)
        if way not in self._kept:
            self._kept[way] = self._trace(way)
        return self._kept[way]

    def _compare(self, got: Trace, wanted: Trace, bound: float, mean: bool = False) -> Finding:
        live = self._prompts.live
        places = ["embedding", *(f"layer {i}" for i in range(len(wanted.streams) - 1)), "logits"]
        pairs = zip([*got.streams, got.logits], [*wanted.streams, wanted.logits], strict=True)
        errors = [measure_error(one[live], other[live], mean) for one, other in pairs]
        return Finding("", "", bound, dict(zip(places, errors, strict=True)))

    def _same(self, way: Way) -> Finding:
        return self._compare(self._trace(way), self._oracle(), self._bound(way.policy))

    def _bound(self, policy: Policy) -> float:
        if policy.act != "compute":
            return SAME_ACTS
        return SAME if policy.compute == str(policy.kv) == "float32" else SAME_CODES

    def _attention(self, name: str) -> Finding:
        try:
            choose_attention(name, self._subject.cfg.attention, self._reference)
        except ValueError as error:
            raise _NotHere(str(error)) from None
        return self._same(Way(self._reference, name))

    def _served(self, way: Way) -> Finding:
        last = np.arange(len(self._prompts.lengths)), self._prompts.lengths - 1
        wanted = self._oracle().logits[last]
        found = zip(("prefill", "decode"), serve(self._subject, self._prompts, way), strict=True)
        errors = {name: measure_error(logits, wanted) for name, logits in found}
        return Finding("", "", self._bound(way.policy), errors)

    def _precision(self, text: str) -> Finding:
        way = Way(Policy.parse(text, base="bfloat16"))
        bound = PRECISION_BOUNDS.get(text, OTHER_PRECISION)
        if self._subject.cfg.mlp.num_experts:
            bound *= MIXTURE
        return self._compare(self._trace(way), self._oracle(), bound, mean=True)

    def _coded_pages(self, text: str) -> Finding:
        policy = replace(Policy.parse(text, base="bfloat16"), compute="float32")
        one, other = (self._trace(Way(policy, name)) for name in ("auto", ORACLE))
        return self._compare(one, other, self._bound(policy))

    def _native(self, text: str) -> Finding:
        policy = Policy.parse(text, base="float32")
        try:
            choose_matmul("native", policy)
        except ValueError as error:
            raise _NotHere(str(error)) from None
        ways = [Way(policy, ORACLE, matmul) for matmul in ("native", "xla")]
        one, other = (self._trace(way) for way in ways)
        return self._compare(one, other, self._bound(policy))


class _NotHere(Exception):
    """A check that is not for this machine, and why."""


def measure_error(got: np.ndarray, wanted: np.ndarray, mean: bool = False) -> float:
    """Returns how far vectors are from what they should be, see `Finding.errors`; infinite for what is not finite.

    Args:
      got: ``[M, X]`` float32. wanted: likewise. mean: the root of the mean square in place of the largest.
    """
    off = np.linalg.norm((got - wanted).astype(np.float64), axis=-1)
    each = off / np.maximum(np.linalg.norm(wanted.astype(np.float64), axis=-1), 1e-30)
    error = math.sqrt(np.mean(each**2)) if mean else float(each.max())
    return error if math.isfinite(error) else math.inf


def natural_meshes(cfg: ModelConfig, num_devices: int) -> list[str]:
    """Returns a few meshes that a model can lie over on some devices: their halves and products; none on one."""
    ways = [n for n in (2, 4, 8, 16, 32, 64) if n <= num_devices]
    if not ways:
        return []
    most = ways[-1]
    meshes = [f"tensor={most}", f"data={min(most, 8)}", f"data=2,tensor={most // 2}" if most > 2 else ""]
    experts = [n for n in ways if cfg.mlp.num_experts and cfg.mlp.num_experts % n == 0]
    if experts:
        meshes.append(f"expert={experts[-1]}")
    if len(experts) and most > 2:
        meshes.append(f"expert=2,tensor={most // 2}")
    return list(dict.fromkeys(filter(None, meshes)))
