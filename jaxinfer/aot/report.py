"""A serving step compiled for a device that is not here, and what it will need."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.aot import hlo
from jaxinfer.aot.copies import Copy, Stored, clean_name, find_copies
from jaxinfer.aot.cost import Cost, measure
from jaxinfer.aot.targets import Target
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.arrays.sharding import num_shards
from jaxinfer.arrays.specs import FLOAT32_ROLES, flatten_specs, path_name
from jaxinfer.build import choose_buckets, default_stack_size, take_share
from jaxinfer.config import ModelConfig
from jaxinfer.kernels.attention.api import choose_attention
from jaxinfer.kernels.matmul.api import choose_matmul
from jaxinfer.model.decoder import Static, param_specs, stack_sizes
from jaxinfer.model.layout import lay_out
from jaxinfer.run_config import RunConfig
from jaxinfer.steps.compiled import Compiled, StepTable
from jaxinfer.steps.shape import Shape
from jaxinfer.steps.state import describe_state

SERVED = ("greedy", "sample")  # draws of a serving run that neither scores prompts nor pools them
_ROLES = {"matrix": "matrices", "embedding": "embedding", "head": "head"}


@dataclass(frozen=True)
class Workload:
    """What a step does.

    Attributes:
      rows: sequences whose pages the cache holds. context: tokens of each. page_size: Z, tokens a page.
      prefill: tokens of one prompt (of each share of the rows) that the step runs, or 0: it decodes a token of every
        row.
    """

    rows: int = 64
    context: int = 2048
    page_size: int = 16
    prefill: int = 0

    @property
    def width(self) -> int:
        """W, pages a row."""
        return -(-self.context // self.page_size)

    def shape(self, num_shares: int = 1) -> Shape:
        """Returns the step's shape.

        Args:
          num_shares: into which a mesh cuts the rows.
        """
        if self.prefill:
            return Shape(0, (num_shares, self.prefill), self.width)
        return Shape(self.rows, (0, 0), self.width)

    def __str__(self) -> str:
        return f"prefill {self.prefill}" if self.prefill else f"decode {self.rows} x {self.context}"


@dataclass(frozen=True)
class StepReport:
    """What a compiled step needs of each device.

    Attributes:
      fits: whether it fits into the device's memory. why: what the compiler said where it does not.
      seconds: to lower and compile.
      weights, cache, rest: bytes of its arguments. roles: of the weights, by role (`count_roles`).
      temporary, peak: bytes beside them, and at most in all.
      cost: of one run. model_flops: of this device's share of the model's products alone.
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
    roles: Mapping[str, int] = field(default_factory=dict)

    @property
    def arguments_ratio(self) -> float:
        """Bytes of all arguments over those of weights and cache."""
        return 1 + self.rest / (self.weights + self.cache)

    @property
    def moved_ratio(self) -> float:
        """Bytes read and written over those of weights and cache."""
        return self.cost.num_bytes / (self.weights + self.cache)

    @property
    def temporary_ratio(self) -> float:
        """Bytes of temporary memory over those of weights."""
        return self.temporary / self.weights

    @property
    def flops_ratio(self) -> float:
        """Products over the model's."""
        return self.cost.flops / self.model_flops


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
      cfg: the model. policy: number formats. target: the device.
      mesh: of its devices: of `parse_mesh`, over which the model is laid, or of `single_mesh`.
      workload: rows and tokens. attention, stack_size: as a run chooses them.

    Raises:
      ValueError: the model cannot lie over the mesh, and why.
    """
    table, state = describe_table(cfg, policy, mesh, workload, attention=attention, stack_size=stack_size)
    num_shares = table.num_shares
    weights, cache, _ = own = tuple(map(cut_share, state))
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = table.lower(workload.shape(num_shares))
    sizes = count_bytes(weights), count_bytes(cache)
    roles, flops = count_roles(cfg, weights), _model_flops(cfg, workload, num_shares) / mesh.size
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needs = re.search(r"\(([\d.]+[KMG])\) exceeds available \w+ \(([\d.]+[KMG])\)", str(error))
        why = "needs {} of {}iB".format(*needs.groups()) if needs else str(error).splitlines()[0]
        seconds = time.perf_counter() - began
        return StepReport(False, why, seconds, *sizes, 0, model_flops=flops, roles=roles)
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
        *sizes,
        int(memory.argument_size_in_bytes) - sum(sizes),
        int(memory.temp_size_in_bytes),
        peak,
        measure(module, _context_trips(module, own[1], workload, num_shares)),
        flops,
        tuple(find_copies(module, stored_arguments(cfg, own[0], own[1]))),
        roles,
    )


def describe_table(
    cfg: ModelConfig,
    policy: Policy,
    mesh: Mesh,
    workload: Workload,
    *,
    attention: str = "auto",
    stack_size: int = 0,
) -> tuple[StepTable, tuple[Any, Any, Any]]:
    """Returns the table that a run's steps are compiled by, and descriptions of its weights, cache and slots.

    Arguments and errors as for `compile_step`.
    """
    is_laid = "tensor" in mesh.axis_names
    layout = lay_out(cfg, policy, mesh) if is_laid else None
    num_shares = num_shards("rows", mesh=mesh) if is_laid else 1
    if workload.rows % num_shares:
        raise ValueError(
            f"rows: got {workload.rows}, which the mesh's {num_shares} shares of the rows must divide"
        )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        deal = layout.deal if layout else ()
        sizes = stack_sizes(cfg, stack_size or default_stack_size(cfg), policy, deal)
        pages = workload.rows // num_shares * workload.width, workload.page_size
        over = layout or NamedSharding(mesh, PartitionSpec())
        state = describe_state(cfg, policy, sizes, pages, (workload.rows, workload.context), over)
        own = layout.local if layout else cfg
        policy = replace(policy, matmul=choose_matmul("auto", policy, mesh.size)[0])
        chosen, _ = choose_attention(attention, own.attention, policy, mesh.size)
        static = Static(own, policy, chosen, workload.context)
        return StepTable(static, *state, mesh=mesh if layout else None), state


def compile_table(
    cfg: ModelConfig,
    policy: Policy,
    mesh: Mesh,
    workload: Workload,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Compiled]:
    """Compiles every executable that serving a workload would, as many at once as there are cores; by name.

    Args:
      cfg, policy, mesh: as for `compile_step`. workload: rows, context, and the most tokens of prompts in a step.
      say: is told of each finished executable.
    """
    table, _ = describe_table(cfg, policy, mesh, workload)
    config = RunConfig(
        max_num_seqs=workload.rows,
        max_num_batched_tokens=max(workload.prefill, workload.rows + 1),
        page_size=workload.page_size,
    )

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        own = take_share(config, table.num_shares)
        shapes = choose_buckets(own, workload.context).times(table.num_shares).shapes()
        table.compile(shapes, SERVED, say, ("recall",))
    return table.executables


def cut_share(tree: Any) -> Any:
    """Returns descriptions of arrays on a mesh as one device has them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype), tree
    )


