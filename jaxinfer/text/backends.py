"""The two libraries that turn text into ids, behind one small interface."""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import sentencepiece
import tokenizers

from jaxinfer.text.pieces import PieceRule, rule_from_decoder, sentencepiece_bytes
from jaxinfer.text.spm_proto import without_dummy_prefix


class Backend(Protocol):
    """Text to ids and back to token strings; knows nothing of BOS or templates."""

    @property
    def size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        ...

    @property
    def rule(self) -> PieceRule:
        """How token strings become bytes."""
        ...

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of the text, with nothing added."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token string, None where there is none."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token string of an id, None where there is none."""
        ...


class TokenizersBackend:
    """A `tokenizers.Tokenizer`: tokenizer.json files and rebuilt byte-level BPE."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.rule = rule_from_decoder(tokenizer.decoder)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = _one_past_largest_id(tokenizer)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        # A copy: the switch is part of the object, and a prompt in another thread may need the other way.
        plain = copy.deepcopy(self._tokenizer)
        plain.encode_special_tokens = True
        return plain

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of the text, with nothing added."""
        tokenizer = self._tokenizer if parse_special else self._plain
        return tokenizer.encode(text, add_special_tokens=False).ids

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token string, None where there is none."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token string of an id, None where there is none."""
        return self._tokenizer.id_to_token(token_id)


def _one_past_largest_id(tokenizer: tokenizers.Tokenizer) -> int:
    count = tokenizer.get_vocab_size()
    if tokenizer.id_to_token(count) is None and (count == 0 or tokenizer.id_to_token(count - 1) is not None):
        return count
    return max(tokenizer.get_vocab().values(), default=-1) + 1  # the ids have holes


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text before the model sees it.

    Attributes:
        token_id: its id.
        special: left out by `skip_special_tokens`.
        lstrip: takes the white space before it.
        rstrip: takes the white space after it.
    """

    token_id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


class SentencePieceBackend:
    """A SentencePiece model plus added tokens, which SentencePiece itself never matches in a text."""

    def __init__(
        self,
        model: bytes,
        added: Mapping[str, AddedToken],
        *,
        token_strings: list[str] | None = None,
        prefix_every: bool,
    ) -> None:
        """Read the model.

        Args:
            model: a serialised SentencePiece ModelProto.
            added: added and control tokens by their text.
            token_strings: the string of each id where the model's own pieces differ from it.
            prefix_every: the space before a text also comes before what follows an added token.
        """
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._model = model
        self._added = _AddedTokens(added)
        self._added_strings = {token.token_id: text for text, token in added.items()}
        self._token_strings = token_strings
        self._prefix_every = prefix_every
        self.size = max([self._processor.get_piece_size() - 1, *self._added_strings]) + 1
        self.special_ids = frozenset(token.token_id for token in added.values() if token.special)
        self._adds_prefix = self._processor.normalize("a") != "a"
        self.rule = PieceRule(sentencepiece_bytes, strips_space=self._adds_prefix)

    @cached_property
    def _bare(self) -> sentencepiece.SentencePieceProcessor:
        return sentencepiece.SentencePieceProcessor(model_proto=without_dummy_prefix(self._model))

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of the text, with nothing added."""
        if not parse_special:
            return self._processor.encode(text)
        ids: list[int] = []
        for part in self._added.split(text):
            if isinstance(part, int):
                ids.append(part)
            elif self._adds_prefix and ids and not self._prefix_every:
                ids += self._bare.encode(part)
            else:
                ids += self._processor.encode(part)
        return ids

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token string, None where there is none."""
        if (added := self._added.table.get(token)) is not None:
            return added.token_id
        token_id = self._processor.piece_to_id(token)
        return token_id if self.id_to_token(token_id) == token else None

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token string of an id, None where there is none."""
        if (added := self._added_strings.get(token_id)) is not None:
            return added
        if token_id >= self._processor.get_piece_size():
            return None
        return self._token_strings[token_id] if self._token_strings else self._processor.id_to_piece(token_id)


class _AddedTokens:
    """Splits a text at added tokens: leftmost, then longest."""

    def __init__(self, table: Mapping[str, AddedToken]) -> None:
        self.table = {text: token for text, token in table.items() if text}
        # Thousands of tokens may begin alike (Gemma has 6,242 `<unused..>`): look the lengths up, longest
        # first, rather than try an alternation token by token.
        lengths: dict[str, set[int]] = {}
        for text in self.table:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(lengths)) + "]") if lengths else None

    def split(self, text: str) -> Iterator[int | str]:
        """Yield the ids of added tokens and the texts between them, in order; no empty text."""
        start = position = 0
        while self._first and (match := self._first.search(text, position)):
            position = match.start()
            found = self._match(text, position)
            if found is None:
                position += 1
                continue
            token, position_after = found
            before = text[start:position]
            if token.lstrip:
                before = before.rstrip()
            if before:
                yield before
            yield token.token_id
            start = position = position_after
        if start < len(text):
            yield text[start:]

    def _match(self, text: str, position: int) -> tuple[AddedToken, int] | None:
        for length in self._lengths[text[position]]:
            if token := self.table.get(text[position : position + length]):
                end = position + length
                if token.rstrip:
                    end = len(text) - len(text[end:].lstrip())
                return token, end
        return None
