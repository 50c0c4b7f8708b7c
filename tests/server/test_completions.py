"""/v1/completions: its fields, its shapes, and the traps that it has met elsewhere."""

from __future__ import annotations

import pytest

from tests.engine.fakes import EOS, TableTokenizer
from tests.server.conftest import Serve, Served, bad, strict_json

PATH = "/v1/completions"


def test_an_answer_has_openais_shape(hello: Served):
    body = hello.complete("abc")
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": "hello",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("ab", 2), (["ab"], 2), (["a", "bc"], 3), ([97, 98], 2), ([[97], [98, 99]], 3)],
    ids=repr,
)
def test_every_form_of_a_prompt_is_read(hello: Served, prompt, tokens: int):
    body = hello.complete(prompt)
    assert body["usage"]["prompt_tokens"] == tokens
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    assert {choice["text"] for choice in body["choices"]} == {"hello"}


def test_choices_of_several_prompts_stand_together(serve: Serve):
    served = serve(lambda name, choice: [*name[-1:].encode(), 48 + choice, EOS])
    body = served.complete(["a", "b"], n=2)
    assert [choice["text"] for choice in body["choices"]] == ["00", "01", "10", "11"]
    chunks = served.events(PATH, prompt=["a", "b"], n=2)
    texts = dict.fromkeys(range(4), "")
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["00", "01", "10", "11"]


def test_best_of_keeps_the_likeliest(serve: Serve):
    # Token t has log-probability -t / 10: the lower the letter, the likelier.
    served = serve(lambda _, choice: [100 - choice, EOS])
    body = served.complete(n=2, best_of=4)
    assert [(one["index"], one["text"]) for one in body["choices"]] == [(0, "a"), (1, "b")]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 8
    bad(served.post(PATH, prompt="p", n=3, best_of=2), 400, "best_of")
    bad(served.post(PATH, prompt="p", n=1, best_of=2, stream=True), 400, "best_of")
    bad(served.post(PATH, prompt="p", best_of=2, temperature=0), 400, "best_of", "temperature")


def test_logprobs_stand_side_by_side(hello: Served):
    (choice,) = hello.complete(logprobs=2, max_tokens=2)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "e"]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["token_logprobs"] == pytest.approx([-10.4, -10.1])
    assert [list(top) for top in logprobs["top_logprobs"]] == [["h", "<0>", "<1>"], ["e", "<0>", "<1>"]]
    streamed = [
        chunk["choices"][0]["logprobs"] for chunk in hello.events(PATH, prompt="p", logprobs=2, max_tokens=2)
    ]
    assert [token for one in streamed for token in one["tokens"]] == ["h", "e"]
    assert [at for one in streamed for at in one["text_offset"]] == [0, 1]


def test_echo_begins_with_the_prompt(hello: Served):
    (choice,) = hello.complete("ab", echo=True, logprobs=0, max_tokens=2)["choices"]
    assert choice["text"] == "abhe"
    assert choice["logprobs"]["tokens"] == ["a", "b", "h", "e"]
    assert choice["logprobs"]["token_logprobs"] == [None, *map(pytest.approx, (-9.8, -10.4, -10.1))]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert hello.complete([97, 98], echo=True)["choices"][0]["text"] == "abhello"
    for more in ({}, {"logprobs": 1}):
        chunks = hello.events(PATH, prompt=["ab", "c"], echo=True, **more)
        texts = ["", ""]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts == ["abhello", "chello"]


