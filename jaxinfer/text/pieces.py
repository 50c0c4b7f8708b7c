"""What bytes a token stands for.

Every decoder that our tokenizers use is a join: each token is some bytes, whatever its neighbours, and at most one
space is taken from the very beginning of the text. Holding to that makes decoding, streaming and grammars one rule.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import Decoder

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class PieceRule:
    """How a token's string becomes bytes.

    Attributes:
        to_bytes: token string -> the bytes it stands for.
        strips_space: one space at the very beginning of a decoded text is not part of it.
    """

    to_bytes: Callable[[str], bytes]
    strips_space: bool


def byte_level_bytes(token: str) -> bytes:
    """Undo GPT-2's printable alphabet; a token with any other character (an added one) stands for itself."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Read a SentencePiece piece: `<0xE2>` is a byte, U+2581 a space."""
    if match := _BYTE_PIECE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(SPACE_MARK, " ").encode()


def rule_from_decoder(decoder: Decoder | None) -> PieceRule:
    """Read the rule off a `tokenizers` decoder.

    Args:
        decoder: `Tokenizer.decoder`; None joins the tokens with spaces, as `tokenizers` does.

    Returns:
        The rule.

    Raises:
        ValueError: a decoder that is not a join of bytes per token.
    """
    if decoder is None:
        return PieceRule(lambda token: b" " + token.encode(), strips_space=True)
    spec: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    if any(step["type"] == "ByteLevel" for step in steps):
        return PieceRule(byte_level_bytes, strips_space=False)
    replaced: list[tuple[str, str]] = []
    byte_fallback = strips_space = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replaced.append((old, new))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                replaced.append((mark, " "))
                strips_space = strips_space or scheme != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips_space = strips_space or start == 1
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise ValueError(
                    f"tokenizer.json: decoder step {json.dumps(step, ensure_ascii=False)} is not supported, only "
                    'ByteLevel, ByteFallback, Fuse, Metaspace, Replace of a string, Strip of one leading " "'
                )
    return PieceRule(_Replacer(tuple(replaced), byte_fallback), strips_space)


@dataclass(frozen=True)
class _Replacer:
    """Replace strings in order; with byte fallback `<0xE2>` is a byte."""

    replaced: tuple[tuple[str, str], ...]
    byte_fallback: bool

    def __call__(self, token: str) -> bytes:
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replaced:
            token = token.replace(old, new)
        return token.encode()


def _byte_of_char() -> dict[str, int]:
    # Source: openai/gpt-2, src/encoder.py, bytes_to_unicode: printable bytes keep their character, the others
    # follow from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