def count_roles(cfg: ModelConfig, params: Any) -> dict[str, int]:
    """Returns the bytes of stacked parameters by role: matrices, embedding, head, the rest.

    Args:
      cfg: the model. params: of `stacked_shapes`, or one device's share of these.
    """
    roles = {_last(path): spec.role for path, spec in flatten_specs(param_specs(cfg))}
    counts: Counter[str] = Counter()
    for path, leaf in _leaves(params):
        role = roles.get(_last(path_name(path)), "matrix")  # q, k and v may lie joined
        counts["the rest" if role in FLOAT32_ROLES else _ROLES[role]] += count_bytes(leaf)
    return dict(counts)


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


def _context_trips(module: hlo.Module, cache: Any, workload: Workload, num_shares: int) -> float:
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
    rows = 1 if workload.prefill else workload.rows // num_shares
    blocks = rows * workload.context * cache[0].k.shape[-1] / max(gathered)
    return (blocks + 1) / 2 if workload.prefill else blocks


def _model_flops(cfg: ModelConfig, workload: Workload, num_shares: int) -> float:
    """Returns the operations that the model's products take: 2 a weight and token, and attention as far as it sees."""
    prompts = num_shares if workload.prefill else 0
    tokens = prompts * workload.prefill or workload.rows
    seen = prompts * workload.prefill * (workload.prefill + 1) / 2 or workload.rows * workload.context
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
    return 2 * tokens * matrices + 2 * head * (prompts or tokens) + attention
