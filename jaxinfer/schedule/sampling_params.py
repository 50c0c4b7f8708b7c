"""How one request wants its tokens chosen: vLLM's names and defaults, checked when the record is made."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from jaxinfer.schedule.param_checks import (
    Check,
    SamplingParamsError,
    bias,
    flag,
    id_sequence,
    integer,
    many,
    maybe,
    number,
    only,
    some_ids,
    stop,
    text,
    token_ids,
)
from jaxinfer.schedule.param_names import refuse_name, translate

MAX_LOGPROBS = 20
# What requests may ask for: the likeliest token and nothing else; anything; prompt_logprobs; pooling.
DRAWS = ("greedy", "sample", "score", "embed")
GREEDY_BELOW = 1e-5  # vLLM's: a temperature under this is 0, so that logits / temperature stays finite

_CHECKS: dict[str, Check] = {
    "n": integer(1, 1024),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(1e-3, 1e3),  # beyond these, float32 logits overflow
    "temperature": number(0, 1e6),
    "top_p": number(0, 1),
    "top_k": integer(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "seed": maybe(integer(-(2**63), 2**63 - 1)),
    "stop": stop,
    "stop_token_ids": token_ids,
    "bad_words": many(text, "a list of strings"),
    "bad_words_ids": many(id_sequence, "a list of lists of token ids"),
    "ignore_eos": flag,
    "max_tokens": maybe(integer(1)),
    "min_tokens": integer(0),
    "logprobs": maybe(integer(0, MAX_LOGPROBS)),
    "prompt_logprobs": maybe(integer(0, MAX_LOGPROBS)),
    "detokenize": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": only(True),
    "include_stop_str_in_output": flag,
    "allowed_token_ids": maybe(some_ids),
    "logit_bias": maybe(bias),
    "do_sample": maybe(flag),
    "truncate_prompt_tokens": only(None),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks of sampling; names and defaults as vLLM's (wider than the house's 12 fields for that).

    Logits go through logit_bias and allowed_token_ids, penalties, min_tokens and bad_words, temperature, top_k,
    top_p, min_p, in this order. Lists are kept as tuples, None as the empty one where that means the same.

    Attributes:
      n: choices for one prompt, each with its own stream of draws.
      presence_penalty, frequency_penalty: taken from the logits of output tokens, once and per occurrence.
      repetition_penalty: divides positive and multiplies negative logits of prompt and output tokens.
      temperature: divides logits; 0 (or below 1e-5) takes the likeliest token, the lowest id on ties.
      top_k: keeps the k likeliest tokens (ties with the last are kept); 0 or -1 is off.
      top_p: keeps a token while those likelier than it hold less than this share; 0 or 1 is off.
      min_p: keeps tokens at least this times as likely as the likeliest; 0 is off.
      seed: reproduces the request, alone or in any batch; None draws one.
      stop: strings that end the text. stop_token_ids: ids that end it, beside the model's own end tokens.
      bad_words: strings that the output may not hold; bad_words_ids: the same as token ids.
      ignore_eos: goes on past the model's end tokens (not past stop_token_ids).
      max_tokens: most tokens to generate, None for as many as the context holds. min_tokens: fewest.
      logprobs, prompt_logprobs: likeliest tokens to report at each position, at most 20; None reports nothing.
      detokenize: whether text is made. skip_special_tokens: whether it leaves special tokens out.
      include_stop_str_in_output: whether text keeps the stop string that ended it.
      allowed_token_ids: the only ids that may be drawn. logit_bias: added to logits, by token id.
      do_sample: transformers' switch; False is temperature 0.
      spaces_between_special_tokens, truncate_prompt_tokens: vLLM's, refused unless left alone.

    Raises:
      SamplingParamsError: a ValueError that names the field, what was got and what is allowed.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    do_sample: bool | None = None
    truncate_prompt_tokens: None = None

    # Which fields the caller gave: defaults of a model fill the others.
    explicit = frozenset[str]()

    def __new__(cls, **given: Any) -> SamplingParams:
        """Notes what was given, and refuses unknown names before the record's own TypeError would."""
        for name in given:
            if name not in _CHECKS:
                raise refuse_name(name, given[name], _CHECKS)
        self = super().__new__(cls)
        object.__setattr__(self, "explicit", frozenset(given))
        return self

    def __post_init__(self) -> None:
        # What was not given is known to be right: all checks anew would cost a request 0.1 ms.
        given = {name: _CHECKS[name](name, getattr(self, name)) for name in self.explicit}
        self.__dict__.update(_DEFAULTS | given)
        self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                "min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}"
            )
        if self.n > 1 and self.is_greedy:
            raise SamplingParamsError(
                "n", self.n, "1 when temperature is 0, for all choices would be the same"
            )
        if self.stop and not self.detokenize:
            raise SamplingParamsError(
                "stop", self.stop, "nothing when detokenize is False, for no text is made"
            )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SamplingParams:
        """Reads sampling fields by vLLM's names or by those of transformers' GenerationConfig.

        Args:
          given: values by name. None is "not given", but for max_tokens, whose None asks for all there is room for.
            ``eos_token_id`` replaces the model's end tokens, as it does in transformers.

        Raises:
          SamplingParamsError: a name that is unknown, not served, or given under two spellings; a bad value.
        """
        return cls(**translate(given, _CHECKS))

    def with_defaults(self, defaults: Iterable[tuple[str, Any]]) -> SamplingParams:
        """Returns the same request with a model's defaults in the fields that the caller left alone.

        Args:
          defaults: ``GenerationDefaults.sampling``. Its do_sample yields to a temperature that the caller gave.
        """
        filled = translate(dict(defaults), _CHECKS)
        if not filled:
            return self
        if "temperature" in self.explicit:
            filled.pop("do_sample", None)
        merged = type(self)(**(filled | self._given()))
        object.__setattr__(merged, "explicit", self.explicit)
        return merged

    def replace(self, **changes: Any) -> SamplingParams:
        """Returns the same request with some fields changed, which then count as given."""
        result = copy(self)
        for name, value in changes.items():
            if name not in _CHECKS:
                raise refuse_name(name, value, _CHECKS)
            object.__setattr__(result, name, _CHECKS[name](name, value))
        object.__setattr__(result, "explicit", self.explicit | changes.keys())
        result._check_together()
        return result

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.do_sample is False or self.temperature < GREEDY_BELOW

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the argmax of the model's own logits and nothing else is asked of the device."""
        edits = (self.logit_bias, self.bad_words, self.bad_words_ids, self.min_tokens, self.presence_penalty)
        return (
            self.is_greedy
            and not any(edits)
            and self.frequency_penalty == 0
            and self.repetition_penalty == 1
            and self.allowed_token_ids is None
            and self.logprobs is None
        )

    @property
    def draws(self) -> tuple[str, ...]:
        """What the request asks of the device, of `DRAWS`."""
        drawn = "greedy" if self.is_plain_greedy else "sample"
        return (drawn,) if self.prompt_logprobs is None else (drawn, "score")

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Returns the ids that end the request, the model's own unless they are ignored."""
        return frozenset(self.stop_token_ids or ()) | (frozenset() if self.ignore_eos else frozenset(eos_ids))

    def limit_tokens(self, max_len: int, prompt_len: int) -> int:
        """Returns the most tokens to generate after ``prompt_len`` tokens in a context of ``max_len``."""
        room = max_len - prompt_len
        return room if self.max_tokens is None else min(room, self.max_tokens)

    def validate_for(
        self, vocab_size: int, max_len: int, prompt_len: int, eos_ids: Iterable[int] = ()
    ) -> None:
        """Checks what depends on the model and the prompt.

        Args:
          vocab_size: ids below it can be drawn. max_len: most tokens of prompt and output.
          prompt_len: tokens of the prompt. eos_ids: the model's end tokens.

        Raises:
          SamplingParamsError: an id outside the vocabulary, no room in the context, or no token left to draw.
        """
        if not 1 <= prompt_len < max_len:
            allowed = f"1 to {max_len - 1}, for the context of {max_len} also holds the first new token"
            raise SamplingParamsError("prompt tokens", prompt_len, allowed)
        if self.min_tokens > max_len - prompt_len:
            allowed = (
                f"at most {max_len - prompt_len}: a context of {max_len} less {prompt_len} of the prompt"
            )
            raise SamplingParamsError("min_tokens", self.min_tokens, allowed)
        named = {
            name: getattr(self, name) or () for name in ("stop_token_ids", "allowed_token_ids", "logit_bias")
        }
        named["bad_words_ids"] = [token for word in self.bad_words_ids or () for token in word]
        for name, ids in named.items():
            for token in ids:
                if token >= vocab_size:
                    raise SamplingParamsError(
                        name, token, f"token ids below {vocab_size}, the vocabulary's size"
                    )
        # Only the last token of a bad word is ever banned, so what is left here can be drawn at any position.
        banned = {word[-1] for word in self.bad_words_ids or ()}
        if self.min_tokens:
            banned |= self.end_ids(eos_ids)
        allowed_ids = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        if len(banned) >= len(allowed_ids) and banned.issuperset(allowed_ids):
            field = "bad_words" if self.allowed_token_ids is None else "allowed_token_ids"
            raise SamplingParamsError(
                field,
                getattr(self, field),
                "ids that leave a token beside bad words, and end tokens under min_tokens",
            )

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.explicit}


_DEFAULTS = {spec.name: _CHECKS[spec.name](spec.name, spec.default) for spec in fields(SamplingParams)}


def draw_seed() -> int:
    """Returns a seed for a request that gave none, so that it can be reported and repeated."""
    return secrets.randbits(63)
