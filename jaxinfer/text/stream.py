"""Text as it grows: whole characters only, and nothing that may still become a stop string."""

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxinfer.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class StreamDecoder:
    """Decodes tokens one after another, O(1) a token.

    The joined returns of `push` and `flush` are what the new tokens add to the decoded prompt. Bytes that do not
    yet make a character wait; where a prompt ends within one, the first new token completes it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """Start after a prompt.

        Args:
            tokenizer: decodes the tokens.
            prompt_ids: the ids that come before; their text is not sent.
            skip_special_tokens: leave special tokens out of the text.
        """
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Of the prompt only the last bytes matter: are there any, and do they end within a character.
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        self._at_start = not tail
        self._utf8.decode(tail)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text they complete, possibly none.

        Args:
            ids: the next token ids, in order.

        Returns:
            The text to send.
        """
        data = b"".join(self._bytes(token_id) for token_id in ids)
        if self._at_start and data:
            self._at_start = False
            if self._tokenizer.strips_space:
                data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for bytes that never became a character, as in `decode`."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        return self._tokenizer.visible_bytes(token_id, skip_special_tokens=self._skip)


class StopMatch(NamedTuple):
    """What `StopMatcher` lets out.

    Attributes:
        emit: text to send now.
        stopped: a stop string is complete; nothing follows.
        matched: that stop string, None until then.
    """

    emit: str
    stopped: bool = False
    matched: str | None = None


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces of any size.

    The string that is complete first wins, and of those complete at the same character the longest; so the
    result does not depend on how the text is cut. Text that may still begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Prepare for a text.

        Args:
            stops: the stop strings, none empty.
            include_stop: the stop string itself is part of the text that is let out.

        Raises:
            ValueError: an empty stop string, which would match anywhere.
        """
        if any(not stop for stop in stops):
            raise ValueError("stop: got an empty string, expected strings of at least one character")
        # Longest first, so that the first one found complete is the one that wins.
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopMatch:
        """Take the next piece of text.

        Args:
            text: what follows, possibly empty.

        Returns:
            The text that is certain, and whether a stop string is complete; after one, nothing more comes.
        """
        if self._matched is not None:
            return StopMatch("", stopped=True, matched=self._matched)
        for position, char in enumerate(text):
            for pattern in self._patterns:
                if pattern.advance(char):
                    return self._stop(self._held + text[: position + 1], pattern.text)
        pending = self._held + text
        keep = max((pattern.matched for pattern in self._patterns), default=0)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return StopMatch(pending[:cut])

    def flush(self) -> str:
        """Return what was held back; call it at the end of a text that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, stop: str) -> StopMatch:
        self._matched, self._held = stop, ""
        return StopMatch(text if self._include_stop else text.removesuffix(stop), stopped=True, matched=stop)


class _Pattern:
    """One stop string and how much of it the text so far ends with (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # fallback[n]: the longest proper prefix of the first n characters that they also end with.
        self._fallback = [0] * (len(text) + 1)
        for end in range(1, len(text)):
            self._fallback[end + 1] = self._follow(self._fallback[end], text[end])

    def advance(self, char: str) -> bool:
        """Take one character; True where the string is complete."""
        self.matched = self._follow(self.matched, char)
        return self.matched == len(self.text)

    def _follow(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._fallback[matched]
        return matched + (self.text[matched] == char)
