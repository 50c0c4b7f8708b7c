"""From a RunConfig to an Engine: the only place where the two towers are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxinfer.arrays.account import tell_fitted, tell_weights
from jaxinfer.arrays.backend import backend
from jaxinfer.arrays.choose import choose_policy, warn_of_widening
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import is_quantized
from jaxinfer.arrays.sharding import check_processes, num_shards, parse_mesh, spans_hosts
from jaxinfer.arrays.specs import flatten_specs
from jaxinfer.config import ModelConfig
from jaxinfer.engine.budget import choose_preemption, count_host_pages, kv_pages, read_bytes
from jaxinfer.engine.calls import Buckets
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.host_pages import HostPages
from jaxinfer.engine.hosts import Hosts, current_hosts
from jaxinfer.engine.leading import BUILD, STEP, LeadingRunner, read_step
from jaxinfer.engine.runner import DeviceRunner
from jaxinfer.kernels.attention.api import choose_attention
from jaxinfer.kernels.matmul.api import choose_matmul
from jaxinfer.kernels.native.machine import keep_code
from jaxinfer.model.cache import copy_widths, describe_pages, page_bytes
from jaxinfer.model.decoder import Static, param_specs, stack_sizes
from jaxinfer.model.layout import Layout, describe_layout, lay_out
from jaxinfer.model.stages import describe_idleness
from jaxinfer.run_config import RunConfig
from jaxinfer.schedule.limits import PreemptionMode, SchedulerConfig
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.shares import make_scheduler
from jaxinfer.steps.bundle import Bundle
from jaxinfer.steps.compiled import StepTable
from jaxinfer.steps.keep import ExecutableStore
from jaxinfer.steps.state import make_state, stack_params
from jaxinfer.weights.fetch import default_cache_dir
from jaxinfer.weights.model import Model, Settle, open_model
from jaxinfer.weights.records import from_json, to_json

Say = Callable[[str], None]


# Half of it, a chunk of 32, beside 8 decode rows takes 2 to 3 times as long as the rows alone on two cores.
MIXED_TOKENS_CPU = 64


def choose_buckets(config: RunConfig, max_len: int) -> Buckets:
    """Returns the shapes to compile: a few, since each costs seconds before the first request.

    On a CPU decode rows grow by powers of two, and prefill shapes cover one long chunk, a short one and several short
    ones. Accelerators read the same weights for 64 rows as for 8, and compile a shape for half a minute: two counts of
    decode rows, one long chunk and several short ones, which are 16 executables where tokens are drawn and no more.
    """
    R, budget = config.max_num_seqs, config.max_num_batched_tokens
    is_cpu = backend() == "cpu"
    # One row is no cheaper than two.
    decode = sorted({min(max(R, 2), 2**i) for i in range(1, R.bit_length() + 1)})
    decode = decode if is_cpu else sorted({min(8, decode[-1]), decode[-1]})
    prefill = config.prefill_buckets
    if not prefill:
        short = min(64, budget)
        prefill = ((1, short),) * is_cpu + ((min(R, budget // short), short), (1, budget))
    width = -(-max_len // config.page_size)
    mixed = (decode[-1],) if R > 1 else ()
    most = mixed_tokens(config)
    mixing = None
    if most is not None and not config.prefill_buckets:
        half = -(-most // 2)  # of `SchedulerConfig.mixed_tokens`
        mixing = tuple(sorted({(1, most), (1, half), (2, half)})) if most > 1 else ((1, 1),)
    return Buckets(tuple(decode), tuple(sorted(set(prefill))), width, mixed, config.num_decode_steps, mixing)


def mixed_tokens(config: RunConfig) -> int | None:
    """Returns the most tokens of prompts in a step that decodes too, None for no limit but the step's.

    Buckets that a run names are for pieces of their size: fewer tokens would only be padded up to it.
    """
    most = config.mixed_prefill_tokens
    if most is None and backend() == "cpu" and not config.prefill_buckets:
        most = MIXED_TOKENS_CPU
    return min(most, config.max_num_batched_tokens) if most else None


def plan_memory(
    config: RunConfig, cfg: ModelConfig, policy: Policy, say: Say, device_bytes: int | None = None
) -> tuple[int, int]:
    """Returns the pages of the cache and the longest sequence, and says what the memory buys.

    Args:
      config: of one share of the rows. cfg: one device's share. policy: of the run. say: is told.
      device_bytes: memory of a device that is not here, None for what is free on this process's.

    Raises:
      ValueError: a sequence longer than the model was made for, or a cache too small for one.
    """
    max_len = config.max_model_len or cfg.max_len
    if max_len > cfg.max_len:
        raise ValueError(
            f"max_model_len: got {max_len}, but the model was made for {cfg.max_len} tokens; give at most that"
        )
    Z = config.page_size
    each = page_bytes(cfg, policy, Z)
    for_one = -(-max_len // Z)
    pages = kv_pages(config.kv_memory, each, for_one * config.max_num_seqs, for_one, device_bytes)
    if pages < for_one:
        if config.max_model_len is not None:
            raise ValueError(
                f"kv_memory: {config.kv_memory} buys {pages} pages, but a sequence of max_model_len = {max_len} "
                f"tokens needs {for_one}; raise kv_memory to {for_one * each} bytes or lower max_model_len to "
                f"{pages * Z}"
            )
        max_len = pages * Z
        say(f"max_model_len {max_len}: cut from the model's {cfg.max_len} to what the cache holds")
    say(
        f"KV cache {describe_pages(cfg, policy)}: {pages} pages of {Z} tokens = {pages * Z} tokens in "
        f"{pages * each / 2**20:.0f} MiB; "
        f"{pages // -(-max_len // Z)} requests at the full length of {max_len}, "
        f"at most {config.max_num_seqs} rows at once"
    )
    return pages, max_len


def pick_kernels(
    config: RunConfig, cfg: ModelConfig, policy: Policy, num_devices: int, say: Say
) -> tuple[Policy, str]:
    """Returns the policy with what multiplies rows by weights, and what attends, and says which and why."""
    matmul, why = choose_matmul(config.matmul, policy, num_devices)
    say(f"weights are multiplied by {matmul} kernels ({why})")
    attention, why = choose_attention(config.attention, cfg.attention, policy, num_devices)
    say(f"attention by {attention} kernels ({why})")
    return replace(policy, matmul=matmul), attention


class Prepared(NamedTuple):
    """What a run has on its devices, and what its scheduler must know of it; alike on every host.

    Attributes:
      state: params, cache, slots, table, buckets and host pages, as a `DeviceRunner` takes them.
      num_pages: of each of ``num_shares`` shares of the rows. max_len: the longest sequence.
      num_host_pages: in the host's memory. preemption: what becomes of rows that give way.
    """

    state: tuple[Any, ...]
    num_pages: int
    num_shares: int
    max_len: int
    num_host_pages: int
    preemption: PreemptionMode


def build_engine(config: RunConfig, model: Model | None = None, say: Say = lambda line: None) -> Engine:
    """Loads a model, takes the memory, compiles the steps and returns an engine that is ready to serve.

    In process 0 of several that joined (`jaxinfer.engine.hosts.join`) it has the others do the same, see `follow`.

    Args:
      config: the run.
      model: opened already (`open_model`); None opens ``config.model``.
      say: is told what was chosen and why, a line at a time.

    Raises:
      ValueError: what is wrong with the configuration or (CheckpointError) with the checkpoint, named.
      FetchError: no such model, or it cannot be brought here.
    """
    hosts = current_hosts()
    model = model or open_model(config.model)
    if hosts is not None:
        hosts.send(BUILD, to_json(replace(config, model=model.name)))
    ready = prepare(config, model, say)
    buckets = ready.state[4]
    runner = DeviceRunner(*ready.state) if hosts is None else LeadingRunner(hosts, *ready.state)
    limits = scheduler_config(config, buckets, ready.max_len, ready.preemption)
    pools = [PagePool(ready.num_pages, config.page_size) for _ in range(ready.num_shares)]
    scheduler = make_scheduler(limits, pools, config.enable_prefix_caching, ready.num_host_pages)
    return Engine(
        scheduler,
        runner,
        model.tokenizer,
        vocab_size=model.cfg.vocab_size,
        eos_ids=model.defaults.eos_ids,
        draws=config.draws,
        check=runner.device.slots.caps.check,
    )


def follow(hosts: Hosts, say: Say = lambda line: None) -> None:
    """Does what process 0 does, in any other process, until process 0 says goodbye.

    Args:
      hosts: that this process joined. say: see `build_engine`.

    Raises:
      ValueError, FetchError: see `build_engine`.
    """
    runner: DeviceRunner | None = None
    while (frame := hosts.receive()).kind != "bye":
        if frame.kind == BUILD:
            config = from_json(RunConfig, frame.content)
            runner = None  # what it held makes room
            runner = DeviceRunner(*prepare(config, open_model(config.model), say).state)
        elif frame.kind == STEP and runner is not None:
            with hosts.ending_all():
                runner.repeat(read_step(frame))
        else:
            hosts.fail(f"process 0 sent {frame.kind!r}, which this version does not know here")


def prepare(config: RunConfig, model: Model, say: Say) -> Prepared:
    """Loads a model, takes the memory and compiles the steps; see `build_engine`."""
    cfg = model.cfg
    policy = settle_policy(config, cfg, model.settle, model.policy, say)
    store = open_store(config, say)
    keep_code(store)
    laid = lay_run(config, cfg, policy, say)
    layout, sizes, buckets = laid.layout, laid.sizes, laid.buckets
    if hosts := current_hosts():
        steps = repr((laid.static, sizes, buckets))
        hosts.require_same(policy=str(policy), pages=str(laid.num_pages), steps=steps)
    pages, rows = (laid.num_pages, config.page_size), (config.max_num_seqs, laid.max_len)
    shapes, cache, slots = make_state(cfg, policy, sizes, pages, rows, layout)
    each = page_bytes(layout.whole if layout else cfg, policy, config.page_size)
    num_host_pages = count_host_pages(config.host_cache_bytes, each)
    num_weights = sum(w.size for w in jax.tree.leaves(shapes["stacks"], is_leaf=is_quantized))
    wanted = config.preemption_mode, config.page_size
    preemption, why = choose_preemption(*wanted, num_host_pages, each, num_weights)
    if num_host_pages:
        say(f"host cache: {num_host_pages} pages; preemption by {preemption} ({why})")
    table = StepTable(laid.static, shapes, cache, slots, store, layout.mesh if layout else None)
    with ThreadPoolExecutor(1) as pool:  # shapes are enough to compile: weights are read meanwhile
        compiling = pool.submit(table.compile, buckets.shapes(), config.draws, say, extras_of(config))
        params = stack_params(model.load(policy, layout, None), sizes, layout)
        compiling.result()
    room = copy_widths(cache), laid.num_pages, table
    host_pages = HostPages(num_host_pages, *room) if num_host_pages else None
    state = params, cache, slots, table, buckets, host_pages
    return Prepared(state, laid.num_pages, laid.num_shares, laid.max_len, num_host_pages, preemption)


def settle_policy(
    config: RunConfig, cfg: ModelConfig, settle: Settle, converted: str | None, say: Say
) -> Policy:
    """Returns a run's policy with the very format of every parameter, and says what was chosen and why.

    Args:
      config: the run. cfg: the model. settle, converted: see `Model`. say: is told.
    """
    policy, reason = choose_policy(config.policy, converted)
    say(f"model {config.model}: {cfg.family}, {cfg.num_layers} layers; policy {policy} ({reason})")
    specs = param_specs(cfg)
    policy.check_model([path for path, _ in flatten_specs(specs)], cfg.tied)
    fitted = tell_fitted(specs, policy)
    policy, notes = settle(policy)
    for note in (*fitted, *notes, tell_weights(specs, policy), *warn_of_widening(policy)):
        say(note)
    return policy


class Laid(NamedTuple):
    """A run as it lies on its devices before anything of it is there; alike on every host.

    Attributes:
      layout: over its mesh, None for one device. num_shares: of the rows.
      static: what steps are compiled for. sizes: layers in each stack. buckets: shapes of steps.
      num_pages: P, of each share. max_len: the longest sequence.
    """

    layout: Layout | None
    num_shares: int
    static: Static
    sizes: tuple[int, ...]
    buckets: Buckets
    num_pages: int
    max_len: int


def lay_run(
    config: RunConfig,
    cfg: ModelConfig,
    policy: Policy,
    say: Say,
    devices: Sequence[Any] | None = None,
    device_bytes: int | None = None,
) -> Laid:
    """Returns how a run lies on its devices, and says what was chosen and why.

    Args:
      config: the run. cfg: the model. policy: settled. say: is told.
      devices, device_bytes: those that are compiled for, and the memory of one; None for this process's.
    """
    layout, num_shares = lay_over_mesh(config, cfg, policy, say, devices)
    share, own = (layout.local if layout else cfg), take_share(config, num_shares)
    num_pages, max_len = plan_memory(own, layout.share if layout else cfg, policy, say, device_bytes)
    buckets = choose_buckets(own, max_len).times(num_shares)
    chosen, attention = pick_kernels(config, share, policy, layout.mesh.size if layout else 1, say)
    size = config.stack_size or default_stack_size(cfg)
    sizes = tuple(stack_sizes(cfg, size, policy, layout.deal if layout else ()))
    static = Static(share, chosen, attention, max_len)
    return Laid(layout, num_shares, static, sizes, buckets, num_pages, max_len)


def extras_of(config: RunConfig) -> list[str]:
    """Returns what a run's requests need beside steps and draws; see `StepTable.compile`."""
    has_host_pages = read_bytes("host_cache_bytes", config.host_cache_bytes) > 0
    extras = ["recall"] if config.enable_prefix_caching or has_host_pages else []
    return extras + ["copies"] * has_host_pages


