"""The door of the engine: everything that can be checked or fixed before a request enters."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.schedule.request import Pooling, RequestRefused, RequestSpec
from jaxinfer.schedule.sampling_params import SamplingParams, draw_seed
from jaxinfer.text import Tokenizer

Prompt = str | Sequence[int]
Prompts = Prompt | Mapping[str, Any] | Iterable[Prompt | Mapping[str, Any]]


def read_prompts(prompts: Prompts) -> list[Prompt]:
    """Returns prompts of any accepted form as a list of texts and lists of token ids.

    Args:
      prompts: a text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, or a list of these.

    Raises:
      ValueError: anything else.
    """
    prompts = _as_list(prompts)
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_read_form(prompts, "prompt")]
    if not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts: got {type(prompts).__name__}, must be a text, token ids, or a list of these"
        )
    return [_read_form(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]


def _read_form(prompt: Any, where: str) -> Prompt:
    prompt = _as_list(prompt)
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(
                f"{where}: got keys {list(prompt)}, must be either 'prompt' or 'prompt_token_ids'"
            )
        ((key, value),) = prompt.items()
        if isinstance(value, str) != (key == "prompt"):
            raise ValueError(
                f"{where}: {key!r} holds {type(value).__name__}; a text is 'prompt', ids the other"
            )
        return _read_form(value, f"{where}[{key!r}]")
    if isinstance(prompt, str) or _is_ids(prompt) or prompt == []:  # no ids is the engine's to refuse
        return prompt
    raise ValueError(f"{where}: got {prompt!r:.80}, must be a text or a list of token ids (integers)")


def _as_list(value: Any) -> Any:
    """Returns an array, as tokenizers make them, as nested lists; anything else as it is."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _is_ids(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return False
    return all(isinstance(token, numbers.Integral) and not isinstance(token, bool) for token in value)


def read_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> tuple[str | None, tuple[int, ...]]:
    """Returns a prompt's text (None when ids were given) and its ids.

    Raises:
      RequestRefused: no tokens, or an id that is no integer or that the model has no row for.
    """
    text = prompt if isinstance(prompt, str) else None
    try:
        ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else map(operator.index, prompt))
    except TypeError as error:
        raise RequestRefused(f"prompt: must be a text or a list of integers, but {error}") from None
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


def check_draws(params: SamplingParams, draws: Collection[str], pooling: Pooling | None = None) -> None:
    """Refuses a request that asks for what a run was not made for.

    Args:
      params: as `bind_params` returns them. draws: of `DRAWS`, what the run compiled; ``sample`` serves ``greedy`` too.
      pooling: what hidden state the request asks for.
    """
    served = {*draws, "greedy"} if "sample" in draws else set(draws)
    if pooling not in (None, "last", "mean"):
        raise RequestRefused(f"pooling: got {pooling!r}, must be 'last' or 'mean'")
    asked = params.draws if pooling is None else (*params.draws, "embed")
    missing = [draw for draw in asked if draw not in served]
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
    pooling: Pooling | None = None,
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
            pooling=pooling,
        )
        for choice in range(params.n)
    ]


def _word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Each word as it is written at the start of a text and after a space."""
    spelled = [spelling for word in words for spelling in dict.fromkeys((word, f" {word.lstrip()}"))]
    ids = (tuple(tokenizer.encode(text, add_special_tokens=False, parse_special=False)) for text in spelled)
    return list(dict.fromkeys(one for one in ids if one))
