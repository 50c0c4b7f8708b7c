"""The load: when requests come, how long they are and what they share, all drawn by seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Prompt = str | list[int] | list[Mapping[str, Any]]  # a text, token ids, or messages
MakeTokens = Callable[
    [random.Random, int], list[Any]
]  # draws so many tokens (ids, or words that stand for them)

LENGTH_FORMS = "COUNT, LEAST:MOST (uniform) or lognormal:MEDIAN:SIGMA[:MOST]"
ARRIVAL_FORMS = "closed:CLIENTS, poisson:RATE, fixed:RATE (requests a second) or all"


@dataclass(frozen=True)
class Shot:
    """One request to send.

    Attributes:
      index: its place in the load. at: seconds after the start, None when a free client sends it.
      prompt: see `Prompt`. max_tokens: to write. num_prompt: tokens of the prompt, None where nobody knows.
    """

    index: int
    at: float | None
    prompt: Prompt
    max_tokens: int
    num_prompt: int | None = None


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts.

    Attributes:
      kind: ``constant``, ``uniform`` or ``lognormal``.
      numbers: the count; least and most, both included; median, sigma of the logarithm and most.
    """

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, name: str, text: str | int) -> Lengths:
        """Reads a distribution.

        Args:
          name: of the setting, for errors. text: see `LENGTH_FORMS`.
        """
        words = str(text).split(":")
        kind = "lognormal" if words[0] == "lognormal" else "constant" if len(words) == 1 else "uniform"
        try:
            if kind == "lognormal":
                median, sigma, most = (*map(float, words[1:]), math.inf)[:3]
                numbers: tuple[float, ...] = (median, sigma, most)
                good = len(words) in (3, 4) and 1 <= median <= most and 0 <= sigma < math.inf
            else:
                numbers = tuple(map(int, words))
                good = numbers[0] >= 1 and list(numbers) == sorted(numbers) and len(numbers) <= 2
        except ValueError:
            good, numbers = False, ()
        if not good:
            raise ValueError(f"{name}: got {text!r}, must be {LENGTH_FORMS}, with counts of at least 1")
        return cls(kind, numbers)

    def draw(self, rng: random.Random) -> int:
        """Returns a count of at least 1."""
        if self.kind == "constant":
            return int(self.numbers[0])
        if self.kind == "uniform":
            return rng.randint(int(self.numbers[0]), int(self.numbers[1]))
        median, sigma, most = self.numbers
        return max(1, round(min(rng.lognormvariate(math.log(median), sigma), most)))


@dataclass(frozen=True)
class Arrivals:
    """When requests come.

    Attributes:
      kind: ``closed`` (so many clients, each waits for its answer), ``poisson``, ``fixed``, ``all``, or ``trace``.
      number: clients, or requests a second; 0 where it means nothing.
    """

    kind: str
    number: float = 0.0

    @classmethod
    def parse(cls, name: str, text: str) -> Arrivals:
        """Reads `ARRIVAL_FORMS`; ``name`` is the setting's, for errors."""
        kind, colon, number = str(text).partition(":")
        try:
            if kind == "all" and not colon:
                return cls(kind)
            if kind == "closed" and int(number) >= 1:
                return cls(kind, int(number))
            if kind in ("poisson", "fixed") and 0 < float(number) < math.inf:
                return cls(kind, float(number))
        except ValueError:
            pass
        raise ValueError(
            f"{name}: got {text!r}, must be {ARRIVAL_FORMS}, with numbers above 0, such as closed:16"
        )

    def draw(self, rng: random.Random, count: int) -> list[float | None]:
        """Returns the seconds after the start at which each request comes, None for whenever a client is free."""
        if self.kind == "closed":
            return [None] * count
        if self.kind == "poisson":
            return list(accumulate(rng.expovariate(self.number) for _ in range(count)))
        return [i / self.number if self.kind == "fixed" else 0.0 for i in range(count)]


@dataclass(frozen=True)
class Prefixes:
    """What prompts have in common: a share of them begins with one of ``count`` texts of ``length`` tokens."""

    share: float = 0.0
    length: int = 0
    count: int = 1


@dataclass(frozen=True)
class Load:
    """Requests to be drawn.

    Attributes:
      num_requests: how many. arrivals: when. input_len: tokens of a prompt beyond its shared prefix.
      output_len: tokens to write. prefixes: see `Prefixes`. seed: of every draw.
    """

    num_requests: int
    arrivals: Arrivals
    input_len: Lengths
    output_len: Lengths
    prefixes: Prefixes = Prefixes()
    seed: int = 0

    def draw(self, make_tokens: MakeTokens, repetition: int = 0) -> list[Shot]:
        """Draws the requests of one repetition: other prompts than the last, which a prefix cache would know.

        Args:
          make_tokens: draws tokens; words are joined by spaces to a text.

        Returns:
          The requests in the order of their arrival, the same for the same seed and repetition.
        """
        rngs = {
            name: random.Random(f"{self.seed}/{repetition}/{name}")
            for name in ("at", "len", "tokens", "share")
        }
        at = self.arrivals.draw(rngs["at"], self.num_requests)
        lengths = [
            (self.input_len.draw(rngs["len"]), self.output_len.draw(rngs["len"]))
            for _ in range(self.num_requests)
        ]
        begins = [make_tokens(rngs["tokens"], self.prefixes.length) for _ in range(self.prefixes.count)]
        num_sharing = round(self.prefixes.share * self.num_requests) if self.prefixes.length else 0
        sharing = set(rngs["share"].sample(range(self.num_requests), num_sharing))
        shots = []
        for index, (num_input, num_output) in enumerate(lengths):
            begin = rngs["share"].choice(begins) if index in sharing else []
            tokens = begin + make_tokens(rngs["tokens"], num_input)
            prompt = " ".join(tokens) if isinstance(tokens[0], str) else tokens
            shots.append(Shot(index, at[index], prompt, num_output, len(tokens)))
        return shots


# Words that most vocabularies hold as one token each, with the space before them.
_WORDS = (  # noqa: SIM905 (a list of fifty strings is no easier to read)
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an "
    "they which one you were her all she there would their we him been has when who will more no if out so"
).split()


def make_words(rng: random.Random, count: int) -> list[str]:
    """Draws words, for endpoints that take no token ids: about one token each."""
    return rng.choices(_WORDS, k=count)


def make_ids(ids: Sequence[int]) -> MakeTokens:
    """Returns what draws token ids among some, such as a range that every vocabulary has."""

    def draw(rng: random.Random, count: int) -> list[int]:
        return rng.choices(ids, k=count)

    return draw
