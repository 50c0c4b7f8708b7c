"""Tiny tokenizers of every kind, made in a moment."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.text import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_LEVEL_SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_folder(folder: Path, tokenizer: tokenizers.Tokenizer | None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def word_level(folder: Path, words: list[str]) -> Tokenizer:
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer.from_folder(write_folder(folder, tokenizer))


def byte_level_json(tokens: list[str], special: list[str]) -> tokenizers.Tokenizer:
    """The 256 bytes, then tokens of several bytes (in the byte-level spelling; never merged to), then specials."""
    vocab = {token: i for i, token in enumerate([*ALPHABET, *tokens])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in special])
    return tokenizer


def byte_level(folder: Path, tokens: list[str] | None = None, **config: Any) -> Tokenizer:
    tokenizer = byte_level_json(tokens or [], BYTE_LEVEL_SPECIAL)
    return Tokenizer.from_folder(write_folder(folder, tokenizer, bos_token="<s>", eos_token="</s>", **config))


def metaspace(folder: Path, pieces: list[str]) -> Tokenizer:
    """A table of pieces with a Metaspace decoder."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(pieces)}, pieces[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return Tokenizer.from_folder(write_folder(folder, tokenizer))


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def sentencepiece_metadata(
    pieces: list[str], *, user_defined: tuple[str, ...] = (), control: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece vocabulary: unk, bos, eos, the 256 bytes, then what is given.

    The earlier a piece, the sooner it is merged.
    """
    rows = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    rows += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    rows += [(text, -1000.0, CONTROL) for text in control]
    rows += [(text, -1000.0, USER_DEFINED) for text in user_defined]
    rows += [(text, -float(rank), NORMAL) for rank, text in enumerate(pieces)]
    tokens, scores, types = zip(*rows, strict=True)
    base = {
        "model": "llama",
        "tokens": list(tokens),
        "scores": list(scores),
        "token_type": list(types),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (base | more).items()}


def byte_level_metadata(
    merges: list[str], *, special: tuple[str, ...] = (), pre: str = "gpt-2", **more: Any
) -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE vocabulary: special tokens, the 256 bytes, then what the merges make."""
    tokens = [*special, *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    types = [CONTROL] * len(special) + [NORMAL] * (len(tokens) - len(special))
    base = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return {f"tokenizer.ggml.{name}": value for name, value in (base | more).items()}
