"""Tools: shown to the model by its template, called in its answer, answered in the next message."""

from __future__ import annotations

import json

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.engine.fakes import EOS
from tests.server.conftest import ChatTokenizer, Serve, Served, bad

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class ToolTokenizer(ChatTokenizer):
    """Has a template that shows tools, calls and answers, with Hermes' markers."""

    template = (
        "{% for t in tools or [] %}<tools>{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}"
        "{% endfor %}|{% endfor %}a:"
    )


def start(serve: Serve, text: str) -> Served:
    return serve((*text.encode(), EOS), ToolTokenizer({10: b"\n"}))


def test_a_call_is_parsed(serve: Serve):
    served = start(serve, f"Let me look.{CALL}")
    (choice,) = served.chat(tools=[WEATHER])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


def test_a_call_is_streamed(serve: Serve):
    served = start(serve, f"Hm.{CALL}{CALL}")
    chunks = served.events(PATH, messages=[USER], tools=[WEATHER], n=2)
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content") or "" for c in choices) == "Hm."
        assert choices[-1]["finish_reason"] == "tool_calls"
        calls: dict[int, list[str]] = {}
        for piece in (piece for c in choices for piece in c["delta"].get("tool_calls", ())):
            parts = calls.setdefault(
                piece["index"], [piece.get("id", ""), piece["function"].get("name", ""), ""]
            )
            parts[2] += piece["function"]["arguments"]
        assert [(name, json.loads(text)) for _, name, text in calls.values()] == [
            ("weather", {"city": "Rome"})
        ] * 2
        assert len({ident for ident, _, _ in calls.values()}) == 2


def test_an_answer_without_a_call_is_text(serve: Serve):
    served = start(serve, "It <b>rains</b>.")
    (choice,) = served.chat(tools=[WEATHER])["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "It <b>rains</b>.")
    assert "tool_calls" not in choice["message"]
    chunks = served.events(PATH, messages=[USER], tools=[WEATHER])
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "It <b>rains</b>."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_without_tools_nothing_is_parsed(serve: Serve):
    served = start(serve, CALL)
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        body = served.chat("x", **more)
        assert body["choices"][0]["message"]["content"] == CALL
        assert body["usage"]["prompt_tokens"] == len("u:x|a:")


def test_a_call_that_is_cut_short_is_text(serve: Serve):
    served = start(serve, CALL)
    (choice,) = served.chat(tools=[WEATHER], max_tokens=20)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", CALL[:20])


def test_tools_calls_and_their_answers_are_shown_by_the_template(serve: Serve):
    served = start(serve, "ok")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    body = served.post("/tokenize", messages=messages, tools=[WEATHER], return_token_strs=True).json()
    assert "".join(body["token_strs"]) == "<tools>weatheru:x|a:<tool_call>Rome|t:sun|a:"
    assert served.chat(messages=messages, tools=[WEATHER])["usage"]["prompt_tokens"] == body["count"]


def test_what_cannot_be_done_is_refused(serve: Serve, hello: Served):
    served = start(serve, "ok")
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        bad(served.post(PATH, messages=[USER], tools=[WEATHER], tool_choice=choice), 400, "tool_choice")
    bad(served.post(PATH, messages=[USER], tools=[{"type": "retrieval"}]), 400, "tools")
    bad(
        served.post(PATH, messages=[USER], tools=[WEATHER], skip_special_tokens=True),
        400,
        "skip_special_tokens",
    )
    bad(hello.post(PATH, messages=[USER], tools=[WEATHER]), 400, "tools", "chat template")


def test_openai_calls_tools(serve: Serve):
    served = start(serve, CALL)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.stream(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            tools=[WEATHER],  # pyright: ignore[reportArgumentType]
        )
        with stream as events:
            calls = events.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments) == {"city": "Rome"}


@pytest.mark.parametrize("streams", [False, True])
def test_langchain_calls_tools(serve: Serve, streams: bool):
    @tool
    def weather(city: str) -> str:
        """Tells the weather of a city."""
        return f"sun in {city}"

    served = start(serve, CALL)
    key = SecretStr("none")
    model = ChatOpenAI(
        base_url=f"{served.url}/v1", api_key=key, model="fake", max_retries=0, streaming=streams
    )
    answer = model.bind_tools([weather]).invoke("x")
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    result = weather.invoke(call)
    assert model.bind_tools([weather]).invoke([("human", "x"), answer, result]).tool_calls
