"""The stream decoder: what is sent piece by piece is what the whole decodes to."""

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.text import StreamDecoder, Tokenizer
from tests.text.vocabularies import (
    BYTE_LEVEL_SPECIAL,
    byte_level,
    byte_level_json,
    byte_level_metadata,
    metaspace,
    sentencepiece_metadata,
    word_level,
)

# Tokens whose bytes begin or end within a character: parts of an emoji and of a CJK character.
BYTE_LEVEL_TOKENS = ["ðŁ", "ĺĢ", "æ¼", "Ġa"]
SENTENCE_PIECES = ["▁", "▁H", "▁the", "é", "漢", "▁in▁the", "lo", "Hel", "▁▁"]


def make_word_level(folder: Path) -> Tokenizer:
    return word_level(folder, ["<unk>", "a", "bc", "漢", "é!", "🙂"])


def make_metaspace(folder: Path) -> Tokenizer:
    return metaspace(folder, ["<unk>", "▁", "▁Hello", "▁world", "!", "▁in▁the", "▁house", "Say", ":", "漢"])


def make_sentencepiece(folder: Path) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata(SENTENCE_PIECES))


def make_sentencepiece_without_prefix(folder: Path) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata(SENTENCE_PIECES, add_space_prefix=False))


def make_byte_level(folder: Path) -> Tokenizer:
    return byte_level(folder, BYTE_LEVEL_TOKENS)


MAKERS = [
    make_word_level,
    make_metaspace,
    make_sentencepiece,
    make_sentencepiece_without_prefix,
    make_byte_level,
]


@pytest.fixture(scope="module", params=MAKERS, ids=lambda make: make.__name__.removeprefix("make_"))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make: Callable[[Path], Tokenizer] = request.param
    return make(tmp_path_factory.mktemp("tokenizer"))


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], chunks: Sequence[Sequence[int]], **options: bool
) -> list[str]:
    decoder = StreamDecoder(tokenizer, prompt, **options)
    return [*(decoder.push(chunk) for chunk in chunks), decoder.flush()]


def ends_within_a_character(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> bool:
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(b"".join(tokenizer.visible_bytes(i, skip_special_tokens=skip) for i in ids))
    return utf8.getstate()[0] != b""


@given(data=st.data())
def test_joined_deltas_are_what_the_new_tokens_add(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12)
    prompt, chunks, skip = data.draw(ids), data.draw(st.lists(ids, max_size=5)), data.draw(st.booleans())
    if ends_within_a_character(tokenizer, prompt, skip=skip):
        prompt = []
    new = [i for chunk in chunks for i in chunk]
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *new], skip_special_tokens=skip)
    joined = "".join(stream(tokenizer, prompt, chunks, skip_special_tokens=skip))
    assert joined == whole[len(before) :]
    assert whole == before + joined


@given(text=st.text(), cut=st.integers(0, 40))
def test_text_that_is_encoded_comes_back_whole_and_in_whole_characters(
    tokenizer: Tokenizer, text: str, cut: int
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    deltas = stream(tokenizer, ids[:0], [[i] for i in ids])
    assert "".join(deltas) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in delta for delta in deltas)
    head, tail = ids[:cut], ids[cut:]
    if not ends_within_a_character(tokenizer, head):
        assert tokenizer.decode(head) + "".join(stream(tokenizer, head, [tail])) == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def byte_level_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_byte_level(tmp_path_factory.mktemp("byte_level"))


@given(ids=st.lists(st.integers(0, 263), max_size=12), skip=st.booleans())
def test_byte_level_decoding_equals_the_tokenizers_library(
    byte_level_tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    theirs = byte_level_json(BYTE_LEVEL_TOKENS, BYTE_LEVEL_SPECIAL)
    assert byte_level_tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(
        ids, skip_special_tokens=skip
    )


def test_trap_01_characters_over_several_tokens_are_sent_whole() -> None:
    text = "aé漢🙂🙂b"
    for tokenizer in (
        Tokenizer.from_gguf(byte_level_metadata([])),
        Tokenizer.from_gguf(sentencepiece_metadata(["▁", "a"])),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) >= 15  # a byte a token
        deltas = stream(tokenizer, [], [[i] for i in ids])
        assert not any("\ufffd" in delta for delta in deltas)
        assert "".join(deltas) == text == tokenizer.decode(ids)
        assert deltas.count("🙂") == 2
        assert "" in deltas  # while bytes are pending


def test_trap_01_broken_bytes_at_the_end_flush_as_the_whole_decode_has_them() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata([]))
    ids = tokenizer.encode("x🙂", add_special_tokens=False)[:-1]
    decoder = StreamDecoder(tokenizer)
    assert decoder.push(ids) == "x"
    assert decoder.flush() == "\ufffd"
    assert tokenizer.decode(ids) == "x\ufffd"


def test_a_prompt_that_ends_within_a_character_is_completed() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata([]))
    ids = tokenizer.encode("ab🙂c", add_special_tokens=False)
    for cut in (3, 4, 5):
        assert "".join(stream(tokenizer, ids[:cut], [[i] for i in ids[cut:]])) == "🙂c"


def test_trap_02_no_space_is_lost(tmp_path: Path) -> None:
    tokenizer = make_metaspace(tmp_path)

    def ids(*pieces: str) -> list[int]:
        return [i for piece in pieces if (i := tokenizer.token_to_id(piece)) is not None]

    prompt = ids("Say", ":")
    for new, text in (
        (ids("▁Hello", "▁world", "!"), " Hello world!"),
        (ids("▁in▁the", "▁house"), " in the house"),
    ):
        assert tokenizer.decode([*prompt, *new]) == "Say:" + text
        assert "".join(stream(tokenizer, prompt, [[i] for i in new])) == text
    # At the very beginning one space is the tokenizer's own; those within the piece are not.
    assert "".join(stream(tokenizer, [], [ids("▁in▁the"), ids("▁house")])) == "in the house"


def test_trap_02_a_special_token_before_does_not_count_as_text() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(["▁the"]))
    the = tokenizer.token_to_id("▁the")
    assert the is not None
    assert "".join(stream(tokenizer, [1], [[the], [the]])) == "the the"
    assert "".join(stream(tokenizer, [], [[1], [the]], skip_special_tokens=False)) == "<s> the"


def test_trap_29_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 1000, -1]
    assert tokenizer.decode(beyond) == ""
    assert "".join(stream(tokenizer, beyond, [beyond])) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_string(tokenizer.vocab_size) is None


class CountingTokenizer(Tokenizer):
    """Counts how many tokens are looked at."""

    looked_at = 0

    def visible_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        self.looked_at += 1
        return super().visible_bytes(token_id, skip_special_tokens=skip_special_tokens)


def test_each_token_is_looked_at_once() -> None:
    tokenizer = CountingTokenizer.from_gguf(byte_level_metadata([]))
    decoder = StreamDecoder(tokenizer, [65] * 5000)
    for _ in range(2000):
        decoder.push([66])
    assert tokenizer.looked_at == 2000 + 4
