"""Several processes behind one HTTP server: the tokens of one process, and the end of all when one is lost."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.acceptance.engines import TOY_VOCAB, write_toy
from tests.hosts.processes import Run, running

PATH = "/v1/completions"
NUM_REQUESTS, NUM_TOKENS = 10, 20
STEM = [9, 4, 17, 33, 21, 8, 8, 40, 3, 5, 11, 90, 77, 64, 2 + 60, 13, 31]  # more than a page


def make_request(i: int) -> dict[str, Any]:
    """Prompts that begin alike; greedy, or drawn with most settings together."""
    prompt = STEM + [3 + (7 * i + k) % (TOY_VOCAB - 3) for k in range(1 + 3 * i)]
    request = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
    if i % 2:
        request |= {"temperature": 1.0, "seed": i, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 3}
    return request


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@dataclass(frozen=True)
class Wanted:
    """What one process on one device answers: texts, and of `STEM` an embedding and its tokens' log-probabilities."""

    texts: list[str]
    vector: list[float]
    logprobs: list[float]


@pytest.fixture(scope="module")
def wanted(toy: Path) -> Wanted:
    llm = LLM(
        str(toy),
        policy="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        prefill_buckets=[[2, 16]],
        kv_memory="80 pages",
        compile_cache=False,
    )
    requests = [make_request(i) for i in range(NUM_REQUESTS)]
    params = [SamplingParams(**{k: v for k, v in one.items() if k != "prompt"}) for one in requests]
    outputs = llm.generate([one["prompt"] for one in requests], params)
    first, *logprobs = llm.score(STEM).logprobs
    assert first is None  # it has nothing before it
    known = [one for one in logprobs if one is not None]
    return Wanted([one.outputs[0].text for one in outputs], llm.embed([STEM])[0], known)


def answer(url: str) -> list[str]:
    """Returns the texts of all requests, sent together."""
    with httpx.Client(base_url=url, timeout=240) as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:

        def post(i: int) -> str:
            reply = client.post(PATH, json=make_request(i))
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            assert (choice["logprobs"] is not None) == bool(i % 2)
            return choice["text"]

        return list(pool.map(post, range(NUM_REQUESTS)))


def check_prompts(url: str, wanted: Wanted) -> None:
    """Asks for what is computed of a prompt on the way."""
    with httpx.Client(base_url=url, timeout=240) as client:
        reply = client.post("/v1/embeddings", json={"input": STEM}).json()
        np.testing.assert_allclose(reply["data"][0]["embedding"], wanted.vector, atol=1e-5)
        body = {"prompt": STEM, "echo": True, "logprobs": 1, "max_tokens": 0}
        found = client.post(PATH, json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
        assert found[0] is None
        np.testing.assert_allclose(found[1:], wanted.logprobs, atol=1e-4)


def end_in_order(run: Run, told: int) -> None:
    """Sends SIGTERM to one process while a stream runs, which must end as it would; so must all processes."""
    body = make_request(0) | {"stream": True, "max_tokens": 60}
    with (
        httpx.Client(base_url=run.url, timeout=240) as client,
        client.stream("POST", PATH, json=body) as reply,
    ):
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        run.send(told, signal.SIGTERM)
        *_, finish, last = lines
        assert last == "data: [DONE]"
        assert '"finish_reason":"length"' in finish
    assert run.codes() == [0] * len(run.children), run.logs()


@pytest.mark.parametrize(("told", "mesh"), [(0, "tensor=2,data=2"), (1, "tensor=4")])
def test_two_processes_give_the_tokens_of_one_and_end_in_order(
    toy: Path, wanted: Wanted, tmp_path: Path, told: int, mesh: str
):
    with running(toy, tmp_path, 2, 2, mesh) as run:
        assert answer(run.wait_until_served()) == wanted.texts
        check_prompts(run.url, wanted)
        end_in_order(run, told)


@pytest.mark.parametrize("lost", [0, 3])
def test_four_processes_give_the_tokens_of_one_and_all_end_when_one_is_killed_in_a_step(
    toy: Path, wanted: Wanted, tmp_path: Path, lost: int
):
    with running(toy, tmp_path, 4, 1, "tensor=2,data=2") as run:
        url = run.wait_until_served()
        assert answer(url) == wanted.texts
        body = make_request(0) | {"stream": True, "max_tokens": 200}
        with (
            httpx.Client(base_url=url, timeout=240) as client,
            client.stream("POST", PATH, json=body) as reply,
        ):
            next(reply.iter_lines())
            run.send(lost, signal.SIGKILL)
            codes = run.codes()
        assert codes[lost] == -signal.SIGKILL
        assert 0 not in codes
        for index in set(range(4)) - {lost}:
            assert f"process {index} of 4 ends: process {lost} is lost" in run.log(index)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("when", ["at rest", "at start"])
def test_a_process_killed_outside_a_step_ends_the_other(toy: Path, tmp_path: Path, lost: int, when: str):
    with running(toy, tmp_path, 2, 1, "tensor=2") as run:
        if when == "at rest":
            run.wait_until_served()
        for index in (0, 1):  # both have met
            run.wait_for(index, "(mesh) tensor=2")
        run.send(lost, signal.SIGKILL)
        codes = run.codes()
        other = 1 - lost
        assert codes[lost] == -signal.SIGKILL
        assert codes[other] != 0
        assert f"process {other} of 2 ends: process {lost} is lost" in run.log(other)


def spoil_others(toy: Path, folder: Path, stage: int) -> Path:
    """Copies the toy into a folder with NaN for the layer of the other stage, which whoever reads it reports."""
    copy = folder / toy.name
    copytree(toy, copy, ignore=ignore_patterns("executables"))
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    others = [name for name in tensors if f".layers.{1 - stage}." in name]
    assert len(others) == 9
    save_file(tensors | {name: np.full_like(tensors[name], np.nan) for name in others}, file)
    return folder


def test_two_hosts_of_a_stage_each_give_the_tokens_of_one_and_read_their_own_layers_alone(
    toy: Path, wanted: Wanted, tmp_path: Path
):
    folders = [spoil_others(toy, tmp_path / str(stage), stage) for stage in range(2)]
    draws = '--set=run.draws=["sample"]'
    with running(Path(toy.name), tmp_path, 2, 1, "stage=2", draws, folders=folders) as run:
        assert answer(run.wait_until_served()) == wanted.texts
        end_in_order(run, 1)


@pytest.mark.parametrize(
    ("mesh", "stages"), [("stage=2,data=2", (0, 1, 0, 1)), ("stage=2,tensor=2", (0, 0, 1, 1))]
)
def test_four_hosts_of_two_stages_give_the_tokens_of_one(
    toy: Path, wanted: Wanted, tmp_path: Path, mesh: str, stages: tuple[int, ...]
):
    """Prompts are scored and pooled too, and several steps run on end, whose draws lie on several hosts."""
    folders = [spoil_others(toy, tmp_path / str(index), stage) for index, stage in enumerate(stages)]
    flags = "--set=schedule.num_decode_steps=2"
    with running(Path(toy.name), tmp_path, 4, 1, mesh, flags, folders=folders) as run:
        assert answer(run.wait_until_served()) == wanted.texts
        check_prompts(run.url, wanted)
        end_in_order(run, 3)


def test_what_is_wrong_on_one_host_ends_all_with_its_reason(toy: Path, tmp_path: Path):
    with running(toy, tmp_path, 2, 2, "tensor=2") as run:  # half of the devices
        assert 0 not in run.codes()
        for index in (0, 1):
            assert "which leaves some of 2 processes without a device" in run.log(index)
