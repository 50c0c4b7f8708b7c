"""A file of requests and the file of its answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandLine, Result
from tests.engine.fakes import EOS


@pytest.fixture
def answer(jaxinfer_cli: CommandLine, tmp_path: Path):
    """Answers requests, given as objects or as lines, and returns the objects of the answers too."""

    def run(*requests: Any, flags: tuple[str, ...] = ()) -> tuple[Result, list[dict[str, Any]]]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in requests]
        source.write_bytes(b"".join(line + b"\n" for line in lines))
        result = jaxinfer_cli("generate", "--input", str(source), "--output", str(target), *flags)
        return result, [json.loads(line) for line in target.read_text().splitlines()]

    return run


def test_answers_are_in_the_order_of_requests(jaxinfer_cli: CommandLine, answer):
    jaxinfer_cli.script = b"x"
    lengths = [9, 1, 30, 2, 7] * 20  # far more than there are rows, and the short ones end first
    flags = ("--set", "schedule.max_num_seqs=2")
    result, answers = answer(*({"prompt": "p", "max_tokens": n} for n in lengths), flags=flags)
    assert result.code == 0
    assert [one["index"] for one in answers] == list(range(100))
    assert [len(one["token_ids"]) for one in answers] == lengths
    assert result.out == ""
    assert "answering: 100 of 100 requests" in result.err
    assert "TTFT" in result.err


def test_an_answer_has_the_fields_of_the_format(answer):
    result, (one,) = answer({"prompt": "ab", "logprobs": 1})
    assert result.code == 0
    assert list(one) == ["index", "text", "token_ids", "finish_reason", "logprobs", "usage"]
    assert (one["text"], one["finish_reason"]) == ("hello", "stop")
    assert one["token_ids"] == [*b"hello", EOS]
    assert one["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    first = one["logprobs"][0]
    assert [entry["token_id"] for entry in first] == [ord("h"), 0]
    assert first[0] == {"token_id": 104, "token": "h", "logprob": pytest.approx(-10.4), "rank": 104}


def test_every_form_of_prompt_is_read(jaxinfer_cli: CommandLine, answer):
    result, answers = answer(
        {"prompt": "text"},
        {"prompt_token_ids": list(b"ids")},
        {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"mood": "?"}},
    )
    assert result.code == 0
    assert len(answers) == 3
    assert jaxinfer_cli.prompts == ["text", "ids", "u:hi|?a:"]


def test_fields_of_a_line_go_over_flags_in_either_spelling(jaxinfer_cli: CommandLine, answer):
    jaxinfer_cli.script = b"x"
    flags = ("--max_tokens", "5", "--set", "sampling.top_k=3")
    _, answers = answer({"prompt": "p"}, {"prompt": "p", "max_new_tokens": 2, "top_k": 0}, flags=flags)
    assert [len(one["token_ids"]) for one in answers] == [5, 2]
    params = [admission.params for admission in jaxinfer_cli.runners[-1].admitted]
    assert [one.top_k for one in params] == [3, 0]
    assert [one.temperature for one in params] == [1, 1]  # vLLM's: a file has vLLM's defaults


HI = {"messages": [{"role": "user", "content": "hi"}]}
BAD_LINES = [
    (b"{not json", "not a line of JSON"),
    (b"[1]", "got list"),
    (b"\xff", "not a line of JSON"),
    (b"[" * 100_000, "not a line of JSON"),
    ({}, "got no prompt"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "prompt and prompt_token_ids"),
    ({"prompt": [1, 2]}, "prompt: got list"),
    ({"prompt_token_ids": "a"}, "prompt_token_ids: got str"),
    ({"prompt_token_ids": [1, True]}, "integers"),
    ({"prompt_token_ids": []}, "no tokens"),
    ({"prompt_token_ids": [1000]}, "1000"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"prompt": "a", "temprature": 1}, "temperature"),
    ({"prompt": "a", "temperature": -1}, "temperature: got -1"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature: got nan"),
    ({"prompt": "a", "tools": []}, "tools"),
    ({"prompt": "a" * 1024}, "prompt tokens: got 1024"),
    (b'{"prompt": "a", "\\ud800": 1}', "\ud800: got 1"),
    (HI | {"chat_template_kwargs": 5}, "chat_template_kwargs: got int"),
    (HI | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: got messages"),
    (HI | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: got tools"),
    (HI | {"chat_template": []}, "chat_template: got list"),
    (HI | {"add_generation_prompt": "no"}, "add_generation_prompt: got 'no'"),
    (HI | {"tools": 5}, "tools: got int"),
]


@pytest.mark.parametrize(("line", "says"), BAD_LINES, ids=[says for _, says in BAD_LINES])
def test_bad_line_is_an_error_at_its_place_and_the_rest_goes_on(answer, line: Any, says: str):
    result, answers = answer({"prompt": "a"}, line, {"prompt": "b"})
    assert result.code == 1
    assert list(answers[1]) == ["index", "error"]
    assert says in answers[1]["error"]
    assert [one["index"] for one in answers] == [0, 1, 2]
    assert [answers[0]["text"], answers[2]["text"]] == ["hello", "hello"]
    assert "1 of 3 requests failed" in result.err


def test_request_that_fails_within_is_an_error_of_its_own(jaxinfer_cli: CommandLine, answer):
    jaxinfer_cli.script = lambda request, _: [666] if request == "request-0" else [*b"ok", EOS]
    result, answers = answer({"prompt": "a"}, {"prompt": "b"})
    assert result.code == 1
    assert "no such piece" in answers[0]["error"]
    assert answers[1]["text"] == "ok"


def test_several_choices_and_prompt_logprobs_are_all_there(jaxinfer_cli: CommandLine, answer):
    jaxinfer_cli.script = lambda _, choice: [*b"ab"[choice : choice + 1], EOS]
    _, (one,) = answer({"prompt": "pq", "n": 2, "prompt_logprobs": 0})
    assert one["text"] == "a"
    assert [choice["text"] for choice in one["choices"]] == ["a", "b"]
    assert one["usage"]["completion_tokens"] == 4
    assert one["prompt_logprobs"][0] is None
    assert one["prompt_logprobs"][1][0]["token_id"] == ord("q")


def test_blank_lines_are_no_requests(answer):
    result, answers = answer(b"", {"prompt": "a"}, b"  ", {"prompt": "b"})
    assert result.code == 0
    assert [one["index"] for one in answers] == [0, 1]


def test_empty_file_has_no_answers(answer):
    result, answers = answer()
    assert (result.code, answers) == (0, [])


def test_input_that_can_be_read_only_once_is_refused(jaxinfer_cli: CommandLine, tmp_path: Path):
    code, _, err = jaxinfer_cli("generate", "--input", os.devnull, "--output", str(tmp_path / "out"))
    assert code == 1
    assert f"--input {os.devnull}: not a regular file" in err
    assert not jaxinfer_cli.runs


def test_settings_of_chat_hold_for_conversations(jaxinfer_cli: CommandLine, answer):
    flags = ("--set", 'chat.template_kwargs={mood = "!"}', "--set", "chat.system=Be kind")
    own = {"chat_template_kwargs": {"mood": "?"}}
    result, _ = answer(HI, HI | own, HI | {"chat_template_kwargs": None}, flags=flags)
    assert jaxinfer_cli.prompts == ["u:hi|!a:", "u:hi|?a:", "u:hi|!a:"]
    assert "without effect here: chat.system\n" in result.err


def test_input_is_never_overwritten(jaxinfer_cli: CommandLine, tmp_path: Path):
    path = tmp_path / "same.jsonl"
    path.write_text('{"prompt": "a"}\n')
    code, _, err = jaxinfer_cli("generate", "--input", str(path), "--output", str(path))
    assert code == 2
    assert "is the input file" in err
    assert path.read_text() == '{"prompt": "a"}\n'


def test_answers_are_written_as_they_come(jaxinfer_cli: CommandLine, answer, tmp_path: Path):
    """The engine fails at the third request; the answers before it are in the file."""
    jaxinfer_cli.script = b"x"

    def build(config, model, say):
        engine = CommandLine.build(jaxinfer_cli, config, model, say)
        jaxinfer_cli.runners[-1].fails = lambda plan: plan.step > 30
        return engine

    jaxinfer_cli.monkeypatch.setattr("jaxinfer.llm.build_engine", build)
    lengths = (2, 3, 100)
    with pytest.raises(RuntimeError, match="the device is gone"):
        answer(*({"prompt": "p", "max_tokens": n} for n in lengths))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["token_ids"]) for line in lines] == [2, 3]