def lay_over_mesh(
    config: RunConfig, cfg: ModelConfig, policy: Policy, say: Say, devices: Sequence[Any] | None = None
) -> tuple[Layout | None, int]:
    """Returns how a model lies over a run's mesh, None for one device, and into how many shares its rows are cut.

    Raises:
      ValueError: a mesh that there is not, or that the model or the run cannot have, and why.
    """
    mesh = parse_mesh(config.mesh, devices)
    check_processes(mesh, config.mesh)
    if spans_hosts(mesh) and read_bytes("host_cache_bytes", config.host_cache_bytes):
        raise ValueError(
            f"host_cache_bytes: got {config.host_cache_bytes!r} with {jax.process_count()} processes: a page lies in "
            "parts on several hosts, and is not copied to one; set it to 0"
        )
    if mesh is None:
        return None, 1
    num = num_shards("rows", mesh=mesh)
    wrong = {
        "max_num_seqs": config.max_num_seqs % num > 0,
        "host_cache_bytes": num > 1 and read_bytes("host_cache_bytes", config.host_cache_bytes) > 0,
        "prefill_buckets": any(rows % num for rows, _ in config.prefill_buckets),
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ValueError(
            f"{name}: got {getattr(config, name)!r} with mesh {config.mesh!r}, which cuts rows into {num} shares (data "
            "times expert): they must divide max_num_seqs and the rows of prefill_buckets, and there is no host cache "
            "beside them"
        )
    layout = lay_out(cfg, policy, mesh)
    say(describe_layout(layout, cfg) + (f"; {num} shares of rows and pages" if num > 1 else ""))
    if (stages := mesh.shape["stage"]) > 1:
        say(describe_idleness(stages, config.max_num_seqs // num, config.num_decode_steps))
    return layout, num


def take_share(config: RunConfig, num_shares: int) -> RunConfig:
    """Returns the run of one share of the rows."""
    rows = config.max_num_seqs // num_shares
    return replace(
        config,
        max_num_seqs=rows,
        max_num_batched_tokens=max(-(-config.max_num_batched_tokens // num_shares), rows + 1),
        prefill_buckets=tuple((rows // num_shares, tokens) for rows, tokens in config.prefill_buckets),
    )


def scheduler_config(
    config: RunConfig, buckets: Buckets, max_len: int, preemption: PreemptionMode
) -> SchedulerConfig:
    """Returns a run's limits as the scheduler has them."""
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_len=max_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk=max(T for _, T in buckets.prefill),
        mixed_prefill_tokens=mixed_tokens(config),
        num_decode_steps=config.num_decode_steps,
        scheduling_policy=config.scheduling_policy,
        ageing=config.ageing_s,
        window=config.window_ms / 1e3,
        max_num_waiting=config.max_num_waiting,
        preemption_mode=preemption,
    )


def open_store(config: RunConfig, say: Say) -> ExecutableStore | None:
    """Returns where a run has its executables: its bundle, or where it keeps them between runs."""
    if config.bundle:
        return Bundle(Path(config.bundle).expanduser())
    if not (kept := config.compile_cache):
        return None
    folder = default_cache_dir() / "executables" if kept is True else Path(kept).expanduser()
    return ExecutableStore(folder, say)


def default_stack_size(cfg: ModelConfig) -> int:
    """Returns layers a scan: one scan on TPU, unrolled elsewhere, where a scan copies each layer's weights.

    Llama-3-8B compiled for an H100, 64 rows: 0.405 GiB temporary in one scan, 0.009 GiB unrolled; on TPUs slices fuse.
    """
    return cfg.num_layers if backend() == "tpu" else 1
