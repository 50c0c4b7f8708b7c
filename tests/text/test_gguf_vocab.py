"""Tokenizers rebuilt from the metadata of GGUF files."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.text import Tokenizer
from jaxinfer.text.pretokenizers import PRE_TOKENIZERS
from tests.text.vocabularies import CHATML, UNUSED, USER_DEFINED, byte_level_metadata, sentencepiece_metadata


def strings(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_string(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def test_byte_level_merges_and_special_tokens() -> None:
    metadata = byte_level_metadata(
        ["h e", "Ġ he"],
        special=("<|im_start|>", "<|im_end|>"),
        bos_token_id=0,
        eos_token_id=1,
        padding_token_id=1,
    )
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": CHATML})
    assert strings(tokenizer, "he he<|im_end|>") == ["he", "Ġhe", "<|im_end|>"]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (1,), 1)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.chat_template == CHATML
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("he", add_special_tokens=True) == [
        258
    ]  # BPE files without add_bos_token add none


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # The same merges everywhere; only the splitting before them differs.
        ("gpt-2", "12 1", ["12", "Ġ1"]),
        ("smollm", "12 1", ["1", "2", "Ġ", "1"]),
        ("llama-bpe", "1212 1", ["12", "1", "2", "Ġ", "1"]),
        ("qwen2", "12 1", ["1", "2", "Ġ", "1"]),
        ("gpt-4o", "12 1", ["12", "Ġ", "1"]),
        ("tekken", "12 1", ["1", "2", "Ġ", "1"]),
        ("gpt-2", "aB", ["aB"]),
        ("gpt-4o", "aB", ["a", "B"]),
        ("tekken", "aB", ["a", "B"]),
        ("llama-bpe", "(a", ["(a"]),
        ("gpt-2", "(a", ["(", "a"]),
    ],
)
def test_each_pre_tokenizer_splits_its_own_way(pre: str, text: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(["1 2", "Ġ 1", "a B", "( a"], pre=pre))
    assert strings(tokenizer, text) == expected


@given(text=st.text(), pre=st.sampled_from(sorted(PRE_TOKENIZERS)))
def test_byte_level_round_trip(text: str, pre: str) -> None:
    import unicodedata

    tokenizer = Tokenizer.from_gguf(byte_level_metadata(["Ġ a", "Ġ Ġ"], pre=pre))
    expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
    decoded = tokenizer.decode(tokenizer.encode(text))
    # Characters newer than the library's tables compose differently; what NFC makes of the two is the same.
    assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", expected)
    if not PRE_TOKENIZERS[pre].nfc:
        assert decoded == text


def test_words_that_are_tokens_are_taken_whole_where_the_model_does_so() -> None:
    metadata = byte_level_metadata([], pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("hello")
    metadata["tokenizer.ggml.token_type"].append(1)
    metadata["tokenizer.ggml.merges"] = ["l l"]
    metadata["tokenizer.ggml.tokens"].append("ll")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert strings(Tokenizer.from_gguf(metadata), "hello") == ["hello"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert strings(Tokenizer.from_gguf(metadata), "hello") == ["h", "e", "ll", "o"]


def test_user_defined_tokens_are_matched_and_shown() -> None:
    metadata = byte_level_metadata(["a b"], special=("<tool>",))
    metadata["tokenizer.ggml.token_type"][0] = USER_DEFINED
    tokenizer = Tokenizer.from_gguf(metadata)
    assert strings(tokenizer, "ab<tool>") == ["ab", "<tool>"]
    assert tokenizer.decode([0]) == "<tool>"
    assert not tokenizer.special_ids


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_trap_25_bos_by_the_file_or_by_the_kind(pre: str, flag: bool | None, adds: bool) -> None:
    metadata = byte_level_metadata(["a b"], special=("<s>",), pre=pre, bos_token_id=0)
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("").count(0) == int(adds)  # trap 32: without BOS the empty prompt has no token
    assert tokenizer.encode("ab").count(0) == int(adds)
    assert tokenizer.encode("<s>ab").count(0) == 1


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(["he", "▁he", "lo", "▁", "h", "e", "l", "o"]))
    assert strings(tokenizer, "helo") == ["▁he", "lo"]
    assert strings(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("helo")[0] == 1
    assert tokenizer.encode("<s>helo") == tokenizer.encode("helo")
    assert tokenizer.encode("") == [1]
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.eos_ids == (2,)


def test_sentencepiece_space_prefix() -> None:
    pieces = ["▁a", "▁", "a"]
    with_prefix = Tokenizer.from_gguf(sentencepiece_metadata(pieces))
    without = Tokenizer.from_gguf(sentencepiece_metadata(pieces, add_space_prefix=False))
    assert strings(with_prefix, "a") == ["▁a"]
    assert strings(with_prefix, "<s>a") == ["<s>", "▁a"]
    assert strings(without, "a") == ["a"]
    assert with_prefix.decode(with_prefix.encode("a a")) == "a a"
    assert without.decode(without.encode(" a a")) == " a a"


@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁")), prefix=st.booleans())
def test_sentencepiece_round_trip(text: str, prefix: bool) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(["▁", "▁a", "a", "b"], add_space_prefix=prefix))
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids) == text


def test_control_tokens_in_the_text_leftmost_and_longest() -> None:
    metadata = sentencepiece_metadata(["▁", "a"], control=("<t>", "<t>>", "[t]"), add_space_prefix=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert strings(tokenizer, "a<t>>[t]<t>a<<t>") == ["a", "<t>>", "[t]", "<t>", "a", "<0x3C>", "<t>"]
    assert tokenizer.decode(tokenizer.encode("a<t>a")) == "aa"
    assert tokenizer.decode(tokenizer.encode("a<t>a"), skip_special_tokens=False) == "<s>a<t>a"
    plain = tokenizer.encode("<t>", parse_special=False, add_special_tokens=False)
    assert tokenizer.decode(plain) == "<t>"


def test_long_runs_of_spaces_take_the_longest_user_defined_piece_first() -> None:
    spaces = tuple(" " * n for n in range(2, 32))  # as Gemma: plain spaces in the file
    metadata = sentencepiece_metadata(["▁a", "▁", "a"], user_defined=spaces, add_space_prefix=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert strings(tokenizer, "a" + " " * 5 + "a") == ["a", " " * 5, "a"]
    assert strings(tokenizer, " " * 40 + "a") == [" " * 31, " " * 9, "a"]
    assert strings(tokenizer, " " * 32 + "a") == [" " * 31, "▁a"]
    assert tokenizer.decode(tokenizer.encode("a" + " " * 70 + "a")) == "a" + " " * 70 + "a"


def test_unknown_written_as_control_and_odd_paddings() -> None:
    metadata = sentencepiece_metadata(["▁", "a", "", "a", "[PAD]"])
    metadata["tokenizer.ggml.token_type"][0] = 3  # as Gemma's files have it
    metadata["tokenizer.ggml.token_type"][-1] = UNUSED
    tokenizer = Tokenizer.from_gguf(metadata)
    assert strings(tokenizer, "a") == ["▁", "a"]
    assert tokenizer.encode("<unk>") == [1, 0]
    assert tokenizer.decode([tokenizer.vocab_size - 2, tokenizer.vocab_size - 1]) == "a[PAD]"


def test_unigram_takes_the_best_sum_of_scores() -> None:
    metadata = sentencepiece_metadata(["▁ab", "c", "▁a", "bc", "▁", "a", "b"], model="t5")
    scores = {"▁ab": -9.0, "c": -9.0, "▁a": -1.0, "bc": -1.0, "▁": -2.0, "a": -3.0, "b": -3.0}
    metadata["tokenizer.ggml.scores"][-7:] = list(scores.values())
    tokenizer = Tokenizer.from_gguf(metadata)
    assert strings(tokenizer, "abc") == ["▁a", "bc"]
    assert tokenizer.encode("abc")[-1] == 2  # this kind ends with EOS and has no BOS
    assert 1 not in tokenizer.encode("abc")


def test_every_end_that_the_file_knows_ends_a_text() -> None:
    special = ("<eos>", "<|im_end|>", "<other>")
    metadata = byte_level_metadata([" ".join("ab")], special=special, eos_token_id=0, eot_token_id=2)
    assert Tokenizer.from_gguf(metadata).eos_ids == (0, 2, 1)


def changed(**changes: Any) -> dict[str, Any]:
    metadata = byte_level_metadata(["a b"], special=("<s>",))
    for name, value in changes.items():
        metadata["tokenizer.ggml." + name] = value
    return {name: value for name, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (changed(model="bert"), "tokenizer.ggml.model: got 'bert', supported are gpt2, llama and t5"),
        (changed(model=None), "tokenizer.ggml.model: got None"),
        (changed(pre="strange"), "tokenizer.ggml.pre: got 'strange', supported are .*smollm"),
        (changed(pre=None), "tokenizer.ggml.pre: got None"),
        (changed(tokens=None), "tokenizer.ggml.tokens is missing"),
        (changed(tokens=[]), "tokenizer.ggml.tokens: got an empty list"),
        (changed(merges=None), "tokenizer.ggml.merges is missing"),
        (changed(merges=["ab"]), "tokenizer.ggml.merges: got 'ab'"),
        (changed(merges=["a 漢"]), "tokenizer.ggml.merges: "),
        (changed(token_type=[1]), "tokenizer.ggml.token_type: got 1 entries for 258 tokens"),
        (changed(token_type=[9] * 258), "tokenizer.ggml.token_type: got 9"),
        (changed(bos_token_id=258), "tokenizer.ggml.bos_token_id: got 258, the file has 258 tokens"),
        (changed(model="llama"), "tokenizer.ggml.scores is missing"),
        (changed(model="llama", scores=[0.0]), "tokenizer.ggml.scores: got 1 entries"),
    ],
)
def test_what_is_wrong_is_named(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Tokenizer.from_gguf(metadata)
