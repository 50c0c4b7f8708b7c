"""A serving step compiled for a device that is not here, and what it will need."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.aot import hlo
from jaxinfer.aot.copies import Copy, Stored, clean_name, find_copies
from jaxinfer.aot.cost import Cost, measure
from jaxinfer.aot.targets import Target
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.arrays.specs import FLOAT32_ROLES, flatten_specs, path_name
from jaxinfer.build import default_stack_size
from jaxinfer.config import ModelConfig
from jaxinfer.kernels.attention.api import choose_attention
from jaxinfer.model.cache import cache_shapes
from jaxinfer.model.decoder import Static, param_specs, stack_sizes, stacked_shapes
from jaxinfer.steps.compiled import Shape, StepTable
from jaxinfer.steps.slots import init_slots


@dataclass(frozen=True)
class Workload:
    """What a step does.

    Attributes:
      rows: sequences whose pages the cache holds. context: tokens of each. page_size: Z, tokens a page.
      prefill: tokens of one prompt that the step runs, or 0: it decodes a token of every row.
    """

    rows: int = 64
    context: int = 2048
    page_size: int = 16
    prefill: int = 0

    @property
    def shape(self) -> Shape:
        """The step's shape."""
        width = -(-self.context // self.page_size)
        return Shape(0, (1, self.prefill), width) if self.prefill else Shape(self.rows, (0, 0), width)

    def __str__(self) -> str:
        return f"prefill {self.prefill}" if self.prefill else f"decode {self.rows} x {self.context}"


@dataclass(frozen=True)
class StepReport:
    """What a compiled step needs of each device.

    Attributes:
      fits: whether it fits into the device's memory. why: what the compiler said where it does not.
      seconds: to lower and compile.
      weights, cache, rest: bytes of its arguments. temporary, peak: bytes beside them, and at most in all.
      cost: of one run. model_flops: of the model's products alone.
      copies: of weights and cache, in memory.
    """

    fits: bool
    why: str
    seconds: float
    weights: int
    cache: int
    rest: int
    temporary: int = 0
    peak: int = 0
    cost: Cost = field(default_factory=Cost)
    model_flops: float = 0
    copies: tuple[Copy, ...] = ()


def compile_step(
    cfg: ModelConfig,
    policy: Policy,
    target: Target,
    mesh: Mesh,
    workload: Workload,
    *,
    attention: str = "auto",
    stack_size: int = 0,
) -> StepReport:
    """Compiles the step that serving runs, from shapes alone, and reads the executable.

    Args:
      cfg: the model. policy: number formats. target: the device. mesh: of its devices; all state lies on each.
      workload: rows and tokens. attention, stack_size: as a run chooses them.
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        sizes = stack_sizes(cfg, stack_size or default_stack_size(cfg), policy)
        width = workload.shape.width
        state = _place(
            (
                stacked_shapes(cfg, policy, sizes),
                cache_shapes(cfg, policy, sizes, workload.rows * width, workload.page_size),
                jax.eval_shape(lambda: init_slots(workload.rows, workload.context, cfg.vocab_size)),
            ),
            mesh,
        )
        chosen, _ = choose_attention(attention, cfg.attention, policy, mesh.size)
        static = Static(cfg, policy, chosen, workload.context)
        began = time.perf_counter()
        lowered = StepTable(static, *state).lower(workload.shape)
    weights, cache, _ = (count_bytes(part) for part in state)
    flops = _model_flops(cfg, workload)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needs = re.search(r"\(([\d.]+[KMG])\) exceeds available \w+ \(([\d.]+[KMG])\)", str(error))
        why = "needs {} of {}iB".format(*needs.groups()) if needs else str(error).splitlines()[0]
        return StepReport(False, why, time.perf_counter() - began, weights, cache, 0, model_flops=flops)
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    assert memory is not None, "TPUs and GPUs tell it"
    module = hlo.parse(compiled.as_text() or "")
    peak = int(memory.peak_memory_in_bytes)
    fits = peak <= target.described.memory_bytes
    return StepReport(
        fits,
        "" if fits else f"needs {peak / 2**30:.2f} of {target.described.memory_bytes / 2**30:.2f} GiB",
        seconds,
        weights,
        cache,
        int(memory.argument_size_in_bytes) - weights - cache,
        int(memory.temp_size_in_bytes),
        peak,
        measure(module, _context_trips(module, state[1], workload)),
        flops,
        tuple(find_copies(module, stored_arguments(cfg, state[0], state[1]))),
    )


def count_bytes(tree: Any) -> int:
    """Returns the bytes of some arrays' descriptions."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def stored_arguments(cfg: ModelConfig, params: Any, cache: Any) -> dict[str, Stored]:
    """Returns the arguments of a step that are not to be copied, by `argument_name`: matrices, pages and their scales.

    Args:
      cfg: the model. params: from `stacked_shapes`. cache: from `cache_shapes`.
    """
    small = {_last(path) for path, spec in flatten_specs(param_specs(cfg)) if spec.role in FLOAT32_ROLES}
    out = {}
    for path, leaf in _leaves(params):
        if _last(path_name(path)) in small:
            continue
        values = leaf.values if isinstance(leaf, Quantized) else leaf
        least = values.size // (values.shape[0] if path_name(path).startswith("stacks.") else 1)
        # Scales count where they are repeated for every code.
        for part, array in jax.tree_util.tree_leaves_with_path(leaf):
            name = f"params{jax.tree_util.keystr(path)}{jax.tree_util.keystr(part)}"
            out[clean_name(name)] = Stored(8 * array.dtype.itemsize, least)
    for number, pages in enumerate(cache):
        for part, pool in jax.tree_util.tree_leaves_with_path(pages):
            name = f"cache[{number}]{jax.tree_util.keystr(part)}"
            out[clean_name(name)] = Stored(8 * pool.dtype.itemsize, pool.size // pool.shape[0])
    return out


def _leaves(params: Any) -> Iterable[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: isinstance(node, Quantized))


def _last(path: str) -> str:
    return ".".join(path.split(".")[-2:])


def _place(tree: Any, mesh: Mesh) -> Any:
    """Returns descriptions of arrays that lie whole on every device of a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def _context_trips(module: hlo.Module, cache: Any, workload: Workload) -> float:
    """Returns how often the loop over the context runs, from what it gathers of the cache each time.

    Its end is known to the run only: decode rows go over the whole context, the tiles of a prompt on average over half.
    """
    gathered = [0]
    for computation in module.computations.values():
        for i in computation.instructions.values():
            if i.opcode == "while" and module.trips(i) is None:
                body = module.computations[i.get("body") or ""]
                inner = [
                    module.computations[name] for each in body.instructions.values() for name in each.called
                ]
                inside = [each for part in (body, *inner) for each in part.instructions.values()]
                gathered += [each.arrays[0].size for each in inside if each.opcode == "gather"]
    if not max(gathered):
        return 1
    rows = 1 if workload.prefill else workload.rows
    blocks = rows * workload.context * cache[0].k.shape[-1] / max(gathered)
    return (blocks + 1) / 2 if workload.prefill else blocks


def _model_flops(cfg: ModelConfig, workload: Workload) -> float:
    """Returns the operations that the model's products take: 2 a weight and token, and attention as far as it sees."""
    tokens = workload.prefill or workload.rows
    seen = (
        workload.prefill * (workload.prefill + 1) / 2
        if workload.prefill
        else workload.rows * workload.context
    )
    matrices = head = 0
    for path, spec in flatten_specs(param_specs(cfg)):
        size = 1
        for side in spec.shape:
            size *= side
        if spec.role == "head" or (cfg.tied and path == "embed.tokens"):
            head = size
        elif spec.role == "matrix":
            share = cfg.mlp.experts_per_token / cfg.mlp.num_experts if ".moe." in path else 1
            matrices += size * share
    a = cfg.attention
    attention = 4 * a.num_heads * a.head_dim * cfg.num_layers * seen
    return 2 * tokens * matrices + 2 * head * (1 if workload.prefill else tokens) + attention
