"""The command line over an engine that follows a script: no model, nothing compiled."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jaxinfer.llm
import jaxinfer.weights.model
from jaxinfer.build import RunConfig
from jaxinfer.cli.main import main
from jaxinfer.config import AttentionConfig, GenerationDefaults, LayerKind, MlpConfig, ModelConfig
from jaxinfer.engine.engine import Engine, Handle
from jaxinfer.weights.model import Model
from tests.engine.fakes import EOS, VOCAB, ScriptRunner, TableTokenizer, make_engine

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{{ mood }}a:"


class ChatTokenizer(TableTokenizer):
    """Has a chat template that shows what it was given."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return {}

    @property
    def chat_templates(self) -> Mapping[str, str]:
        return {"default": TEMPLATE}


class Result(NamedTuple):
    """What a command line came to."""

    code: int
    out: str
    err: str


@dataclass
class CommandLine:
    """Runs command lines of one process, each on a new engine.

    Attributes:
      script: what the model says. defaults: the checkpoint's sampling defaults. runs, runners: one a command
      that opened a model. prompts: all that were accepted.
    """

    capsys: Any
    monkeypatch: pytest.MonkeyPatch
    script: Sequence[int] | Callable[[str, int], Sequence[int]] = (*b"hello", EOS)
    defaults: tuple[tuple[str, float | int | bool], ...] = ()
    runs: list[RunConfig] = field(default_factory=list)
    runners: list[ScriptRunner] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    def __call__(self, *args: str, stdin: str | bytes | None = None) -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        stream = io.TextIOWrapper(io.BytesIO(data))
        if stdin is None:
            self.monkeypatch.setattr(stream, "isatty", lambda: True)
        self.monkeypatch.setattr(sys, "stdin", stream)
        return Result(main(args), *self.capsys.readouterr())

    def open(self, name: str) -> Model:
        attention, mlp = AttentionConfig(1, 1, 2, 1.0), MlpConfig(2)
        cfg = ModelConfig("fake", VOCAB, 2, 1024, (LayerKind(),), attention, mlp)
        defaults = GenerationDefaults((EOS,), sampling=self.defaults)
        return Model(
            name,
            Path(name),
            cfg,
            defaults,
            ChatTokenizer(),
            lambda policy: (policy, ()),
            lambda *_: None,
            None,
        )

    def build(self, config: RunConfig, model: Model, say: Callable[[str], None]) -> Engine:
        limits: dict[str, Any] = {
            "max_num_seqs": config.max_num_seqs,
            "max_len": config.max_model_len or model.cfg.max_len,
        }
        engine, runner = make_engine(self.script, model.tokenizer, **limits)
        self.runs.append(config)
        self.runners.append(runner)
        prepare = engine.prepare

        def prepare_and_note(*args: Any, **kwargs: Any) -> Handle:
            handle = prepare(*args, **kwargs)
            self.prompts.append(bytes(handle.prompt_token_ids).decode())
            return handle

        self.monkeypatch.setattr(engine, "prepare", prepare_and_note)
        return engine


@pytest.fixture
def jaxinfer_cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Runs a command line in this process: ``jaxinfer_cli("generate", "--prompt", "p", stdin="...")``."""
    command_line = CommandLine(capsys, monkeypatch)
    monkeypatch.setattr(jaxinfer.weights.model, "open_model", command_line.open)
    monkeypatch.setattr(jaxinfer.llm, "open_model", command_line.open)
    monkeypatch.setattr(jaxinfer.llm, "build_engine", command_line.build)
    return command_line
