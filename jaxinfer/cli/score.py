"""`jaxinfer score`: how likely a model finds a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.start import fit_run, open_llm, open_model_of, settings_of, tell_unused
from jaxinfer.schedule.sampling_params import SamplingParams


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "score",
        "log-likelihood and perplexity of a text; every token is scored but the first of a window, BOS left out",
        ("--text book.txt", "--text book.txt --json"),
    )
    flags.add("text", "FILE", "the text, in UTF-8; standard input when left out")
    flags.add("json", "", "write one JSON object", "switch")
    flags.add_model()
    flags.add_settings()
    return flags


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    flags = make_flags()
    if not flags.parse(args):
        return 0
    settings = settings_of(flags)
    unused = {"sampling": settings.sampling, "chat": settings.chat}
    tell_unused([f"{section}.{name}" for section, table in unused.items() for name in table])
    text = _read(flags["text"])
    model = open_model_of(settings)
    ids = model.tokenizer.encode(text)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    score = open_llm(settings, model, **fit_run(model, len(ids), asked)).score(ids)
    if not score.num_scored:
        raise ValueError(f"the text has {len(score.token_ids)} tokens, and the first has no score: give more")
    figures = {
        "tokens": len(score.token_ids),
        "scored": score.num_scored,
        "log_likelihood": score.log_likelihood,
        "nats_per_token": score.nats_per_token,
        "perplexity": score.perplexity,
    }
    if flags["json"]:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name.replace('_', ' '):<16}{value:.8g}" for name, value in figures.items()))
    return 0


def _read(path: str | None) -> str:
    if path is None and sys.stdin.isatty():
        raise UsageError("give --text, or pipe a text in")
    data = sys.stdin.buffer.read() if path is None else Path(path).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path or 'standard input'}: not UTF-8 at byte {error.start}") from None
