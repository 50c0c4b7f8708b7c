"""`jaxinfer generate`: a prompt, a conversation, or a file of requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import say
from jaxinfer.cli.settings import Settings
from jaxinfer.cli.start import MAX_TOKENS, fit_run, open_llm, open_model_of, params_of, settings_of
from jaxinfer.schedule.param_checks import SamplingParamsError

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Handle
    from jaxinfer.engine.intake import Prompt
    from jaxinfer.llm import LLM
    from jaxinfer.schedule.sampling_params import SamplingParams


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
    flags.add("temperature", "T", "0 takes the likeliest token (default the model's own, else 1)", "number")
    flags.add("seed", "N", "makes the draw reproducible", "integer")
    flags.add_shared()
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
    if flags["input"] is not None:
        from jaxinfer.cli.jsonl import answer_file

        return answer_file(flags["input"], flags["output"], settings)
    if flags["chat"]:
        from jaxinfer.cli.chat import converse

        return converse(flags["prompt"], settings, params)
    return complete(flags["prompt"] if flags["prompt"] is not None else _read_stdin(), settings, params)


def complete(prompt: str, settings: Settings, params: SamplingParams) -> int:
    """Writes the completion of one prompt to stdout, as it comes; several choices when they are whole."""
    model = open_model_of(settings)
    ids = model.tokenizer.encode(prompt)
    params.validate_for(model.cfg.vocab_size, model.cfg.max_len, len(ids), model.defaults.eos_ids)
    fitted = fit_run(model, len(ids), params.max_tokens) | {"max_num_seqs": params.n}
    llm = open_llm(settings, model, **fitted)
    if params.n > 1:
        (output,) = llm.generate(ids, params)
        print(*(choice.text for choice in output.outputs), sep="\n")
        return 0
    handle = stream_text(llm, ids, params)
    summarize_to_stderr([handle])
    return report_end(handle)


def stream_text(
    llm: LLM, prompt: Prompt, params: SamplingParams, is_interrupted: Callable[[], bool] = lambda: False
) -> Handle:
    """Writes a completion to stdout as it comes, a newline after it, and returns its request."""
    handle = llm.engine.submit(prompt, llm.fill_params(params), stream=True)
    for delta in llm.engine.stream(handle):
        print(delta.text, end="", flush=True)
        if is_interrupted():
            llm.engine.abort(handle.request_id)
    print(flush=True)
    return handle


def summarize_to_stderr(handles: Sequence[Handle]) -> None:
    """Writes counts and times of requests that ran together."""
    from jaxinfer.engine.metrics import summarize

    started = min(handle.arrival for handle in handles)
    ended = max(handle.finished_at or started for handle in handles)
    num_prompt_tokens = sum(len(handle.prompt_token_ids) for handle in handles)
    summary = summarize([handle.metrics() for handle in handles], num_prompt_tokens, ended - started)
    for line in str(summary).splitlines():
        say(line)


def report_end(handle: Handle) -> int:
    """Says why a text ended where that is not its own end, and returns the exit code."""
    choice = handle.output().outputs[0]
    if choice.finish_reason == "error":
        say(f"error: {choice.error}")
        return 1
    if choice.finish_reason == "length":
        say(f"cut at {len(choice.token_ids)} tokens; --max_tokens allows more, within the context")
    return 0


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
