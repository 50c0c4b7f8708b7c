"""The door of the engine: everything that can be checked or fixed before a request enters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from jaxinfer.schedule.request import RequestRefused, RequestSpec
from jaxinfer.schedule.sampling_params import SamplingParams, draw_seed
from jaxinfer.text import Tokenizer

Prompt = str | Sequence[int]


def read_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> tuple[str | None, tuple[int, ...]]:
    """Returns a prompt's text (None when ids were given) and its ids.

    Raises:
      RequestRefused: no tokens, or an id that the model has no row for.
    """
    text = prompt if isinstance(prompt, str) else None
    ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else map(int, prompt))
    if not ids:
        raise RequestRefused("prompt: got no tokens (this tokenizer adds none of its own), give at least one")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestRefused(f"prompt: got token ids {outside[:8]}, allowed are 0 to {vocab_size - 1}")
    return text, ids


def bind_params(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Returns the settings with what the device cannot do itself done: words as ids, a seed drawn."""
    changes: dict[str, object] = {}
    if params.bad_words:
        changes["bad_words_ids"] = [*(params.bad_words_ids or ()), *_word_ids(params.bad_words, tokenizer)]
    if params.seed is None:
        changes["seed"] = draw_seed()
    return params.replace(**changes) if changes else params


def check_draws(params: SamplingParams, draws: Collection[str]) -> None:
    """Refuses a request that asks for what a run was not made for.

    Args:
      params: as `bind_params` returns them. draws: of `DRAWS`, what the run compiled; ``sample`` serves ``greedy`` too.
    """
    served = {*draws, "greedy"} if "sample" in draws else set(draws)
    missing = [draw for draw in params.draws if draw not in served]
    if missing:
        raise RequestRefused(
            f"sampling: this run serves draws {', '.join(draws)}, and the request asks for {', '.join(missing)}; "
            "start it with these among its draws"
        )


def make_specs(
    names: Iterator[str],
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    eos_ids: Sequence[int],
    max_len: int,
    priority: int,
    arrival: float,
) -> list[RequestSpec]:
    """Returns one spec for each of the ``n`` choices; only the first computes the prompt's logprobs.

    Args:
      names: unique ids for the scheduler. params: as `bind_params` returns them. The rest: see `RequestSpec`.
    """
    later = params.replace(prompt_logprobs=None) if params.prompt_logprobs is not None else params
    assert params.seed is not None
    return [
        RequestSpec(
            request_id=next(names),
            prompt=prompt,
            params=later if choice else params,
            stop_ids=params.end_ids(eos_ids),
            max_new_tokens=params.limit_tokens(max_len, len(prompt)),
            choice=choice,
            seed=params.seed,
            priority=priority,
            arrival=arrival,
        )
        for choice in range(params.n)
    ]


def _word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Each word as it is written at the start of a text and after a space."""
    spelled = [spelling for word in words for spelling in dict.fromkeys((word, f" {word.lstrip()}"))]
    ids = (tuple(tokenizer.encode(text, add_special_tokens=False, parse_special=False)) for text in spelled)
    return list(dict.fromkeys(one for one in ids if one))
