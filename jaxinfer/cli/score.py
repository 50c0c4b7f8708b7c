"""`jaxinfer score`: how likely a model finds a text, under one policy or under several beside each other."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxinfer.cli.compare import compare, read_policies
from jaxinfer.cli.flags import CommandFlags
from jaxinfer.cli.start import fit_run, open_llm, open_model_of, read_text, settings_of, tell_unused
from jaxinfer.schedule.sampling_params import SamplingParams


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "score",
        "log-likelihood and perplexity of a text; every token is scored but the first of a window, BOS left out",
        (
            "--text book.txt",
            "--text book.txt --json",
            "--text book.txt --policies 'bf16; w8a8,kv8' --output it.png",
            "--text book.txt --model my-int4 --policies auto \\\n"
            "    --reference bf16 --reference_model smollm2-135m",
        ),
    )
    flags.add("text", "FILE", "the text, in UTF-8; standard input when left out")
    flags.add("json", "", "write one JSON object", "switch")
    about = "number formats to compare, ; between them (, is within one); may be repeated"
    flags.add("policies", "FORMAT;FORMAT", about, "texts")
    flags.add("reference", "FORMAT", "what they are compared with (default the first of them)")
    about = "the model of --reference, such as a calibrated one's source (default --model)"
    flags.add("reference_model", "NAME", about)
    flags.add("without_speed", "", "measure no speed, which takes most of the time", "switch")
    flags.add(
        "output", "FILE", "quality against bytes as .png, the record as .json; may be repeated", "texts"
    )
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
    policies = read_policies(flags)
    text = read_text(flags["text"])
    if policies:
        return compare(flags, settings, policies, text)
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
