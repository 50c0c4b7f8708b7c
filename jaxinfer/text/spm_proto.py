"""Write a SentencePiece `ModelProto` by hand: the protobuf wire format, only the fields that matter here.

The generated `sentencepiece_model_pb2` pins an exact protobuf runtime, so the few fields are written directly.
Source of the field numbers: google/sentencepiece, src/sentencepiece_model.proto.
"""

import struct
from collections.abc import Iterable
from enum import IntEnum

_VARINT, _LENGTH_DELIMITED, _FIXED32 = 0, 2, 5
_TRAINER_SPEC, _NORMALIZER_SPEC = 2, 3  # fields of ModelProto


class PieceType(IntEnum):
    """What a piece is; GGUF's `tokenizer.ggml.token_type` uses the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    """The algorithm of a SentencePiece model."""

    UNIGRAM = 1
    BPE = 2


def write_model(
    pieces: Iterable[tuple[str, float, PieceType]],
    *,
    model_type: ModelType,
    byte_fallback: bool,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool = False,
    precompiled_charsmap: bytes = b"",
) -> bytes:
    """Serialise a SentencePiece model.

    Args:
        pieces: (text with U+2581 for spaces, score, type) of each id in order.
        model_type: the algorithm that uses the scores.
        byte_fallback: unknown characters become their byte pieces; all 256 must exist.
        add_dummy_prefix: a space is put before the text.
        remove_extra_whitespaces: runs of spaces are folded and the ends stripped.
        precompiled_charsmap: the normaliser's table, empty for none.

    Returns:
        The bytes that `SentencePieceProcessor(model_proto=...)` reads.
    """
    model = b"".join(map(_piece, *zip(*pieces, strict=True)))
    trainer = _integer(3, model_type) + _integer(35, byte_fallback)
    normalizer = _integer(3, add_dummy_prefix) + _integer(4, remove_extra_whitespaces) + _integer(5, True)
    if precompiled_charsmap:
        normalizer += _message(2, precompiled_charsmap)
    return model + _message(_TRAINER_SPEC, trainer) + _message(_NORMALIZER_SPEC, normalizer)


def without_dummy_prefix(model: bytes) -> bytes:
    """Return the model with `add_dummy_prefix` off: of a message that occurs twice the later value wins."""
    return model + _message(_NORMALIZER_SPEC, _integer(3, False))


def _piece(text: str, score: float, kind: PieceType) -> bytes:
    # Field 1 of the model. Spelled out for the usual short piece: a vocabulary has 262,144 of them.
    raw = text.encode()
    tail = struct.pack("<BfBB", 2 << 3 | _FIXED32, score, 3 << 3, kind)
    if len(raw) <= 100:
        return bytes((0x0A, len(raw) + 2 + len(tail), 0x0A, len(raw))) + raw + tail
    return _message(1, _message(1, raw) + tail)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH_DELIMITED) + _varint(len(content)) + content


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(int(value))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
