"""The Python door over a scripted engine: forms of input, settings, defaults, streams and scores."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import tomllib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import jaxinfer
from jaxinfer.build import RunConfig
from jaxinfer.config import GenerationDefaults
from jaxinfer.engine.outputs import Delta
from jaxinfer.llm import LLM, AsyncLLM, read_prompts, read_run_config
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.text import Tokenizer
from tests.engine.fakes import EOS, TableTokenizer, make_engine

HELLO = (*b"hello", EOS)


class BosTokenizer(TableTokenizer):
    """Begins every text with an id, or with none."""

    @property
    def bos_id(self) -> int | None:
        return self._bos


class ChatTokenizer(BosTokenizer):
    """Has two chat templates."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return {}

    @property
    def chat_templates(self) -> Mapping[str, str]:
        turns = "{% for m in messages %}{{ m.content }}{% endfor %}"
        return {
            "default": turns + "{{ mood }}{{ '>' if add_generation_prompt }}",
            "tool_use": "{{ tools[0].name }}",
        }


def make_llm(script: Sequence[int] = HELLO, tokenizer: Tokenizer | None = None, **limits: Any) -> LLM:
    engine, _ = make_engine(script, tokenizer or BosTokenizer(), **limits)
    return LLM.from_engine(engine)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("hi", ["hi"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1], {"prompt": "b"}, {"prompt_token_ids": [2]}], ["a", [1], "b", [2]]),
        ({"prompt": "a"}, ["a"]),
        ({"prompt_token_ids": [1]}, [[1]]),
        ((text for text in "ab"), ["a", "b"]),
        ([], []),
        ("", [""]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([1, 2]), list(np.array([3]))], [[1, 2], [3]]),
    ],
)
def test_prompts_of_every_form_are_read(given: Any, read: list):
    assert read_prompts(given) == read


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (7, "got int"),
        ([None], r"prompts\[0\]"),
        (["a", ["b"]], r"prompts\[1\]"),
        ([[1, True]], r"prompts\[0\]"),
        ([1.0], r"prompts\[0\]"),
        ({"promt": "a"}, "promt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either"),
        ({"prompt": [1]}, "list"),
        ({"prompt_token_ids": "a"}, "str"),
        ({"prompt": {"prompt": "a"}}, "dict"),
    ],
)
def test_other_prompts_are_refused(given: Any, says: str):
    with pytest.raises(ValueError, match=says):
        read_prompts(given)


def test_results_are_in_the_order_of_prompts():
    llm = make_llm(b"x", max_num_seqs=2)
    params = [SamplingParams(max_tokens=n) for n in (5, 1, 3)]
    outputs = llm.generate(["a", "b", [99]], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 1, 3]
    assert [output.prompt for output in outputs] == ["a", "b", None]
    assert [output.prompt_token_ids for output in outputs] == [[97], [98], [99]]
    assert all(output.finished and output.metrics.ttft is not None for output in outputs)


def test_no_prompts_have_no_results():
    assert make_llm().generate([]) == []


def test_bad_request_stops_the_call_before_anything_runs():
    llm = make_llm(max_len=64)
    with pytest.raises(ValueError, match="prompt tokens: got 64"):
        llm.generate(["a", "b" * 64])
    assert llm.engine.metrics.num_steps == 0
    assert not llm.engine.has_work


def test_one_setting_a_prompt():
    with pytest.raises(ValueError, match="got 1 for 2 prompts"):
        make_llm().generate(["a", "b"], [SamplingParams()])


@pytest.mark.parametrize(
    "use", [lambda llm: llm.generate("a"), lambda llm: llm.encode("a"), lambda llm: llm.stream("a")]
)
def test_a_closed_model_says_so(use: Any):
    with make_llm() as llm:
        pass
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        use(llm)


@pytest.mark.parametrize("params", [{"temperature": 0}, iter([SamplingParams()]), [{"temperature": 0}]])
def test_settings_of_another_type_are_refused(params: Any):
    with pytest.raises(ValueError, match=r"sampling_params: got \w+, must be SamplingParams"):
        make_llm().generate(["a"], params)


