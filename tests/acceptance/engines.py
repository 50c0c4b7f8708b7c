"""Whole engines on tiny checkpoints, and cheap copies of them: executables are compiled once and shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxinfer.arrays.precision import Policy
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.host_pages import HostPages
from jaxinfer.engine.runner import DeviceRunner
from jaxinfer.llm import LLM
from jaxinfer.model.cache import copy_widths, init_cache
from jaxinfer.model.decoder import stack_layers
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.prefix import PrefixCache
from jaxinfer.schedule.scheduler import Scheduler
from jaxinfer.steps.slots import init_slots
from jaxinfer.weights.model import open_model
from tests.families.cases import load_case, write_checkpoint
from tests.text.vocabularies import word_level

TOY_VOCAB = 128
TOY_EOS = 2


def write_toy(folder: Path, case: str = "llama", **config: Any) -> Path:
    """Writes TOY, a random Llama of two layers, with the words ``w0 w1 ...`` as its vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    word_level(folder, [f"w{i}" for i in range(TOY_VOCAB)])
    toy = load_case(case)
    return write_checkpoint(folder, toy.make_arrays(), toy.config | {"max_position_embeddings": 256} | config)


def renew(
    llm: LLM,
    folder: Path | None = None,
    *,
    prefix_caching: bool = True,
    host_pages: int = 0,
    num_pages: int | None = None,
    **limits: Any,
) -> LLM:
    """Returns a door to a fresh engine over the executables of another: empty cache, slots, queue and counts.

    Args:
      llm: the other. folder: a checkpoint of the same shapes to open by the public loader; None takes the same one.
      prefix_caching, host_pages, num_pages: of the new one, which has no more pages than the other.
      limits: of `SchedulerConfig`, where they differ from the other's.
    """
    old, runner = llm.engine, llm.engine.runner
    assert isinstance(runner, DeviceRunner)
    params, table, pool = runner.device.params, runner._table, old.scheduler.pool
    config = replace(old.scheduler.config, **limits)
    cfg, policy = table.static.cfg, table.static.policy
    tokenizer, eos_ids, defaults = old.tokenizer, old.eos_ids, None
    sizes = [pages.k.shape[0] for pages in runner.device.cache]
    if folder is not None:
        model = open_model(str(folder))
        assert model.cfg == cfg
        params = stack_layers(model.load(Policy.parse(str(policy)), None, None), sizes)
        tokenizer, eos_ids, defaults = model.tokenizer, model.defaults.eos_ids, model.defaults
    cache = init_cache(cfg, policy, sizes, pool.num_pages, pool.page_size)
    slots = init_slots(config.max_num_seqs, config.max_len, cfg.vocab_size, runner.device.slots.caps)
    room = HostPages(host_pages, copy_widths(cache), pool.num_pages, table) if host_pages else None
    new_pool = PagePool(num_pages or pool.num_pages, pool.page_size)
    engine = Engine(
        Scheduler(config, new_pool, PrefixCache(new_pool, host_pages, prefix_caching)),
        DeviceRunner(params, cache, slots, table, runner.buckets, room),
        tokenizer,
        vocab_size=cfg.vocab_size,
        eos_ids=eos_ids,
        check=runner.device.slots.caps.check,
    )
    return LLM.from_engine(engine, defaults)
