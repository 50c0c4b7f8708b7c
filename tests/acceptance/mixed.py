"""Requests of every kind from a seed, and what of their results must not depend on who else is served."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from jaxinfer.engine.engine import Engine, Handle
from jaxinfer.engine.outputs import PositionLogprobs, RequestOutput
from jaxinfer.schedule.sampling_params import SamplingParams

# Fields with a single value, which no request can use.
FIXED = {"spaces_between_special_tokens", "truncate_prompt_tokens"}


class MixedRequest(NamedTuple):
    """A prompt's ids and its settings."""

    prompt: list[int]
    params: SamplingParams


def make_requests(
    count: int, vocab: Sequence[int], word: Callable[[int], str], *, longest: int, eos: int, seed: int = 0
) -> list[MixedRequest]:
    """Draws requests that use every sampling field among them; all but one in sixteen can be repeated.

    Args:
      count: of requests. vocab: ids that prompts, biases, bans and stops are made of. word: the text of an id.
      longest: prompt and output in tokens. eos: an end token of the model. seed: of the draws.
    """
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = rng.choices(
            vocab, k=rng.choice([1, rng.randint(2, 20), rng.randint(15, 17), rng.randint(20, longest // 2)])
        )
        given = _draw_fields(rng, vocab, word, eos)
        least = given.get("min_tokens", 1)
        most = rng.choice([1, 5, rng.randint(2, longest // 4), rng.randint(2, longest // 2), longest])
        given["max_tokens"] = None if rng.random() < 0.1 else max(least, most)
        if i % 16 != 15 and given.get("temperature", 1) > 0:
            given["seed"] = rng.getrandbits(63) - 2**62
        requests.append(MixedRequest(prompt, SamplingParams(**given)))
    return requests


def _draw_fields(
    rng: random.Random, vocab: Sequence[int], word: Callable[[int], str], eos: int
) -> dict[str, Any]:
    """Returns about four fields with values; the sampling ones only where tokens are drawn."""
    ids = rng.sample(list(vocab), 24)
    choices: dict[str, Any] = {
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.7, 1.5),
        "logit_bias": dict(zip(ids, (rng.uniform(-20, 5) for _ in range(9)), strict=False)),
        "allowed_token_ids": [*ids[:20], eos],
        "bad_words": [word(ids[0]), word(ids[1]) + word(ids[2])],
        "bad_words_ids": [[ids[3]], ids[4:6]],
        "stop": rng.choice([word(ids[6]), [word(i) for i in ids[6:9]]]),
        "stop_token_ids": ids[9:12],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": rng.randint(1, 5),
        "logprobs": rng.randint(0, 20),
        "prompt_logprobs": rng.randint(0, 20),
        "skip_special_tokens": False,
    }
    drawn = {
        "top_k": rng.choice([1, 2, 40, 100]),
        "top_p": rng.uniform(0.2, 0.99),
        "min_p": rng.uniform(0.01, 0.3),
        "n": rng.randint(2, 4),
    }
    kind = rng.random()
    if kind < 0.15:
        given: dict[str, Any] = {"temperature": 0}
    elif kind < 0.25:
        given = {"do_sample": False, "temperature": 0}
    else:
        given = {"temperature": rng.choice([0.5, 0.9, 1.0, 1.7])}
        choices |= drawn
    for name in rng.sample(sorted(choices), rng.choice([0, 3, 4, 6])):
        given[name] = choices[name]
    if "stop" not in given and rng.random() < 0.1:
        given["detokenize"] = False
    return given


def unused_fields(requests: Sequence[MixedRequest]) -> set[str]:
    """Returns the sampling fields that no request gives a value of its own."""
    plain = SamplingParams()
    return {
        field.name
        for field in fields(SamplingParams)
        if all(getattr(request.params, field.name) == getattr(plain, field.name) for request in requests)
    } - FIXED


def serve(engine: Engine, requests: Sequence[MixedRequest], rng: random.Random) -> list[Handle]:
    """Serves requests that arrive a few at a time between steps; every third is streamed."""
    handles: list[Handle] = []
    while len(handles) < len(requests) or engine.has_work:
        for request in requests[len(handles) : len(handles) + rng.choice([0, 0, 1, 2, 6])]:
            handles.append(engine.submit(request.prompt, request.params, stream=len(handles) % 3 == 0))
        engine.step()
        engine.scheduler.check_invariants()
    return handles


def tokens_of(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Returns what every choice of a request must repeat exactly."""
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]


def logprobs_of(output: RequestOutput) -> list[list[float]]:
    """Returns the log-probabilities of prompt and choices, each position's in falling order."""

    def values(entries: Sequence[PositionLogprobs | None] | None) -> list[float]:
        return [v for entry in entries or () for v in sorted(one.logprob for one in (entry or {}).values())]

    return [values(output.prompt_logprobs), *(values(one.logprobs) for one in output.outputs)]