def test_a_stream_that_is_never_read_does_not_run():
    llm = make_llm()
    with pytest.raises(ValueError, match="no tokens"):
        llm.stream("")
    llm.stream("a")
    assert not llm.engine.has_work


def test_defaults_are_vllm_s_under_the_model_s_and_said_once():
    said: list[str] = []
    engine, runner = make_engine(b"x")
    defaults = GenerationDefaults(sampling=(("temperature", 0.6), ("top_p", 0.9)))
    llm = LLM.from_engine(engine, defaults, said.append)
    (output,) = llm.generate("a")
    llm.generate("a", SamplingParams(temperature=0.2, top_k=5))
    assert len(output.outputs[0].token_ids) == 16
    first, second = (admission.params for admission in runner.admitted)
    assert (first.temperature, first.top_p) == (0.6, 0.9)
    assert (second.temperature, second.top_p, second.top_k) == (0.2, 0.9, 5)
    assert len(said) == 1
    assert "temperature=0.6, top_p=0.9" in said[0]


def test_defaults_that_change_nothing_are_not_said():
    said: list[str] = []
    llm = LLM.from_engine(make_engine(HELLO)[0], GenerationDefaults(sampling=(("top_p", 0.9),)), said.append)
    llm.generate("a", SamplingParams(top_p=0.5))
    assert said == []


def test_seed_of_the_door_repeats_requests_without_one(monkeypatch: pytest.MonkeyPatch):
    def seeds(seed: int | None) -> list[int]:
        engine, runner = make_engine(HELLO)
        monkeypatch.setattr("jaxinfer.llm.build_engine", lambda *_: engine)
        monkeypatch.setattr("jaxinfer.llm.open_model", lambda _: LLMParts)
        llm = LLM(seed=seed)
        llm.generate(["a", "b"])
        return [admission.seed for admission in runner.admitted]

    class LLMParts:
        defaults = GenerationDefaults()

    assert seeds(1) == seeds(1)
    assert seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 2
    assert seeds(None) != seeds(None)


def test_chat_renders_one_conversation_or_many():
    llm = make_llm(tokenizer=ChatTokenizer())
    turn = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(turn)
    assert bytes(one.prompt_token_ids) == b"hi>"
    assert one.outputs[0].text == "hello"
    assert [bytes(o.prompt_token_ids) for o in llm.chat([turn, [*turn, *turn]])] == [b"hi>", b"hihi>"]
    (bare,) = llm.chat(turn, add_generation_prompt=False, chat_template_kwargs={"mood": "!"})
    assert bytes(bare.prompt_token_ids) == b"hi!"
    (tool,) = llm.chat(turn, tools=[{"name": "find"}])
    assert bytes(tool.prompt_token_ids) == b"find"
    (own,) = llm.chat(turn, chat_template="own")
    assert bytes(own.prompt_token_ids) == b"own"


def test_stream_adds_up_to_the_text():
    deltas = list(make_llm().stream("p"))
    assert "".join(delta.text for delta in deltas) == "hello"
    assert [delta.finish_reason for delta in deltas][-1] == "stop"


def test_stream_that_is_left_ends_the_request():
    llm = make_llm(b"x")
    stream = llm.stream("p", SamplingParams(max_tokens=500))
    next(stream)
    cast(Generator[Delta], stream).close()
    llm.engine.run_until_done()
    assert llm.engine.metrics.finished["abort"] == 1
    assert llm.engine.metrics.output_tokens < 10


def test_stream_takes_one_prompt():
    with pytest.raises(ValueError, match="got 2 prompts"):
        make_llm().stream(["a", "b"])


def test_async_door_streams_and_generates_many_at_once():
    async def run() -> tuple[list[str], str]:
        async with AsyncLLM.from_engine(make_engine(HELLO)[0]) as llm:
            outputs = await asyncio.gather(*(llm.generate("p") for _ in range(5)))
            text = "".join([delta.text async for delta in llm.stream([112])])
        return [output.outputs[0].text for output in outputs], text

    assert asyncio.run(run()) == (["hello"] * 5, "hello")


