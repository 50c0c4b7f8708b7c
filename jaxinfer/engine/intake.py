"""The door of the engine: everything that can be checked or fixed before a request enters."""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.engine.handle import Handle
from jaxinfer.engine.metrics import Histogram
from jaxinfer.engine.options import RequestOptions, check_options
from jaxinfer.engine.pooled import PARAMS as POOLING_PARAMS
from jaxinfer.schedule.limits import SchedulerConfig
from jaxinfer.schedule.request import Pooling, QueueFull, RequestRefused, RequestSpec
from jaxinfer.schedule.sampling_params import SamplingParams, draw_seed
from jaxinfer.text import Tokenizer

Check = Callable[[SamplingParams, Collection[int]], None]
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
    cache_salt: str | None = None,
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
            cache_salt=cache_salt,
        )
        for choice in range(params.n)
    ]


def check_room(config: SchedulerConfig, count: int, num_live: int, e2e: Histogram) -> None:
    """Refuses a request for which there is no place in the queue, for now or for ever.

    Args:
      config: says how many may run and wait. count: sequences of the request. num_live: that run or wait.
      e2e: seconds that requests took, for a guess when a place is free again.

    Raises:
      RequestRefused: there can never be so many. QueueFull: there are too many now.
    """
    if config.max_num_waiting is None:
        return
    most = config.max_num_seqs + config.max_num_waiting
    if count > most:
        raise RequestRefused(f"n: got {count}, but at most {most} sequences may run and wait; ask for fewer")
    if num_live + count > most:
        rounds = (config.max_num_waiting + 1) / config.max_num_seqs
        seconds = e2e.total / e2e.count if e2e.count else 1.0
        raise QueueFull(
            f"{num_live} sequences run or wait, and at most {config.max_num_waiting} may wait beside "
            f"{config.max_num_seqs} that run; try again later",
            retry_after=min(max(seconds * rounds, 1.0), 60.0),
        )


class Intake:
    """Turns what a caller asks for into a handle, or refuses it.

    Args:
      tokenizer, vocab_size, eos_ids: the model's. draws: of `DRAWS`, what requests may ask for.
      check: refuses settings and end ids that the device cannot hold. max_len: longest prompt plus output.
      clock: seconds, for arrivals.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Sequence[int],
        draws: Collection[str],
        check: Check | None,
        max_len: int,
        clock: Callable[[], float],
    ):
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._draws, self._check, self._max_len, self._clock = draws, check, max_len, clock
        self._serial = itertools.count()

    def read(
        self, prompt: Prompt, params: SamplingParams | None, stream: bool, options: RequestOptions
    ) -> Handle:
        """Returns the handle of a request; arguments as for `Engine.submit`, and its errors."""
        check_options(options)
        pooling = options.get("pooling")
        name = options.get("request_id")
        name = name if name is not None else f"request-{next(self._serial)}"
        text, ids = read_prompt(prompt, self._tokenizer, self._vocab_size)
        if pooling is not None and params is not None:
            raise RequestRefused("params: got some with pooling, which makes no tokens; leave them out")
        asked = params or (SamplingParams() if pooling is None else POOLING_PARAMS)
        bound = bind_params(asked, self._tokenizer)
        check_draws(bound, self._draws, pooling)
        bound.validate_for(self._vocab_size, self._max_len, len(ids), self._eos_ids)
        # The serial number keeps a name that is used again apart from a plan still in flight under its first use.
        names = (f"{name}/{next(self._serial)}" for _ in itertools.count())
        specs = make_specs(
            names,
            ids,
            bound,
            eos_ids=self._eos_ids,
            max_len=self._max_len,
            priority=options.get("priority", 0),
            arrival=self._clock(),
            pooling=pooling,
            cache_salt=options.get("cache_salt"),
        )
        if self._check is not None:
            self._check(bound, specs[0].stop_ids)
        handle = Handle(name, text, specs, self._tokenizer, stream=stream)
        if (timeout := options.get("timeout")) is not None:
            handle.deadline = handle.arrival + timeout
        return handle


def _word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Each word as it is written at the start of a text and after a space."""
    spelled = [spelling for word in words for spelling in dict.fromkeys((word, f" {word.lstrip()}"))]
    ids = (tuple(tokenizer.encode(text, add_special_tokens=False, parse_special=False)) for text in spelled)
    return list(dict.fromkeys(one for one in ids if one))
