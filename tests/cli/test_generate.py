"""One prompt, standard input and conversations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine
from tests.engine.fakes import EOS


def test_only_the_completion_is_on_stdout(jaxinfer_cli: CommandLine):
    code, out, err = jaxinfer_cli("generate", "--prompt", "say")
    assert (code, out) == (0, "hello\n")
    assert jaxinfer_cli.prompts == ["say"]
    assert "TTFT" in err


def test_prompt_comes_from_a_pipe_without_its_last_newline(jaxinfer_cli: CommandLine):
    code, out, _ = jaxinfer_cli("generate", stdin="say\nit\n")
    assert (code, out) == (0, "hello\n")
    assert jaxinfer_cli.prompts == ["say\nit"]


def test_empty_prompt_is_refused_by_its_name(jaxinfer_cli: CommandLine):
    code, out, err = jaxinfer_cli("generate", "--prompt", "")
    assert (code, out) == (1, "")
    assert "prompt tokens: got 0" in err


def test_at_most_256_tokens_unless_told_otherwise(jaxinfer_cli: CommandLine):
    jaxinfer_cli.script = b"x"
    _, out, err = jaxinfer_cli("generate", "--prompt", "p")
    assert out == "x" * 256 + "\n"
    assert "cut at 256 tokens" in err
    _, out, err = jaxinfer_cli("generate", "--prompt", "p", "--max_tokens", "3")
    assert out == "xxx\n"
    _, out, _ = jaxinfer_cli("generate", "--prompt", "p", "--set", "sampling.max_new_tokens=4")
    assert out == "xxxx\n"


def test_run_is_fitted_to_the_prompt_but_for_what_the_user_chose(jaxinfer_cli: CommandLine):
    jaxinfer_cli("generate", "--prompt", "p" * 40)
    jaxinfer_cli("generate", "--prompt", "p", "--set", "model.max_model_len=700", "--policy", "float32")
    jaxinfer_cli("generate", "--prompt", "p" * 700)
    fitted, chosen, long = jaxinfer_cli.runs
    assert (fitted.max_num_seqs, fitted.prefill_buckets, fitted.max_model_len) == (1, ((1, 64),), 512)
    assert (chosen.max_num_seqs, chosen.max_model_len, chosen.policy) == (1, 700, "float32")
    assert (long.prefill_buckets, long.max_model_len) == (((1, 512),), 1024)


@pytest.mark.parametrize(
    ("args", "draws"),
    [
        (["generate", "--prompt", "p"], ("greedy",)),
        (["generate", "--prompt", "p", "--temperature", "0.5"], ("sample",)),
        (["generate", "--prompt", "p", "--set", "sampling.repetition_penalty=1.2"], ("sample",)),
        (["generate", "--prompt", "p", "--set", "sampling.prompt_logprobs=1"], ("greedy", "score")),
        (["generate", "--prompt", "p", "--set", "run.draws=['sample']"], ("sample",)),
        (["generate", "--chat", "--prompt", "p"], ("greedy",)),
    ],
)
def test_only_the_draws_of_the_request_are_compiled(
    jaxinfer_cli: CommandLine, args: list[str], draws: tuple[str, ...]
):
    assert jaxinfer_cli(*args).code == 0
    assert jaxinfer_cli.runs[-1].draws == draws


def test_sampling_settings_reach_the_device(jaxinfer_cli: CommandLine):
    jaxinfer_cli(
        "generate", "--prompt", "p", "--seed", "7", "--temperature", "0.5", "--set", "sampling.top_k=4"
    )
    (admission,) = jaxinfer_cli.runners[-1].admitted
    params = admission.params
    assert (params.seed, params.temperature, params.top_k) == (7, 0.5, 4)


def test_defaults_of_the_model_fill_what_is_left_open_and_are_said(jaxinfer_cli: CommandLine):
    jaxinfer_cli.defaults = (("temperature", 0.6), ("top_p", 0.9))
    _, _, err = jaxinfer_cli("generate", "--prompt", "p", "--temperature", "0.1")
    (admission,) = jaxinfer_cli.runners[-1].admitted
    assert (admission.params.temperature, admission.params.top_p) == (0.1, 0.9)
    assert "top_p=0.9" in err
    assert "temperature=" not in err


@pytest.mark.parametrize(
    ("defaults", "flags", "temperature"),
    [
        ((), (), 0),
        ((), ("--chat",), 0),
        ((), ("--temperature", "0.5"), 0.5),
        ((), ("--set", "sampling.do_sample=true"), 1),
        ((), ("--set", "sampling.n=2"), 1),
        ((), ("--set", "sampling.top_p=0.9"), 1),
        ((("temperature", 0.6),), (), 0.6),
        ((("do_sample", True),), (), 1),
    ],
)
def test_temperature_is_0_where_nobody_names_one(
    jaxinfer_cli: CommandLine, defaults: tuple, flags: tuple[str, ...], temperature: float
):
    jaxinfer_cli.defaults = defaults
    _, _, err = jaxinfer_cli("generate", "--prompt", "p", *flags)
    assert jaxinfer_cli.runners[-1].admitted[0].params.temperature == temperature
    assert ("temperature 0, for" in err) == (temperature == 0)


def test_several_choices_come_whole(jaxinfer_cli: CommandLine):
    jaxinfer_cli.script = lambda _, choice: [*b"abc"[choice : choice + 1], EOS]
    code, out, _ = jaxinfer_cli("generate", "--prompt", "p", "--set", "sampling.n=3")
    assert (code, out) == (0, "a\nb\nc\n")
    assert jaxinfer_cli.runs[-1].max_num_seqs == 3


def test_request_that_fails_within_ends_with_1(jaxinfer_cli: CommandLine):
    jaxinfer_cli.script = (*b"he", 666)
    code, out, err = jaxinfer_cli("generate", "--prompt", "p")
    assert (code, out) == (1, "he\n")
    assert "no such piece" in err


def test_a_choice_that_fails_within_ends_with_1(jaxinfer_cli: CommandLine):
    jaxinfer_cli.script = lambda _, choice: [[*b"ok", EOS], [*b"he", 666]][choice]
    code, out, err = jaxinfer_cli("generate", "--prompt", "p", "--set", "sampling.n=2")
    assert code == 1
    assert out.startswith("ok\n")
    assert "no such piece" in err


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["generate", "--prompt", "p", "--set", "chat.system=s"], "chat.system"),
        (["generate", "--prompt", "p", "--set", "sampling.logprobs=1"], "sampling.logprobs"),
        (["generate", "--chat", "--prompt", "p", "--set", "sampling.logprobs=1"], "sampling.logprobs"),
        (["score", "--set", "sampling.top_p=0.5", "--set", "chat.system=s"], "sampling.top_p, chat.system"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_settings_without_effect_are_said(jaxinfer_cli: CommandLine, args: list[str], names: str):
    code, _, err = jaxinfer_cli(*args, stdin="abc")
    assert code == 0
    assert f"jaxinfer: without effect here: {names}\n" in err


def test_chat_goes_on_from_what_was_said(jaxinfer_cli: CommandLine):
    code, out, _ = jaxinfer_cli("generate", "--chat", stdin="hi\n\nagain\n/reset\nanew\n/exit\nnever\n")
    assert (code, out) == (0, "hello\n" * 3)
    assert jaxinfer_cli.prompts == ["u:hi|a:", "u:hi|a:hello|u:again|a:", "u:anew|a:"]


def test_chat_takes_a_system_prompt_and_variables(jaxinfer_cli: CommandLine):
    settings = ["--set", "chat.system=Be kind", "--set", 'chat.template_kwargs={mood = "!"}']
    jaxinfer_cli("generate", "--chat", *settings, stdin="hi\n/reset\nyou\n")
    assert jaxinfer_cli.prompts == ["s:Be kind|u:hi|!a:", "s:Be kind|u:you|!a:"]


def test_chat_with_a_prompt_is_one_turn(jaxinfer_cli: CommandLine):
    code, out, _ = jaxinfer_cli("generate", "--chat", "--prompt", "hi")
    assert (code, out) == (0, "hello\n")
    assert jaxinfer_cli.prompts == ["u:hi|a:"]
    assert jaxinfer_cli.runs[-1].prefill_buckets == ((1, 32),)


def test_turn_that_cannot_be_answered_is_forgotten(jaxinfer_cli: CommandLine):
    code, out, err = jaxinfer_cli("generate", "--chat", stdin=f"{'x' * 1024}\nhi\n")
    assert (code, out) == (1, "hello\n")
    assert "/reset" in err
    assert jaxinfer_cli.prompts == ["u:hi|a:"]


def test_unknown_chat_command_is_not_sent(jaxinfer_cli: CommandLine):
    _, out, err = jaxinfer_cli("generate", "--chat", stdin="/rest\n")
    assert out == ""
    assert "did you mean /reset" in err


def test_chat_refuses_several_choices(jaxinfer_cli: CommandLine):
    code, _, err = jaxinfer_cli("generate", "--chat", "--set", "sampling.n=2", stdin="hi\n")
    assert code == 1
    assert "sampling.n" in err


def test_score_reports_what_the_model_gives(jaxinfer_cli: CommandLine, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("abc")
    code, out, _ = jaxinfer_cli("score", "--text", str(text), "--json")
    figures = json.loads(out)
    assert code == 0
    assert (figures["tokens"], figures["scored"]) == (3, 2)
    assert figures["log_likelihood"] == pytest.approx(-(ord("b") + ord("c")) / 10)
    code, out, _ = jaxinfer_cli("score", stdin="abc")
    assert code == 0
    assert "perplexity" in out


@pytest.mark.parametrize("data", [b"\xff\xfe", b"", b"a"], ids=["not UTF-8", "empty", "one token"])
def test_score_refuses_what_it_cannot_score(jaxinfer_cli: CommandLine, data: bytes):
    code, out, err = jaxinfer_cli("score", stdin=data)
    assert (code, out) == (1, "")
    assert "UTF-8" in err or "the text has" in err


@pytest.mark.slow
def test_generate_prints_the_reference_text(smollm2_gguf: Path):
    command = [
        "generate",
        "--prompt",
        "The capital of France is",
        "--temperature",
        "0",
        "--policy",
        "float32",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "jaxinfer", *command, "--model", str(smollm2_gguf)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == " Paris.\n\nThe answer is: 2018-01-22 12:12:53.\n"


def test_the_mesh_has_a_flag_of_its_own(jaxinfer_cli: CommandLine):
    jaxinfer_cli("generate", "--prompt", "p", "--mesh", "tensor=2", "--set", "run.mesh=data=2")
    jaxinfer_cli("generate", "--prompt", "p", "--set", "run.mesh=data=2")
    assert [run.mesh for run in jaxinfer_cli.runs] == ["tensor=2", "data=2"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num_processes", "2"], "--process_id, coordinator: missing"),
        (["--num_processes", "2", "--process_id", "2", "--coordinator", "a:1"], "--process_id: got 2"),
        (["--num_processes", "0"], "num_processes"),
    ],
)
def test_a_place_among_processes_that_cannot_be_is_refused(
    jaxinfer_cli: CommandLine, flags: list[str], says: str
):
    for command in (["generate", "--prompt", "p"], ["serve", "--port", "0"]):
        code, _, err = jaxinfer_cli(*command, *flags)
        assert code == 2
        assert says in err
        assert jaxinfer_cli.runs == []
