"""Known traps of text, stops, ends, BOS and empty prompts: BIGRAM through the public loader and the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.engine.outputs import CompletionOutput
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.acceptance.bigram import Table, Words
from tests.acceptance.conftest import BIGRAM_VOCAB, OpenBigram
from tests.text.vocabularies import CHATML, metaspace

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def both(llm: LLM, prompt: str | list[int], params: SamplingParams) -> CompletionOutput:
    """Returns the only choice of a request, which must be the same whole and streamed."""
    deltas = list(llm.stream(prompt, params))
    (output,) = llm.generate(prompt, params)
    (choice,) = output.outputs
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [token for delta in deltas for token in delta.token_ids] == choice.token_ids
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (choice.finish_reason, choice.stop_reason)
    assert not any("\ufffd" in delta.text for delta in deltas)
    return choice


def test_trap_01_characters_over_several_tokens_arrive_whole(open_bigram: OpenBigram):
    words = Words([b"a\xc3", b"\xa9\xe6\xbc", b"\xa2\xf0\x9f", b"\x99\x82\xf0", b"\x9f\x99\x82b"])
    table = Table(BIGRAM_VOCAB)
    pieces = words(b"a\xc3", b"\xa9\xe6\xbc", b"\xa2\xf0\x9f", b"\x99\x82\xf0", b"\x9f\x99\x82b")
    table.chain(*words(b">"), *pieces)
    choice = both(open_bigram(table, words), "go>", GREEDY.replace(max_tokens=5))
    assert choice.token_ids == pieces
    assert choice.text == "aé漢🙂🙂b"


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_trap_01_an_end_within_a_character_is_told_once(open_bigram: OpenBigram, num_tokens: int):
    words = Words()
    table = Table(BIGRAM_VOCAB)
    table.chain(*words(b">", b"x", b"\xf0", b"\x9f"))
    llm = open_bigram(table, words)
    params = GREEDY.replace(max_tokens=num_tokens)
    (output,) = llm.generate(">", params)
    assert output.outputs[0].text == "x\ufffd"
    assert "".join(delta.text for delta in llm.stream(">", params)) == "x\ufffd"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [(["▁Hello", "▁world", "!"], " Hello world!"), (["▁in▁the", "▁house"], " in the house")],
)
def test_trap_02_the_space_before_the_first_word_is_kept(
    open_bigram: OpenBigram, tmp_path: Path, pieces: list[str], text: str
):
    vocabulary = ["<unk>", "▁", "▁Hello", "▁world", "!", "▁in▁the", "▁house", "▁Say", ":"]
    tokenizer = metaspace(tmp_path, vocabulary)
    prompt, new = ([vocabulary.index(p) for p in part] for part in (["▁Say", ":"], pieces))
    table = Table(BIGRAM_VOCAB)
    table.chain(prompt[-1], *new)
    choice = both(open_bigram(table), prompt, GREEDY.replace(max_tokens=len(new)))
    assert choice.text == text
    assert tokenizer.decode(prompt + new) == tokenizer.decode(prompt) + text


STOP_WORDS = Words([b"QRS", b"UV", b"WX"])


def stop_table() -> Table:
    """``>QRS T`` and then, as the biases say, ``UV WX !!!`` or ``!!!``."""
    q, t, uv, wx, end = STOP_WORDS(b"QRS", b"T", b"UV", b"WX", b"!")
    table = Table(BIGRAM_VOCAB)
    table.chain(*STOP_WORDS(b">"), q, t)
    table.row(t, {uv: 1.0, end: 0.0})
    table.chain(uv, wx, end, end)
    return table


def test_trap_03_a_stop_string_over_tokens_is_never_seen(open_bigram: OpenBigram):
    llm = open_bigram(stop_table(), STOP_WORDS)
    params = GREEDY.replace(stop=["QRSTUVW"])
    choice = both(llm, ">", params)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", "QRSTUVW")
    assert len(choice.token_ids) == 4
    assert both(llm, ">", params.replace(include_stop_str_in_output=True)).text == "QRSTUVW"


def test_trap_03_what_only_began_like_a_stop_string_is_sent(open_bigram: OpenBigram):
    llm = open_bigram(stop_table(), STOP_WORDS)
    (uv,) = STOP_WORDS(b"UV")
    params = GREEDY.replace(stop=["QRSTUVW"], logit_bias={uv: -100}, max_tokens=3)
    choice = both(llm, ">", params)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("QRST!", "length", None)


def test_trap_03_a_stop_string_within_min_tokens_does_not_end_it(open_bigram: OpenBigram):
    choice = both(open_bigram(stop_table(), STOP_WORDS), ">", GREEDY.replace(stop=["T", "!!"], min_tokens=3))
    assert (choice.text, choice.stop_reason) == ("QRSTUVWX", "!!")


@pytest.mark.parametrize("stop", ["", [""], ["", "zzz"]])
def test_trap_04_an_empty_stop_string_is_refused_by_name(stop: str | list[str]):
    with pytest.raises(ValueError, match="stop"):
        SamplingParams.from_dict({"stop": stop, "max_tokens": 8})


@pytest.mark.parametrize(
    ("eos", "generation", "ids"),
    [
        (3, {"eos_token_id": [3, 7]}, [10, 11, 7]),
        (3, {"eos_token_id": 7}, [10, 11, 7]),
        ([3, 7], None, [10, 11, 7]),
        (7, {}, [10, 11, 7]),
        (3, None, [10, 11, 7, 12, 13]),
    ],
)
def test_trap_05_every_end_token_of_the_files_ends(
    open_bigram: OpenBigram, eos: Any, generation: dict[str, Any] | None, ids: list[int]
):
    words = Words()
    table = Table(BIGRAM_VOCAB)
    table.chain(9, 10, 11, 7, 12, 13, 13)
    llm = open_bigram(table, words, generation=generation, eos_token_id=eos)
    choice = both(llm, [9], GREEDY.replace(max_tokens=5))
    assert choice.token_ids == ids
    assert choice.finish_reason == ("stop" if ids[-1] == 7 else "length")
    shown = ids[:-1] if ids[-1] == 7 else ids
    assert choice.text == llm.decode(shown)
    assert both(llm, [9], GREEDY.replace(max_tokens=5, ignore_eos=True)).token_ids == [10, 11, 7, 12, 13]


def test_trap_06_no_tokens_are_refused_and_one_is_one(open_bigram: OpenBigram):
    words = Words()
    table = Table(BIGRAM_VOCAB)
    table.chain(9, 10, 11)
    llm = open_bigram(table, words)
    with pytest.raises(ValueError, match="max_tokens: got 0"):
        SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0)
    (output,) = llm.generate([[8, 9]], SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0))
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([10], "length")
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert 9 in (output.prompt_logprobs[1] or {})


def test_trap_11_usage_is_right_when_the_prompt_runs_in_chunks(open_bigram: OpenBigram):
    llm = open_bigram(Table(BIGRAM_VOCAB), Words())
    handle = llm.engine.submit([5] * 240, SamplingParams(max_tokens=1, seed=1), stream=True)
    reports = [(len(handle.output().prompt_token_ids), len(handle.output().outputs[0].token_ids))]
    for delta in llm.engine.stream(handle):
        reports.append((len(handle.output().prompt_token_ids), len(delta.token_ids)))
    assert reports == [(240, 0), (240, 1)]
    assert llm.engine.metrics.num_steps == 15
    assert (llm.engine.metrics.prompt_tokens, llm.engine.metrics.output_tokens) == (240, 1)


TURNS = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML], ids=["without BOS", "with BOS"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_trap_25_a_chat_prompt_has_the_bos_of_its_template_only(
    open_bigram: OpenBigram, add_bos: bool, template: str
):
    words = Words(special=("<s>", "</s>", "<|im_start|>", "<|im_end|>"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos, "chat_template": template}
    llm = open_bigram(Table(BIGRAM_VOCAB), words, config)
    (bos,) = words("<s>")
    params = GREEDY.replace(max_tokens=1)
    (chat,) = llm.chat(TURNS, params)
    assert chat.prompt_token_ids.count(bos) == ("bos_token" in template)
    assert chat.prompt_token_ids[-len(words(*[bytes([b]) for b in b"assistant\n"])) :] == words(
        *[bytes([b]) for b in b"assistant\n"]
    )
    for prompt in ("Hi", "<s>Hi"):
        (plain,) = llm.generate(prompt, params)
        assert plain.prompt_token_ids.count(bos) == (add_bos or prompt == "<s>Hi")


@pytest.mark.parametrize("prompts", ["", [""], ["a", ""], [[]], [[5], []]])
def test_trap_32_empty_prompts_are_refused_where_no_bos_is_added(open_bigram: OpenBigram, prompts: Any):
    llm = open_bigram(Table(BIGRAM_VOCAB), Words())
    with pytest.raises(ValueError, match="no tokens"):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 8


def test_trap_32_an_empty_prompt_runs_from_bos(open_bigram: OpenBigram):
    words = Words()
    table = Table(BIGRAM_VOCAB)
    table.chain(*words("<s>", b"h", b"i"))
    llm = open_bigram(table, words, {"bos_token": "<s>", "add_bos_token": True})
    outputs = llm.generate(["", "a"], GREEDY.replace(max_tokens=2))
    assert outputs[0].prompt_token_ids == words("<s>")
    assert outputs[0].outputs[0].text == "hi"
    assert llm.generate([], GREEDY) == []


def test_trap_32_a_chat_of_one_empty_message_runs(open_bigram: OpenBigram):
    words = Words(special=("<s>", "</s>", "<|im_start|>", "<|im_end|>"))
    llm = open_bigram(Table(BIGRAM_VOCAB), words, {"chat_template": CHATML})
    (output,) = llm.chat([{"role": "user", "content": ""}], GREEDY)
    assert len(output.outputs[0].token_ids) == 8
