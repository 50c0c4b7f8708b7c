"""`jaxinfer generate`: a prompt, a conversation, or a file of requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxinfer.cli.chat import converse
from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.jsonl import answer_file
from jaxinfer.cli.start import MAX_TOKENS, params_of, run_on_hosts, settings_of
from jaxinfer.cli.stream import complete
from jaxinfer.schedule.param_checks import SamplingParamsError


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "generate",
        "complete a prompt, chat, or answer a file of requests; text goes to stdout, the rest to stderr",
        (
            '--prompt "The capital of France is"',
            "--chat                 (a line a turn; /reset, /exit)",
            "--input requests.jsonl --output answers.jsonl",
        ),
    )
    flags.add("prompt", "TEXT", "what to complete; standard input when neither this nor --input is given")
    flags.add("chat", "", "converse by the model's chat template; with --prompt, one turn", "switch")
    flags.add(
        "input", "FILE.jsonl", "a request a line: prompt, prompt_token_ids or messages, and sampling fields"
    )
    flags.add("output", "FILE.jsonl", "an answer a line, in the order of --input")
    flags.add("max_tokens", "COUNT", f"most tokens to write (default {MAX_TOKENS})", "integer", lower_bound=1)
    flags.add(
        "temperature",
        "T",
        "0 takes the likeliest token (default the model's own, else 0; 1 for --input)",
        "number",
    )
    flags.add("seed", "N", "makes the draw reproducible", "integer")
    flags.add_model()
    flags.add_hosts()
    flags.add_bundle()
    flags.add_settings()
    return flags


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    flags = make_flags()
    if not flags.parse(args):
        return 0
    _check_modes(flags)
    settings = settings_of(flags)
    given = {name: flags[name] for name in ("max_tokens", "temperature", "seed") if flags[name] is not None}
    settings.sampling.update(given)
    try:
        params = params_of(settings.sampling)
    except SamplingParamsError as error:
        raise UsageError(str(error)) from None

    def lead(hosts: object) -> int:
        if flags["input"] is not None:
            return answer_file(flags["input"], flags["output"], settings)
        if flags["chat"]:
            return converse(flags["prompt"], settings, params)
        return complete(flags["prompt"] if flags["prompt"] is not None else _read_stdin(), settings, params)

    return run_on_hosts(flags, lead)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise UsageError("give --prompt, --chat or --input, or pipe a prompt in")
    return sys.stdin.read().removesuffix("\n")  # the line's end is the shell's, not the prompt's


def _check_modes(flags: CommandFlags) -> None:
    if flags["output"] is not None and flags["input"] is None:
        raise UsageError("--output needs --input; a single completion goes to stdout")
    if flags["input"] is not None:
        if flags["output"] is None:
            raise UsageError("--input needs --output, the file for the answers")
        if flags["prompt"] is not None or flags["chat"]:
            raise UsageError("--input holds the prompts: leave out --prompt and --chat")
