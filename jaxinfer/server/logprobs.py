"""Log-probabilities in the two shapes of OpenAI's API: lists side by side for completions, objects for chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.outputs import Logprob, PositionLogprobs
from jaxinfer.text import StreamDecoder, Tokenizer


class TextOffsets:
    """Tells where in a choice's text each token begins, as the text grows.

    Args:
      tokenizer: decodes. before: ids whose text is not counted. start: characters before the first token.
      skip_special_tokens: whether special tokens have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], start: int, *, skip_special_tokens: bool
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, before, skip_special_tokens=skip_special_tokens)
        self._at = start

    def take(self, ids: Sequence[int]) -> list[int]:
        """Returns the offsets of the next ids; bytes that make no character yet count with the id that ends it."""
        offsets = []
        for token in ids:
            offsets.append(self._at)
            self._at += len(self._decoder.push((token,)))
        return offsets


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[PositionLogprobs | None], offsets: Sequence[int], num_top: int
) -> dict[str, Any]:
    """Returns the lists of /v1/completions.

    Args:
      ids: tokens. entries: of each, None for one that has nothing before it. offsets: where its text begins.
      num_top: likeliest tokens to list; the token itself is listed in any case.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token, entry in zip(ids, entries, strict=True):
        if entry is None:
            tokens.append("")
            values.append(None)
            tops.append(None)
            continue
        tokens.append(entry[token].decoded_token)
        values.append(entry[token].logprob)
        top: dict[str, float] = {}
        for one in (entry[token], *_likeliest(entry, num_top)):
            # Tokens that are parts of characters look alike; the first, and so the likelier, keeps the place.
            top.setdefault(one.decoded_token, one.logprob)
        tops.append(top)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}


def join_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the lists of two stretches of text as those of one."""
    return {name: [*first[name], *second[name]] for name in first}


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[PositionLogprobs], num_top: int
) -> list[dict[str, Any]]:
    """Returns the objects of /v1/chat/completions, one a token; see `completion_logprobs`."""

    def shape(token: int, one: Logprob) -> dict[str, Any]:
        return {
            "token": one.decoded_token,
            "logprob": one.logprob,
            "bytes": list(tokenizer.token_bytes(token)),
        }

    listed = []
    for token, entry in zip(ids, entries, strict=True):
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        top = [shape(other, one) for other, one in ranked if one.rank <= num_top][:num_top]
        listed.append(shape(token, entry[token]) | {"top_logprobs": top})
    return listed


def prompt_logprobs(entries: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """Returns vLLM's shape of a prompt's log-probabilities: by token id, None for the first token."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in entry.items()
        }
        for entry in entries
    ]


def _likeliest(entry: PositionLogprobs, count: int) -> list[Logprob]:
    return sorted((one for one in entry.values() if one.rank <= count), key=lambda one: one.rank)[:count]
