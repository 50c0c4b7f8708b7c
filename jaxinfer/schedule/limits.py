"""Limits of the scheduler: what a step may hold, and how it chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.policies import POLICIES
from jaxinfer.schedule.request import RequestRefused, RequestSpec

PreemptionMode = Literal["recompute", "swap"]


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step, and the policy.

    Attributes:
      max_num_seqs: R, slots. max_len: longest prompt plus output in tokens.
      max_num_batched_tokens: most tokens a step, decode rows first, prefill in what is left.
      prefill_chunk: most tokens of one prefill piece, None for no limit but the step's.
      mixed_prefill_tokens: most tokens of prefill in a step that decodes too, so that streams do not stall, see
        `mixed_tokens`; None for no limit but the step's.
      max_prefill_pieces: most pieces a step, None for no limit.
      num_decode_steps: tokens that decode rows make without return to the host when nothing else is to be done.
      scheduling_policy: of `POLICIES`. ageing: seconds of waiting that weigh as much as a level of priority.
      window: seconds between two ferries.
      max_num_waiting: most sequences that wait, None for no limit.
      preemption_mode: what becomes of the pages of a row that gives way: computed anew, or swapped to the host.
    """

    max_num_seqs: int
    max_len: int
    max_num_batched_tokens: int
    prefill_chunk: int | None = None
    mixed_prefill_tokens: int | None = None
    max_prefill_pieces: int | None = None
    num_decode_steps: int = 1
    scheduling_policy: str = "priority"
    ageing: float = 60.0
    window: float = 0.05
    max_num_waiting: int | None = None
    preemption_mode: PreemptionMode = "recompute"

    def __post_init__(self):
        for name, value in vars(self).items():
            least = 0 if name == "max_num_waiting" else 1
            if isinstance(value, int) and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.max_num_batched_tokens <= self.max_num_seqs and self.max_num_seqs > 1:
            # A step full of decode rows would leave nothing for a prefill, for as long as those rows run.
            raise ValueError(
                f"max_num_batched_tokens must exceed max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )
        if self.scheduling_policy not in POLICIES:
            raise ValueError(
                f"scheduling_policy: got {self.scheduling_policy!r}, there are {', '.join(POLICIES)}"
            )
        for name, least in (("ageing", math.ulp(0)), ("window", 0.0)):
            if not least <= getattr(self, name) < math.inf:
                above = "above 0" if least else "at least 0"
                raise ValueError(f"{name}: got {getattr(self, name)}, must be {above} and finite, in seconds")
        if self.preemption_mode not in ("recompute", "swap"):
            raise ValueError(f"preemption_mode: got {self.preemption_mode!r}, there are recompute and swap")

    def mixed_tokens(self, is_crowded: bool) -> int:
        """Returns the most tokens of prefill beside decode rows: half as many where no others wait.

        With SmolLM2 on two cores, 64 tokens where others wait served 10 % more than 32 in one run,
        and 32 where nobody does hold a stream up for 2 steps of its own, where 64 would for 4.
        """
        most = self.max_num_batched_tokens if self.mixed_prefill_tokens is None else self.mixed_prefill_tokens
        return most if is_crowded or self.mixed_prefill_tokens is None else -(-most // 2)


def check_spec(spec: RequestSpec, config: SchedulerConfig, pool: PagePool) -> None:
    """Refuses a request that could never run.

    Args:
      spec: of the request. config: limits. pool: the pages that it may have.

    Raises:
      RequestRefused: with what was got and what would fit.
    """
    num_prompt, max_len = len(spec.prompt), config.max_len
    if not num_prompt:
        raise RequestRefused("the prompt has no tokens; give at least one")
    if num_prompt >= max_len or not 1 <= spec.max_new_tokens <= max_len - num_prompt:
        raise RequestRefused(
            f"the prompt has {num_prompt} tokens and {spec.max_new_tokens} more are asked for; at least 1 "
            f"more and at most {max_len} together are possible: shorten the prompt or raise max_len"
        )
    needed = pool.pages_for(spec.num_positions)
    if needed > pool.num_pages:
        raise RequestRefused(
            f"prompt and output of up to {spec.num_positions} cached tokens need {needed} pages, the pool "
            f"has {pool.num_pages}; lower max_tokens, shorten the prompt or give the cache more memory"
        )
    if spec.priority and config.scheduling_policy != "priority":
        raise RequestRefused(
            f"priority: got {spec.priority}, but this run's scheduling_policy is "
            f"{config.scheduling_policy}, which knows none; leave it out or run with priority"
        )