def test_trap_6_echo_without_a_new_token(hello: Served):
    body = hello.complete("No", max_tokens=0, echo=True, logprobs=1, temperature=0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("No", "length")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == 2
    assert body["usage"]["completion_tokens"] == 0
    assert [one["text"] for one in hello.complete("No", max_tokens=0, echo=True, n=2)["choices"]] == [
        "No",
        "No",
    ]
    (chunk, last) = hello.events(
        PATH, prompt="No", max_tokens=0, echo=True, stream_options={"include_usage": True}
    )
    assert chunk["choices"][0]["text"] == "No"
    assert last["usage"]["completion_tokens"] == 0
    bad(hello.post(PATH, prompt="No", max_tokens=0), 400, "max_tokens", "echo")
    one = hello.complete("No", max_tokens=1)
    assert one["usage"]["completion_tokens"] == 1
    assert one["choices"][0]["finish_reason"] == "length"


def test_trap_10_numbers_are_finite(serve: Serve):
    engine_says = float("-inf")
    served = serve((*b"ab", EOS))
    served.engine.runner.chosen = lambda token: engine_says  # pyright: ignore[reportAttributeAccessIssue]
    for more in ({"echo": True, "top_k": 1}, {"temperature": 0}, {"logit_bias": {"97": -100}}):
        (choice,) = served.complete("blue", logprobs=1, max_tokens=2, **more)["choices"]
        assert set(choice["logprobs"]["token_logprobs"]) - {None} == {-9999.0}


def test_trap_11_usage_of_a_prompt_that_runs_in_chunks(serve: Serve):
    served = serve(b"a", max_num_batched_tokens=64, prefill_chunk=64)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = served.events(PATH, prompt=[97] * 900, max_tokens=1, stream_options=options)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {900}
    assert max(chunk["usage"]["completion_tokens"] for chunk in chunks) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 901
    assert served.complete([97] * 900, max_tokens=1)["usage"]["total_tokens"] == 901


def test_usage_comes_last_and_only_where_asked_for(hello: Served):
    chunks = hello.events(PATH, prompt="p")
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    *chunks, last = hello.events(PATH, prompt="p", stream_options={"include_usage": True})
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["usage"]["completion_tokens"] == 6
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


def test_trap_1_no_half_character_is_sent(serve: Serve):
    pieces = {900: b"\xf0\x9f", 901: b"\x99\x82", 902: "é".encode()}
    served = serve((97, 902, 900, 901, EOS), TableTokenizer(pieces))
    texts = [chunk["choices"][0]["text"] for chunk in served.events(PATH, prompt="p")]
    assert "�" not in "".join(texts)
    assert "".join(texts) == served.complete()["choices"][0]["text"] == "aé🙂"


@pytest.mark.parametrize(("last", "text", "reason"), [("UV", "", "stop"), ("!", "QRST!", "length")])
def test_trap_3_a_stop_string_over_several_tokens(serve: Serve, last: str, text: str, reason: str):
    pieces = {900: b"QRS", 901: b"T", 902: last.encode(), 903: b"WX"}
    served = serve((900, 901, 902, 903), TableTokenizer(pieces))
    tokens = 4 if reason == "stop" else 3
    chunks = served.events(PATH, prompt="p", stop=["QRSTUVW"], max_tokens=tokens)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    choice = served.complete(stop="QRSTUVW", max_tokens=tokens)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    assert choice["stop_reason"] == ("QRSTUVW" if reason == "stop" else None)


@pytest.mark.parametrize("stop", ["", [""], ["", "zzz"]])
@pytest.mark.parametrize("stream", [False, True])
def test_trap_4_an_empty_stop_string_is_refused(hello: Served, stop, stream: bool):
    bad(hello.post(PATH, prompt="p", stop=stop, stream=stream), 400, "stop")
    messages = [{"role": "user", "content": "x"}]
    bad(hello.post("/v1/chat/completions", messages=messages, stop=stop, stream=stream), 400, "stop")


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_trap_30_numbers_that_are_none_are_refused(hello: Served, name: str, value: str):
    content = f'{{"prompt": "p", "{name}": {value}}}'
    reply = hello.http.post(PATH, content=content, headers={"content-type": "application/json"})
    bad(reply, 400, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 1.0001),
        ("top_k", 0.5),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("n", 0),
    ],
)
def test_trap_30_numbers_out_of_range_are_refused(hello: Served, name: str, value: float):
    bad(hello.post(PATH, prompt="p", **{name: value}), 400, name)


@pytest.mark.parametrize("bias", [{"999999": 5}, {"-1": 1}, {"x": 1}, {"1.5": 1}, {"5": 1e9}, {"5": "a"}])
def test_trap_31_a_bias_of_no_token_is_refused(hello: Served, bias):
    bad(hello.post(PATH, prompt="p", logit_bias=bias), 400, "logit_bias")
    assert hello.complete(logit_bias={"5": 100})["choices"][0]["text"] == "hello"


def test_trap_32_empty_prompts(hello: Served, serve: Serve):
    for prompt in ("", [""], ["a", ""], [], [[]], [[97], []]):
        for stream in (False, True):
            bad(hello.post(PATH, prompt=prompt, stream=stream), 400, "prompt")
    assert hello.complete()["choices"][0]["text"] == "hello"
    with_bos = serve(tokenizer=TableTokenizer(bos=1))
    assert with_bos.complete("")["usage"]["prompt_tokens"] == 1
    assert with_bos.complete(["a", ""])["usage"]["prompt_tokens"] == 3
    bad(with_bos.post(PATH, prompt="", add_special_tokens=False), 400, "prompt")


def test_the_models_defaults_hold_where_a_request_gives_none(serve: Serve):
    served = serve(b"a", defaults=(("temperature", 0.25), ("top_k", 7)))
    served.complete(top_k=3)
    admission = served.engine.runner.admitted[-1]  # pyright: ignore[reportAttributeAccessIssue]
    assert (admission.params.temperature, admission.params.top_k) == (0.25, 3)


def test_prompt_logprobs_are_vllms(hello: Served):
    (choice,) = hello.complete("ab", prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["98"]["decoded_token"] == "b"
    assert choice["logprobs"] is None


def test_a_lone_surrogate_is_answered(hello: Served):
    content = '{"prompt": "p", "model": "\\ud800"}'
    reply = hello.http.post(PATH, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 404
    assert "\\ud800" in reply.text
    strict_json(reply.text)
