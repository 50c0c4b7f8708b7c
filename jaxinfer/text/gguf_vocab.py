"""Rebuild a tokenizer from the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models

from jaxinfer.text.backends import AddedToken, Backend, SentencePieceBackend, TokenizersBackend
from jaxinfer.text.pieces import SPACE_MARK
from jaxinfer.text.pretokenizers import find_pre_tokenizer
from jaxinfer.text.spm_proto import ModelType, PieceType, write_model
from jaxinfer.text.vocabulary import Vocabulary

_PREFIX = "tokenizer.ggml."
# Turn ends that llama.cpp also takes for the end of a text (src/llama-vocab.cpp): a GGUF file has one EOS entry
# and no generation_config, and an instruction-tuned file may name only the document's end there.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Rebuild the tokenizer that a GGUF file describes.

    Args:
        metadata: the file's key-value pairs, arrays as sequences.

    Returns:
        The vocabulary with its backend, BOS rule and chat templates.

    Raises:
        ValueError: a missing, inconsistent or unsupported key, named.
    """
    model = metadata.get(_PREFIX + "model")
    tokens = _Tokens(metadata)
    if model == "gpt2":
        rule = find_pre_tokenizer(metadata.get(_PREFIX + "pre"))
        backend: Backend = _byte_level_bpe(metadata, tokens)
        adds_bos, adds_eos = rule.adds_bos, False
    elif model == "llama":
        backend = _sentencepiece(metadata, tokens, ModelType.BPE)
        adds_bos, adds_eos = True, False
    elif model == "t5":
        backend = _sentencepiece(metadata, tokens, ModelType.UNIGRAM)
        adds_bos, adds_eos = False, True
    else:
        raise ValueError(f"tokenizer.ggml.model: got {model!r}, supported are gpt2, llama and t5")

    ids = {role: tokens.read_id(role) for role in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special_tokens = {
        name: tokens.strings[token_id] for name, role in names.items() if (token_id := ids[role]) is not None
    }
    bos, eos = ids["bos"], ids["eos"]
    add_bos = metadata.get(_PREFIX + "add_bos_token", adds_bos)
    add_eos = metadata.get(_PREFIX + "add_eos_token", adds_eos)
    turn_ends = [tokens.control_id(text) for text in _TURN_ENDS]
    ends = dict.fromkeys(i for i in (eos, ids["eot"], ids["eom"], *turn_ends) if i is not None)
    return Vocabulary(
        backend=backend,
        special_tokens=special_tokens,
        eos_ids=tuple(ends),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=(eos,) if add_eos and eos is not None else (),
        chat_templates=_chat_templates(metadata),
    )


class _Tokens:
    """The token arrays of a GGUF file, checked against one another."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.strings: list[str] = list(_required(metadata, "tokens"))
        if not self.strings:
            raise ValueError("tokenizer.ggml.tokens: got an empty list")
        types = metadata.get(_PREFIX + "token_type")
        self.types = [PieceType.NORMAL] * len(self.strings) if types is None else self._read_types(types)

    def _read_types(self, types: Sequence[Any]) -> list[PieceType]:
        _check_length("token_type", types, len(self.strings))
        known = {int(kind): kind for kind in PieceType}
        try:
            return [known[int(kind)] for kind in types]
        except KeyError as error:
            raise ValueError(f"tokenizer.ggml.token_type: got {error.args[0]}, known are 1 to 6") from None

    def read_id(self, role: str) -> int | None:
        """Return the id of a role such as `bos`, None where the file names none."""
        value = self._metadata.get(f"{_PREFIX}{role}_token_id")
        if value is not None and not 0 <= int(value) < len(self.strings):
            raise ValueError(
                f"tokenizer.ggml.{role}_token_id: got {value}, the file has {len(self.strings)} tokens"
            )
        return None if value is None else int(value)

    def control_id(self, text: str) -> int | None:
        """Return the id of a control token by its text, None where there is none."""
        try:
            token_id = self.strings.index(text)
        except ValueError:
            return None
        return token_id if self.types[token_id] is PieceType.CONTROL else None


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: _Tokens) -> TokenizersBackend:
    rule = find_pre_tokenizer(metadata.get(_PREFIX + "pre"))
    merges = [_split_merge(merge) for merge in _required(metadata, "merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens.strings)}
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises bare Exception, for a merge of pieces that are no tokens
        raise ValueError(f"tokenizer.ggml.merges: {error}") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    if (normalizer := rule.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    matched = (PieceType.CONTROL, PieceType.USER_DEFINED, PieceType.UNKNOWN)
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind is not PieceType.USER_DEFINED, normalized=False)
            for token, kind in zip(tokens.strings, tokens.types, strict=True)
            if kind in matched
        ]
    )
    return TokenizersBackend(tokenizer)


def _split_merge(merge: str) -> tuple[str, str]:
    left, separator, right = merge[1:].partition(" ")  # the first piece is never empty, but may be a space
    if not separator:
        raise ValueError(f"tokenizer.ggml.merges: got {merge!r}, expected two pieces with a space between")
    return merge[0] + left, right


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: _Tokens, model_type: ModelType
) -> SentencePieceBackend:
    scores = _required(metadata, "scores")
    _check_length("scores", scores, len(tokens.strings))
    unknown = tokens.read_id("unknown")
    types = list(tokens.types)
    if unknown is None:
        unknown = types.index(PieceType.UNKNOWN) if PieceType.UNKNOWN in types else 0
    # SentencePiece wants exactly one unknown piece; converters write it as a control piece, or several of them.
    types = [PieceType.CONTROL if kind is PieceType.UNKNOWN else kind for kind in types]
    types[unknown] = PieceType.UNKNOWN
    # Converters write the spaces of user-defined pieces plainly, and those of all others as the mark.
    strings = [
        token.replace(" ", SPACE_MARK) if kind is PieceType.USER_DEFINED else token
        for token, kind in zip(tokens.strings, types, strict=True)
    ]
    _make_distinct(strings, types)
    model = write_model(
        zip(strings, map(float, scores), types, strict=True),
        model_type=model_type,
        byte_fallback=types.count(PieceType.BYTE) == 256,
        add_dummy_prefix=bool(metadata.get(_PREFIX + "add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get(_PREFIX + "remove_extra_whitespaces", False)),
        precompiled_charsmap=bytes(metadata.get(_PREFIX + "precompiled_charsmap", b"")),
    )
    added = {
        token: AddedToken(token_id)
        for token_id, (token, kind) in enumerate(zip(tokens.strings, types, strict=True))
        if kind in (PieceType.CONTROL, PieceType.UNKNOWN)
    }
    return SentencePieceBackend(model, added, token_strings=tokens.strings, prefix_every=True)


def _make_distinct(strings: list[str], types: list[PieceType]) -> None:
    # SentencePiece refuses empty and repeated pieces; paddings of a vocabulary may be either. They can never be
    # the result of encoding, so any name will do; decoding uses the file's own strings.
    seen: set[str] = set()
    for token_id, token in enumerate(strings):
        if not token or token in seen:
            strings[token_id], types[token_id] = f"<unused piece {token_id}>", PieceType.UNUSED
        seen.add(strings[token_id])


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(key + "."): text for name, text in metadata.items() if name.startswith(key + ".")
    }
    return named | ({"default": metadata[key]} if key in metadata else {})


def _required(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = metadata.get(_PREFIX + name)
    if value is None:
        raise ValueError(f"tokenizer.ggml.{name} is missing; this vocabulary cannot be rebuilt without it")
    return value


def _check_length(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"tokenizer.ggml.{name}: got {len(values)} entries for {count} tokens")
