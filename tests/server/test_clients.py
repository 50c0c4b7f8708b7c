"""The clients that people have, unchanged: openai (sync and async), LangChain, curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.engine.fakes import EOS, make_engine
from tests.engine.test_embed import PoolingRunner
from tests.server.conftest import ChatTokenizer, Served, running

KEY = "secret"
USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine, _ = make_engine((*b"hello", EOS), ChatTokenizer())
    engine.runner = PoolingRunner(lambda *_: [*b"hello", EOS])
    with running(engine, api_keys=(KEY,)) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as one:
        yield one


def test_openai_completes(client: openai.OpenAI):
    answer = client.completions.create(model="fake", prompt=["a", "b"], n=2, logprobs=1, seed=3, echo=True)
    assert [choice.text for choice in answer.choices] == ["ahello"] * 2 + ["bhello"] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "h", "e", "l", "l", "o", "</s>"]


def test_openai_streams_completions(client: openai.OpenAI):
    stream = client.completions.create(
        model="fake", prompt="a", stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7


def test_openai_chats(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 5, "repetition_penalty": 1.1},
    )
    (choice,) = answer.choices
    assert choice.message.content == "hello"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_openai_streams_chat(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], stream=True, n=2
    )
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["hello", "hello"]
    with client.chat.completions.stream(model="fake", messages=[{"role": "user", "content": "x"}]) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == "hello"


def test_an_earlier_answer_of_openais_is_a_message(client: openai.OpenAI):
    first = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}])
    said = first.choices[0].message
    messages = [{"role": "user", "content": "x"}, said, {"role": "user", "content": "y"}]
    second = client.chat.completions.create(model="fake", messages=messages)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert second.usage is not None
    assert second.usage.prompt_tokens == len("u:x|a:hello|u:y|a:")


def test_openai_embeds(client: openai.OpenAI):
    # Of prompt "ab" the last hidden state is (98, 1) and the mean (97.5, 1); vectors have length 1.
    last = client.embeddings.create(model="fake", input=["ab", "c"])
    assert [one.index for one in last.data] == [0, 1]
    assert last.data[0].embedding == pytest.approx([0.99995, 0.0102], rel=1e-3)
    assert last.usage.prompt_tokens == 3
    plain = client.embeddings.create(
        model="fake", input=[97, 98], encoding_format="float", extra_body={"pooling": "mean"}
    )
    assert plain.data[0].embedding == pytest.approx([0.99995, 0.010256], rel=1e-3)
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="fake", input="x", dimensions=2)
    assert refused.value.param == "dimensions"


def test_openai_lists_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "jaxinfer"


def test_openai_knows_our_errors(served: Served, client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_openai_asynchronously(served: Served):
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "x"}], stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            answer = await client.completions.create(model="fake", prompt="x")
            return [answer.choices[0].text, *await asyncio.gather(*(one() for _ in range(8)))]

    assert asyncio.run(main()) == ["hello"] * 9


def test_langchain_chats(served: Served):
    model = ChatOpenAI(base_url=f"{served.url}/v1", api_key=SecretStr(KEY), model="fake", max_retries=0)
    answer = model.invoke([("system", "s"), ("human", "x")])
    assert answer.content == "hello"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 6
    assert "".join(str(chunk.content) for chunk in model.stream("x")) == "hello"
    assert asyncio.run(model.ainvoke("x")).content == "hello"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(served: Served):
    command = ["curl", "-sSN", f"{served.url}/v1/chat/completions", "-H", f"Authorization: Bearer {KEY}"]
    command += ["-H", "Content-Type: application/json", "-d"]

    def run(body: dict) -> str:
        done = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(run({"messages": [USER]}))["choices"][0]["message"]["content"] == "hello"
    lines = [line for line in run({"messages": [USER], "stream": True}).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello"
