"""The tokenizer: text to ids, ids to text, the bytes of a token."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from jaxinfer.text.folder import read_folder_vocabulary
from jaxinfer.text.gguf_vocab import read_gguf_vocabulary
from jaxinfer.text.vocabulary import Vocabulary


class Tokenizer:
    """Turns text into ids and ids into text, the same way for every kind of vocabulary.

    Decoding joins the bytes of the tokens and reads them as UTF-8 (what is not valid becomes U+FFFD), so that a
    text decoded whole and one decoded as it grows (`StreamDecoder`) cannot differ. Ids beyond the vocabulary,
    which a model with a padded head may produce, stand for no bytes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Read the tokenizer of a Hugging Face model folder.

        Args:
            path: the folder, with tokenizer.json, tokenizer.model, or vocab.json and merges.txt.

        Returns:
            The tokenizer.

        Raises:
            FileNotFoundError: the folder holds none of them.
            ValueError: a file that is damaged or asks for what is not supported.
        """
        return cls(read_folder_vocabulary(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Rebuild the tokenizer that a GGUF file describes.

        Args:
            metadata: the file's key-value pairs, `tokenizer.ggml.*` among them.

        Returns:
            The tokenizer.

        Raises:
            ValueError: a missing, inconsistent or unsupported key, named.
        """
        return cls(read_gguf_vocabulary(metadata))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Turn text into ids.

        Args:
            text: any text; the empty text gives only what is added.
            add_special_tokens: add BOS (and EOS where the model wants it); BOS is not added to a text that
                begins with it.
            parse_special: special tokens written out in the text become their ids, not ordinary text.

        Returns:
            The ids.

        Raises:
            ValueError: the text holds a lone surrogate, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text: got a lone surrogate at character {error.start}, expected Unicode"
            ) from None
        ids = self._backend.encode(text, parse_special=parse_special)
        if not add_special_tokens:
            return ids
        prefix, suffix = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
        starts_with_prefix = bool(prefix) and ids[: len(prefix)] == [*prefix]
        return [*(() if starts_with_prefix else prefix), *ids, *suffix]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text.

        Args:
            ids: token ids; those beyond the vocabulary stand for nothing.
            skip_special_tokens: leave special tokens out.

        Returns:
            The text.
        """
        data = b"".join(self.visible_bytes(i, skip_special_tokens=skip_special_tokens) for i in ids)
        if self.strips_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def visible_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        """Return the bytes that a token adds to a text: `token_bytes`, or none for a special one skipped."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        return self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; not always whole characters, none beyond the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.token_string(token_id)
            known = b"" if token is None else self._backend.rule.to_bytes(token)
            self._bytes[token_id] = known
        return known

    def token_string(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token, None beyond the vocabulary."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by the vocabulary's own spelling, None where there is none."""
        return self._backend.token_to_id(token)

    @property
    def strips_space(self) -> bool:
        """Whether one space at the beginning of a decoded text is not part of it (SentencePiece kinds)."""
        return self._backend.rule.strips_space

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; the model's head may be larger."""
        return self._backend.size

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, None where the model has none."""
        return self._role_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        """The padding id, None where the model has none."""
        return self._role_id("pad_token")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text as far as the tokenizer's files know; generation_config may name more."""
        return self._vocabulary.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        return self._backend.special_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Token strings by role, as chat templates name them: `bos_token`, `eos_token`, ..."""
        return self._vocabulary.special_tokens

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template, None where the model has none."""
        return self.chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The Jinja sources of all chat templates by name."""
        return self._vocabulary.chat_templates

    def _role_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.token_to_id(text)
