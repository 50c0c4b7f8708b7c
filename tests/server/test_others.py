"""Models, tokens, health, and the API's description."""

from __future__ import annotations

import threading

import pytest

from tests.engine.test_embed import PoolingRunner
from tests.server.conftest import ChatTokenizer, Serve, Served, bad, good


def test_the_model_is_listed_under_all_its_names(serve: Serve):
    served = serve(config={"model_names": ("one", "org/two")})
    models = good(served.http.get("/v1/models"))
    assert [model["id"] for model in models["data"]] == ["one", "org/two"]
    assert models["data"][0]["max_model_len"] == 1024
    assert good(served.http.get("/v1/models/org/two"))["id"] == "org/two"
    assert served.complete(model="org/two")["model"] == "org/two"
    assert served.complete()["model"] == "one"


def test_text_becomes_tokens_and_text_again(hello: Served):
    body = good(hello.post("/tokenize", prompt="abc", return_token_strs=True))
    assert body == {"count": 3, "max_model_len": 1024, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
    assert good(hello.post("/detokenize", tokens=[97, 98]))["prompt"] == "ab"
    long = good(hello.post("/tokenize", prompt="x" * 100_000))
    assert long["count"] == 100_000
    messages = [{"role": "user", "content": "x"}]
    assert good(hello.post("/tokenize", messages=messages))["count"] == len("u:x|a:")


def test_tokens_that_are_none_are_refused(hello: Served):
    bad(hello.post("/detokenize", tokens=[97, 1000]), 400, "tokens", "1000")
    bad(hello.post("/detokenize", tokens=[-1]), 400, "tokens")
    bad(hello.post("/detokenize", tokens=["a"]), 400, "tokens")
    bad(hello.post("/tokenize"), 400, "prompt")
    bad(hello.post("/tokenize", prompt="a", messages=[{"role": "user", "content": "x"}]), 400, "prompt")
    bad(hello.post("/tokenize", prompt="a", add_generation_prompt=True), 400, "add_generation_prompt")


def test_the_api_describes_itself(hello: Served):
    schema = good(hello.http.get("/openapi.json"))
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/health"):
        assert path in schema["paths"]
    answers = schema["paths"]["/v1/completions"]["post"]["responses"]
    assert {"200", "400", "413", "503"} <= answers.keys()
    assert "422" not in answers


def test_the_description_can_be_read_without_a_network(hello: Served):
    page = hello.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    for text in ("POST /v1/embeddings", "GET /debug/prefix", "repetition_penalty", 'id="ChatRequest"'):
        assert text in page.text


def test_a_server_that_can_work_says_so(hello: Served):
    assert good(hello.http.get("/health")) == {"status": "ok"}
    assert good(hello.http.get("/ready")) == {"status": "ready"}


def test_prometheus_is_told_the_numbers(hello: Served):
    hello.complete()
    reply = hello.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert 'jaxinfer:generation_tokens_total{model_name="fake"}' in reply.text


def test_the_page_and_its_numbers_are_there(hello: Served):
    assert "<html" in hello.http.get("/").text
    assert good(hello.http.get("/live"))["pages"]["total"] == 256


def test_why_a_prompt_missed_can_be_asked(hello: Served):
    hello.complete("q" * 40)
    name = hello.complete("q" * 40)["id"]
    told = good(hello.http.get("/debug/prefix", params={"request": name}))
    assert (told["prompt_tokens"], told["cached_tokens"]) == (40, 32)
    bad(hello.http.get("/debug/prefix", params={"request": "none"}), 404, "request")
    bad(hello.http.get("/debug/prefix"), 400, "request")


def test_embeddings_have_a_salt_and_a_time_limit(serve: Serve):
    served = serve(config={"timeout": 100})
    served.engine.runner = PoolingRunner(lambda *_: [65])
    assert (
        good(served.post("/v1/embeddings", input="ab", cache_salt="mine", timeout=5))["usage"]["total_tokens"]
        == 2
    )
    limits = []
    prepare = served.engine.prepare

    def watch(prompt, params=None, **options):
        limits.append(options["timeout"])
        return prepare(prompt, params, **options)

    served.engine.prepare = watch  # pyright: ignore[reportAttributeAccessIssue]
    good(served.post("/v1/embeddings", input="ab"))
    good(served.post("/v1/embeddings", input="ab", timeout=5))
    assert limits == [100, 5]
    error = bad(served.post("/v1/embeddings", input="x" * 5000), 400, "input", "5000")
    assert error["code"] == "context_length_exceeded"


class Spied(ChatTokenizer):
    """Notes on which threads texts are encoded."""

    def __init__(self):
        super().__init__()
        self.threads: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)


USER = {"role": "user", "content": ""}
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 5000}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["x" * 600] * 8, "max_tokens": 1}),
        ("/tokenize", {"messages": [USER] * 1000}),
        ("/tokenize", {"messages": [USER], "tools": [TOOL]}),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"mood": "x" * 5000}}),
    ],
    ids=["texts", "messages", "tools", "kwargs"],
)
def test_what_is_long_in_all_is_encoded_beside_the_event_loop(serve: Serve, path: str, body):
    spied = Spied()
    good(serve(tokenizer=spied).post(path, **body))
    assert {name.partition("_")[0] for name in spied.threads} == {"jaxinfer-encode"}


def test_too_many_prompts_are_refused_before_any_is_encoded(serve: Serve):
    spied = Spied()
    bad(serve(tokenizer=spied).post("/v1/completions", prompt=["a"] * 1025), 400, "prompt", "1025")
    assert spied.threads == []
