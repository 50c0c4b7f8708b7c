"""/v1/chat/completions."""

from __future__ import annotations

import pytest

from tests.engine.fakes import EOS
from tests.server.conftest import ChatTokenizer, Serve, Served, bad

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}


def test_an_answer_has_openais_shape(hello: Served):
    body = hello.chat("hi")
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == len("u:hi|a:")


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(hello: Served):
    chunks = hello.events(PATH, messages=[USER])
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["delta"].get("content", "") for one in deltas) == "hello"
    assert [one["finish_reason"] for one in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_several_choices_stream_side_by_side(serve: Serve):
    served = serve(lambda _, choice: [48 + choice] * 3 + [EOS])
    texts, ends = {}, {}
    for chunk in served.events(PATH, messages=[USER], n=3):
        (choice,) = chunk["choices"]
        texts.setdefault(choice["index"], "")
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "000", 1: "111", 2: "222"}
    assert set(ends.values()) == {"stop"}


def test_logprobs_are_objects(hello: Served):
    body = hello.chat(logprobs=True, top_logprobs=2, max_tokens=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == ["h", "e"]
    assert content[0]["bytes"] == [104]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["<0>", "<1>"]
    assert hello.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    chunks = hello.events(PATH, messages=[USER], logprobs=True, top_logprobs=2, max_tokens=2)
    streamed = [one for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == content
    bad(hello.post(PATH, messages=[USER], top_logprobs=2), 400, "top_logprobs")


def test_the_limit_has_two_names(hello: Served):
    for name in ("max_tokens", "max_completion_tokens"):
        body = hello.chat(**{name: 2})
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (2, "length")
    assert hello.chat(max_tokens=2, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    reply = hello.post(PATH, messages=[USER], max_tokens=2, max_completion_tokens=3)
    bad(reply, 400, "max_completion_tokens")


def test_without_a_limit_an_answer_takes_what_room_there_is(serve: Serve):
    served = serve(b"a", max_len=64)
    body = served.chat("hi")
    assert body["usage"]["total_tokens"] == 64
    assert body["choices"][0]["finish_reason"] == "length"


def test_messages_go_through_the_template(serve: Serve):
    served = serve()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    tokens = served.post(
        "/tokenize", messages=messages, chat_template_kwargs={"mood": "M"}, return_token_strs=True
    ).json()
    assert "".join(tokens["token_strs"]) == "s:d|u:ab|Ma:"
    body = served.chat(messages=messages, chat_template_kwargs={"mood": "M"})
    assert body["usage"]["prompt_tokens"] == tokens["count"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least 1"),
        ([{"role": "bot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([USER | {"colour": "red"}], "messages[0].colour"),
        ("x", "messages"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused(hello: Served, messages, words: str):
    bad(hello.post(PATH, messages=messages), 400, "messages", words)


def test_a_template_that_fails_is_the_requests_fault(serve: Serve):
    class Strict(ChatTokenizer):
        template = "{{ raise_exception('roles must alternate') }}"

    bad(serve(tokenizer=Strict()).post(PATH, messages=[USER]), 400, "messages", "roles must alternate")


def test_an_empty_message_is_answered(hello: Served):
    assert hello.chat("")["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("functions", []),
        ("modalities", ["audio"]),
        ("store", True),
        ("reasoning_effort", "low"),
        ("parallel_tool_calls", False),
        ("chat_template", "{{ 1 }}"),
        ("colour", "red"),
        ("truncate_prompt_tokens", 5),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(hello: Served, name: str, value):
    error = bad(hello.post(PATH, messages=[USER], **{name: value}), 400, name)
    assert error["message"].startswith(name)


def test_fields_are_called_what_the_body_calls_them(hello: Served):
    error = bad(hello.post(PATH, messages=[{"role": "user", "content": "x" * 5000}]), 400, "messages", "5005")
    assert error["code"] == "context_length_exceeded"
    limits = {"max_tokens": 0, "max_completion_tokens": 0}
    for name, body in (*((one, {one: 0}) for one in limits), ("top_logprobs", {"top_logprobs": 99})):
        error = bad(hello.post(PATH, messages=[USER], logprobs=True, **body), 400, name)
        assert error["message"].startswith(name)


def test_what_says_nothing_about_the_answer_is_taken(hello: Served):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "tools": None,
        "logit_bias": None,
    }
    assert hello.chat(**harmless)["choices"][0]["message"]["content"] == "hello"
