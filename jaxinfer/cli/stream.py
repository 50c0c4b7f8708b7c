"""One request to stdout as it comes, and what is said of it on stderr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxinfer.cli.progress import say
from jaxinfer.cli.settings import Settings
from jaxinfer.cli.start import (
    fit_run,
    open_llm,
    open_model_of,
    settle_temperature,
    tell_unused,
    unseen_fields,
)

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Handle
    from jaxinfer.engine.intake import Prompt
    from jaxinfer.llm import LLM
    from jaxinfer.schedule.sampling_params import SamplingParams


def complete(prompt: str, settings: Settings, params: SamplingParams) -> int:
    """Writes the completion of one prompt to stdout, as it comes; several choices when they are whole."""
    tell_unused([*(f"chat.{name}" for name in settings.chat), *unseen_fields(settings)])
    model = open_model_of(settings)
    params = settle_temperature(params, model)
    ids = model.tokenizer.encode(prompt)
    params.validate_for(model.cfg.vocab_size, model.cfg.max_len, len(ids), model.defaults.eos_ids)
    llm = open_llm(settings, model, **fit_run(model, len(ids), params))
    if params.n == 1:
        handle = stream_text(llm, ids, params)
    else:
        handle = llm.engine.submit(ids, llm.fill_params(params))
        llm.engine.run_until_done()
        print(*(choice.text for choice in handle.output().outputs), sep="\n", flush=True)
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
    choices = handle.output().outputs
    if errors := [choice.error for choice in choices if choice.finish_reason == "error"]:
        say(f"error: {errors[0]}")
        return 1
    if cut := [len(choice.token_ids) for choice in choices if choice.finish_reason == "length"]:
        say(f"cut at {max(cut)} tokens; --max_tokens allows more, within the context")
    return 0