def test_score_is_each_token_s_logprob_after_those_before_it():
    score = make_llm().score("abc")
    assert score.token_ids == list(b"abc")
    assert score.logprobs == [None, pytest.approx(-9.8), pytest.approx(-9.9)]
    assert score.num_scored == 2
    assert score.log_likelihood == pytest.approx(-19.7)
    assert score.nats_per_token == pytest.approx(9.85)
    assert score.perplexity == pytest.approx(math.exp(9.85))


def test_score_of_a_long_text_goes_by_windows():
    # A context of 5 holds 4 tokens and the one that a request makes.
    score = make_llm(max_len=5).score("abcdefghij")
    assert [i for i, value in enumerate(score.logprobs) if value is None] == [0, 4, 8]
    # With BOS before each window there are 3 of the text in one, and all are scored.
    score = make_llm(tokenizer=BosTokenizer(bos=1), max_len=5).score("abcdefg")
    assert score.token_ids == [1, *b"abcdefg"]
    assert score.logprobs == [None, *(pytest.approx(-byte / 10) for byte in b"abcdefg")]


def test_score_without_room_for_a_token_is_refused():
    with pytest.raises(ValueError, match=r"max_model_len: got 2, scoring needs at least 3"):
        make_llm(tokenizer=BosTokenizer(bos=1), max_len=2).score("a")


def test_score_of_nothing_is_nothing():
    score = make_llm().score("")
    assert (score.num_scored, score.log_likelihood) == (0, 0)
    assert math.isnan(score.perplexity)


def test_settings_are_read_by_our_names_and_vllm_s():
    given = {"dtype": "bfloat16", "block_size": 32, "tensor_parallel_size": 1, "quantization": None}
    assert read_run_config(given) == RunConfig(policy="bfloat16", page_size=32)
    assert read_run_config({"prefill_buckets": [[1, 8]]}) == RunConfig(prefill_buckets=((1, 8),))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_num_seq": 4}, "did you mean max_num_seqs"),
        ({"zzz": 4}, "there are model"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: got 2, but only 1 is served"),
        ({"trust_remote_code": True}, "no code of a checkpoint"),
        ({"gpu_memory_utilization": 0.9}, "kv_memory"),
        ({"dtype": "float32", "policy": "float32"}, "give one of them"),
        ({"max_num_seqs": "4"}, "max_num_seqs: got '4', must be int"),
        ({"max_num_seqs": True}, "max_num_seqs: got True"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
        ({"max_model_len": 1.5}, "must be int or None"),
        ({"prefill_buckets": 64}, "must be a list"),
    ],
)
def test_bad_settings_name_the_cure(given: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        read_run_config(given)


def test_package_exports_lazily():
    program = (
        "import sys, jaxinfer; print('jax' in sys.modules); from jaxinfer import SamplingParams; "
        "print('jax' in sys.modules, {*jaxinfer.__all__} <= {*dir(jaxinfer)})\n"
        "try: jaxinfer.nothing\nexcept AttributeError as error: print(error)\n"
        "from jaxinfer import LLM, AsyncLLM; print(LLM.__name__, AsyncLLM.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "False",
        "False True",
        "module 'jaxinfer' has no attribute 'nothing'",
        "LLM AsyncLLM",
    ], done.stderr


def test_version_is_the_project_s():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["version"] == jaxinfer.__version__


@pytest.mark.slow
def test_real_model_answers_batches_chats_and_scores(smollm2_gguf: Path):
    with LLM(
        str(smollm2_gguf), policy="float32", max_num_seqs=2, max_model_len=128, prefill_buckets=[[2, 64]]
    ) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=30)
        first, second = llm.generate(["The capital of France is", "Roses are red, "], greedy)
        assert first.outputs[0].text == " Paris.\n\nThe answer is: 2018-01-22 12:12:53."
        assert first.outputs[0].finish_reason == "stop"
        assert second.outputs[0].text.startswith("100% of the time.")
        turn = [{"role": "system", "content": "You are a pirate."}]
        turn += [{"role": "user", "content": "Say hello in one sentence."}]
        (chat,) = llm.chat(turn, greedy)
        assert chat.outputs[0].text.startswith("I'm Captain Blackwood, a seasoned pirate")
        score = llm.score("The capital of France is Paris")
        assert score.logprobs[-1] == pytest.approx(-0.25808, abs=1e-3)
