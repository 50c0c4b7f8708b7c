"""Tokenizers of Hugging Face folders."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, processors

from jaxinfer.text import Tokenizer
from jaxinfer.text.pieces import rule_from_decoder
from tests.text.vocabularies import ALPHABET, byte_level, byte_level_json, word_level, write_folder


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    sentences = ["the cat sat on the mat", "a cat and a hat", "on the mat sat a cat"] * 4
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=out,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return out.getvalue()


def test_tokens_by_role_as_string_and_as_object(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, pad_token={"content": "<|im_end|>", "lstrip": False}, unk_token=None)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (256, (257,), 259)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|im_end|>"}
    assert tokenizer.special_ids == {256, 257, 258, 259}
    assert tokenizer.vocab_size == 260


def test_special_tokens_map_fills_what_the_configuration_leaves_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_json([], ["<s>", "</s>"]), bos_token="<s>")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>", "bos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, (257,))


def test_special_tokens_in_the_text_are_recognised_unless_told_otherwise(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.encode("<s>a<|im_end|>") == [256, tokenizer.token_to_id("a"), 259]
    plain = tokenizer.encode("<s>a<|im_end|>", parse_special=False)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == "<s>a<|im_end|>"
    assert tokenizer.encode("<s>a<|im_end|>") == [
        256,
        tokenizer.token_to_id("a"),
        259,
    ]  # the switch is not sticky


def test_added_tokens_of_the_configuration_are_added(tmp_path: Path) -> None:
    added = {"258": {"content": "<extra>", "special": False, "rstrip": True, "normalized": False}}
    folder = write_folder(tmp_path, byte_level_json([], ["<s>", "</s>"]), added_tokens_decoder=added)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<extra>  a") == [258, tokenizer.token_to_id("a")]
    assert tokenizer.decode([258]) == "<extra>"


def test_an_added_token_with_another_id_is_an_error(tmp_path: Path) -> None:
    added = {"300": {"content": "<extra>", "special": True}}
    folder = write_folder(tmp_path, byte_level_json([], []), added_tokens_decoder=added)
    with pytest.raises(ValueError, match="'<extra>': the configuration says id 300, the tokenizer has 256"):
        Tokenizer.from_folder(folder)


def with_post_processor(single: str) -> tokenizers.Tokenizer:
    tokenizer = byte_level_json([], ["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("single", "config", "prefix", "suffix"),
    [
        ("$A", {}, [], []),
        ("$A", {"add_bos_token": True}, [256], []),
        ("$A", {"add_bos_token": True, "add_eos_token": True}, [256], [257]),
        ("<s> $A", {}, [256], []),
        ("<s> $A </s>", {}, [256], [257]),
        # transformers 5 leaves the file's own post-processor as it is.
        ("<s> $A", {"add_bos_token": False, "add_eos_token": True}, [256], []),
    ],
)
def test_bos_and_eos(
    tmp_path: Path, single: str, config: dict[str, bool], prefix: list[int], suffix: list[int]
) -> None:
    folder = write_folder(tmp_path, with_post_processor(single), bos_token="<s>", eos_token="</s>", **config)
    tokenizer = Tokenizer.from_folder(folder)
    a = tokenizer.token_to_id("a")
    assert tokenizer.encode("a") == [*prefix, a, *suffix]
    assert tokenizer.encode("a", add_special_tokens=False) == [a]
    assert tokenizer.encode("") == [*prefix, *suffix]  # trap 32: with BOS the empty prompt is a prompt


def test_trap_25_bos_is_not_added_to_a_text_that_begins_with_it(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, add_bos_token=True)
    once = tokenizer.encode("Hi")
    assert once.count(256) == 1
    assert tokenizer.encode("<s>Hi") == once
    assert tokenizer.encode("<s>") == [256]


def test_trap_32_the_empty_prompt(tmp_path: Path) -> None:
    assert byte_level(tmp_path / "bos", add_bos_token=True).encode("") == [256]
    assert byte_level(tmp_path / "none").encode("") == []


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        byte_level(tmp_path).encode("a\ud83d")


def test_chat_template_files_win_over_the_configuration(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template="configuration")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer.from_folder(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert Tokenizer.from_folder(tmp_path).chat_templates == {"default": "jinja é", "rag": "rag"}


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level_json([], [])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    assert len(Tokenizer.from_folder(write_folder(tmp_path, tokenizer)).encode("abcd")) == 4


def test_ids_with_holes(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 7}, unk_token="<unk>"))
    ours = Tokenizer.from_folder(write_folder(tmp_path, tokenizer))
    assert ours.vocab_size == 8
    assert ours.decode([7, 3, 7]) == "a a"


def test_gpt2_files(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate([*ALPHABET, "Ġa"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ a\n")
    write_folder(tmp_path, None, tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(" a<|endoftext|>") == [256, 257]
    assert tokenizer.eos_ids == (257,)
    assert tokenizer.decode([256]) == " a"
    write_folder(tmp_path, None, tokenizer_class="OtherTokenizer")
    with pytest.raises(ValueError, match="tokenizer_class 'OtherTokenizer'"):
        Tokenizer.from_folder(tmp_path)


def test_sentencepiece_model(tmp_path: Path, sentencepiece_model: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    own = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in ("the cat", " the cat", "漢 hat", "", "  a\n\n mat "):
        assert tokenizer.encode(text) == [own.bos_id(), *own.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 300)
    assert tokenizer.encode("<s>the").count(1) == 1  # trap 25
    assert tokenizer.encode("<s>", parse_special=False)[1:] == own.encode("<s>")


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_added_tokens(tmp_path: Path, sentencepiece_model: bytes, legacy: bool) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    added = {
        "300": {"content": "<|user|>", "special": True, "rstrip": True},
        "301": {"content": "<|user|>x", "special": False},
        "302": {"content": "<left>", "special": False, "lstrip": True},
    }
    write_folder(tmp_path, None, legacy=legacy, add_bos_token=False, added_tokens_decoder=added)
    tokenizer = Tokenizer.from_folder(tmp_path)
    the = tokenizer.token_to_id("▁the")
    assert the is not None
    after = tokenizer.encode("<|user|>  the cat")[1:]
    # The old behaviour puts the space of a text's beginning after every added token, the new one does not.
    assert (after[0] == the) == legacy
    assert tokenizer.encode("the <left>") == [the, 302]
    assert tokenizer.encode("<|user|>x") == [301]  # the longest wins
    assert tokenizer.decode([300, 301, the]) == "<|user|>x the"
    assert tokenizer.vocab_size == 303
    assert 300 in tokenizer.special_ids
    assert 301 not in tokenizer.special_ids


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no tokenizer: looked for"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"tokenizer\.model: not a SentencePiece model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: expected an object, got list"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), decoders.Strip(" ", 2, 0)])
def test_a_decoder_that_is_not_a_join_of_bytes_is_refused(decoder: decoders.Decoder) -> None:
    with pytest.raises(ValueError, match="is not supported, only ByteLevel"):
        rule_from_decoder(decoder)


def test_words_without_a_decoder_are_joined_by_spaces(tmp_path: Path) -> None:
    tokenizer = word_level(tmp_path, ["<unk>", "a", "b"])
    assert tokenizer.decode(tokenizer.encode("a b a")) == "a b a"


def test_token_bytes(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, ["ðŁ"])
    assert b"".join(tokenizer.token_bytes(i) for i in range(256)) == bytes(
        byte for char in ALPHABET for byte in [tokenizer.token_bytes(tokenizer.token_to_id(char) or 0)[0]]
    )
    assert sorted(tokenizer.token_bytes(i) for i in range(256)) == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes(256) == b"\xf0\x9f"
    assert tokenizer.token_bytes(257) == b"<s>"


def test_a_byte_level_token_with_other_characters_stands_for_itself(tmp_path: Path) -> None:
    texts = ["<｜begin▁of▁sentence｜>", "two words"]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level_json([], texts)))
    assert [tokenizer.token_bytes(i) for i in (256, 257)] == [text.encode() for text in texts]
    assert tokenizer.decode([257], skip_special_tokens=False) == "two words"


@pytest.mark.parametrize("merges", ["Ġ a\nx", "Ġ zz\n"])
def test_broken_merges_are_a_clear_error(tmp_path: Path, merges: str) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate([*ALPHABET, "Ġa"])}))
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ValueError, match=r"vocab\.json and merges\.txt are not a vocabulary: "):
        Tokenizer.from_folder(tmp_path)
