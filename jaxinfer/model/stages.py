"""Stages of a pipeline: which layers each has, and what it works on at every tick. Plain numbers, no arrays.

Rows are cut into groups of one size. At every tick each stage runs its layers over one group and hands it on, so that
stage s has group g at tick ``g + s``. Three groups on two stages, ``.`` for a stage that idles::

    tick      0  1  2  3
    stage 0   a  b  c  .
    stage 1   .  a  b  c

Several decode steps follow each other without a gap: a group's token is there before its next turn::

    tick      0  1  2  3  4
    stage 0   a1 b1 a2 b2 .
    stage 1   .  a1 b1 a2 b2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Deal = tuple[tuple[int, ...], ...]  # for each stage the layer in each of its places, -1 for one of zeros

# Smaller groups would cost a stage no less: below about 240 tokens a TPU's tick is the reading of the weights (GPUs
# alike), and each group reads them once more.
GROUP_TOKENS = 128
MOST_GROUPS = 8  # for each stage: the last stages then idle for a ninth


def deal_layers(structures: Sequence[Hashable], num_stages: int) -> Deal:
    """Returns which layer lies in which place of which stage.

    Stages run one program, so a place has layers of one structure on all of them: a stage that has none to put there
    has a layer of zeros, which changes nothing. Stages have equal runs of layers, the first ones one more.

    Args:
      structures: of each layer, what must be equal for two of them to share a place. num_stages: S.
    """
    each, more = divmod(len(structures), num_stages)
    ends = [stage * each + min(stage, more) for stage in range(num_stages + 1)]
    left = [list(range(*pair)) for pair in pairwise(ends)]
    places: list[list[int]] = [[] for _ in left]
    while any(left):
        wanted = Counter(structures[run[0]] for run in left if run)
        remaining = Counter(structures[layer] for run in left for layer in run)
        # What most stages have next; on a tie what is rarer, for the other will be wanted again.
        best = max(wanted, key=lambda structure: (wanted[structure], -remaining[structure]))
        for run, own in zip(left, places, strict=True):
            own.append(run.pop(0) if run and structures[run[0]] == best else -1)
    return tuple(map(tuple, places))


def stand_ins(deal: Deal) -> tuple[int, ...]:
    """Returns a layer for each place, whose structure all stages have there."""
    return tuple(next(layer for layer in column if layer >= 0) for column in zip(*deal, strict=True))


@dataclass(frozen=True)
class Flow:
    """Who works on what: one pass, or several decode steps on end.

    Attributes:
      num_stages: S. num_groups: G, of rows. num_steps: n, passes of every group.
    """

    num_stages: int
    num_groups: int
    num_steps: int = 1

    @property
    def period(self) -> int:
        """Ticks from a group's start to its next: its token is drawn at the tick when it leaves the last stage."""
        return max(self.num_stages, self.num_groups)

    @property
    def num_ticks(self) -> int:
        """Ticks until the last group has left the last stage."""
        return (self.num_steps - 1) * self.period + self.num_groups + self.num_stages - 1

    def work(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Returns the step and the group that a stage works on, and whether it does; of ints or of arrays."""
        item = tick - stage
        step, group = item // self.period, item % self.period
        return step, group, (item >= 0) & (step < self.num_steps) & (group < self.num_groups)

    @property
    def idle_share(self) -> float:
        """The share of the stages' ticks in which they have no work."""
        ticks = [(tick, stage) for tick in range(self.num_ticks) for stage in range(self.num_stages)]
        return sum(not self.work(*each)[2] for each in ticks) / len(ticks)

    def __str__(self) -> str:
        steps = f" x {self.num_steps} steps" if self.num_steps > 1 else ""
        return (
            f"{self.num_groups} groups{steps} through {self.num_stages} stages in {self.num_ticks} ticks, "
            f"{100 * self.idle_share:.0f} % idle"
        )


def plan_flow(num_stages: int, shapes: Sequence[tuple[int, int]], num_steps: int = 1) -> Flow:
    """Returns how a step's rows flow through the stages.

    Args:
      num_stages: S. shapes: ``(B, T)`` of each block of rows on one device. num_steps: decode steps on end.
    """
    B, T = max(shapes, key=lambda shape: shape[1])
    wanted = min(num_stages, B)
    if T > 1:
        wanted = min(max(B * T // GROUP_TOKENS, num_stages), MOST_GROUPS * num_stages)
    rows = min(B, wanted)
    return Flow(num_stages, rows * min(T, -(-wanted // rows)), num_steps)


def describe_idleness(num_stages: int, num_rows: int, num_steps: int) -> str:
    """Returns in words how much of a step of decode the stages idle for, and what would make that less.

    Args:
      num_stages: S. num_rows: of a full step on one device. num_steps: decode steps on end.
    """
    flow = plan_flow(num_stages, [(num_rows, 1)], num_steps)
    advice = ""
    if num_rows < num_stages:
        advice = f"; max_num_seqs of at least {num_stages} rows would give all stages work"
    elif num_steps < 8:
        better = plan_flow(num_stages, [(num_rows, 1)], 8)
        advice = f"; num_decode_steps=8 makes it {100 * better.idle_share:.0f} %"
    return f"decode: {flow}{advice}"


def cut_shape(shape: tuple[int, int], num_groups: int) -> tuple[int, int]:
    """Returns into how many parts the rows and the tokens of a block are cut, whose product is the groups.

    Rows first: their tokens depend on nobody's. A chunk's tokens follow each other, part after part, through a stage.
    """
    B, T = shape
    if T == 1:
        return num_groups, 1
    rows = max(n for n in range(1, num_groups + 1) if num_groups % n == 0 and n <= B)
    return rows, num_groups // rows
