"""`jaxinfer generate --input`: a file of requests, a line each, to a file of answers in the same order."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxinfer.cli.flags import UsageError
from jaxinfer.cli.progress import Progress, say
from jaxinfer.cli.settings import Settings, read_sampling
from jaxinfer.cli.start import open_llm, params_of, tell_unused
from jaxinfer.cli.stream import summarize_to_stderr

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Handle
    from jaxinfer.engine.intake import Prompt
    from jaxinfer.engine.outputs import CompletionOutput, PositionLogprobs
    from jaxinfer.llm import LLM
    from jaxinfer.schedule.sampling_params import SamplingParams

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
CHAT_KEYS = ("tools", "chat_template", "add_generation_prompt", "chat_template_kwargs")
_ROWS_AHEAD = 4  # requests in the engine for each row that runs: enough to keep rows full, a bound on memory


def answer_file(source: str, target: str, settings: Settings) -> int:
    """Answers a file of requests.

    A line that cannot be answered becomes ``{"index": ..., "error": ...}`` at its place, and the rest goes on.

    Args:
      source, target: JSONL files. settings: sampling fields hold where a line gives none.

    Returns:
      1 when a line could not be answered.
    """
    if Path(target).exists() and os.path.samefile(source, target):
        raise UsageError(f"--output {target} is the input file")
    if Path(source).exists() and not Path(source).is_file():
        raise ValueError(
            f"--input {source}: not a regular file, and it is read twice; write the requests to one"
        )
    with open(source, "rb") as lines:
        total = sum(1 for line in lines if line.strip())
    if not Path(target).absolute().parent.is_dir():
        raise ValueError(f"--output {target}: no such folder, make it first")
    tell_unused(["chat.system"] if "system" in settings.chat else [])  # a conversation of a line is whole
    llm = open_llm(settings)
    # A lone surrogate, as in an error that quotes one, is written as JSON escapes it.
    with (
        open(target, "w", encoding="utf-8", errors="backslashreplace") as out,
        Progress("answering", total, "request") as progress,
    ):
        batch = Batch(llm, settings, out, progress)
        batch.run(_read_lines(source))
    if batch.answered:
        summarize_to_stderr(batch.answered)
    if batch.num_failed:
        say(f"{batch.num_failed} of {total} requests failed; their lines in {target} say why")
    return 1 if batch.num_failed else 0


def _read_lines(path: str) -> Iterator[bytes]:
    with open(path, "rb") as lines:
        yield from (line for line in lines if line.strip())


class Batch:
    """Requests on their way from lines to answers.

    Args:
      llm: answers. settings: defaults of sampling and chat. out: takes a line an answer. progress: counts them.
    """

    def __init__(self, llm: LLM, settings: Settings, out: TextIO, progress: Progress) -> None:
        self._llm, self._settings, self._out, self._progress = llm, settings, out, progress
        self._most = _ROWS_AHEAD * llm.engine.scheduler.config.max_num_seqs
        self._live: dict[str, int] = {}  # index of each request in the engine
        self._ready: dict[int, dict[str, Any]] = {}  # answers that an earlier one holds up
        self._next = 0
        self.answered: list[Handle] = []
        self.num_failed = 0

    def run(self, lines: Iterator[bytes]) -> None:
        """Answers all lines."""
        numbered = enumerate(lines)
        while True:
            for index, line in itertools.islice(numbered, self._most - len(self._live)):
                self._submit(index, line)
            self._write()
            if not self._live:
                return
            for handle in self._llm.engine.step():
                if handle.finished:
                    self._ready[self._live.pop(handle.request_id)] = self._finish(handle)

    def _submit(self, index: int, line: bytes) -> None:
        try:
            prompt, params = read_request(line, self._llm, self._settings)
            handle = self._llm.engine.submit(prompt, self._llm.fill_params(params))
        except ValueError as error:
            self._ready[index] = {"error": str(error)}
        else:
            self._live[handle.request_id] = index

    def _finish(self, handle: Handle) -> dict[str, Any]:
        answer = make_answer(handle)
        if "error" not in answer:
            self.answered.append(handle)
        return answer

    def _write(self) -> None:
        """Writes what is next in order, each line whole."""
        while self._next in self._ready:
            answer = self._ready.pop(self._next)
            self.num_failed += "error" in answer
            self._out.write(json.dumps({"index": self._next} | answer, ensure_ascii=False) + "\n")
            self._out.flush()
            self._progress.advance()
            self._next += 1


def read_request(line: bytes, llm: LLM, settings: Settings) -> tuple[Prompt, SamplingParams]:
    """Reads one line.

    Args:
      line: a JSON object. llm: its tokenizer and template make the prompt. settings: defaults.

    Raises:
      ValueError: what is wrong with it.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(
            f"got {type(fields).__name__}, expected an object with one of {', '.join(PROMPT_KEYS)}"
        )
    given = [key for key in PROMPT_KEYS if key in fields]
    if len(given) != 1:
        raise ValueError(
            f"got {' and '.join(given) or 'no prompt'}, expected one of {', '.join(PROMPT_KEYS)}"
        )
    prompt = fields.pop(given[0])
    if given == ["messages"]:
        chat = {key: fields.pop(key) for key in CHAT_KEYS if key in fields}
        prompt = _encode_messages(llm, prompt, chat, settings.chat)
    elif isinstance(prompt, str) != (given == ["prompt"]):
        raise ValueError(
            f"{given[0]}: got {type(prompt).__name__}; prompt is a text, prompt_token_ids a list of ids"
        )
    return _check_prompt(prompt), params_of(settings.sampling | read_sampling(fields))


def _encode_messages(llm: LLM, messages: Any, chat: dict[str, Any], defaults: Mapping[str, Any]) -> list[int]:
    from jaxinfer.text import encode_chat

    variables, own = defaults.get("template_kwargs"), chat.get("chat_template_kwargs")
    if isinstance(variables, Mapping) and isinstance(own, Mapping | None):  # what is neither is refused below
        own = {**variables, **(own or {})}
    chat = {"chat_template": defaults.get("template"), **chat, "chat_template_kwargs": own}
    return encode_chat(llm.get_tokenizer(), messages, **chat)


def _check_prompt(prompt: Any) -> Prompt:
    from jaxinfer.engine.intake import read_prompts

    (checked,) = read_prompts([prompt])
    return checked


def make_answer(handle: Handle) -> dict[str, Any]:
    """Returns the answer to one request, all but its index; the first choice is the answer's own."""
    output = handle.output()
    choices = [_make_choice(choice) for choice in output.outputs]
    errors = [choice.error for choice in output.outputs if choice.finish_reason == "error"]
    if errors:
        return {"error": errors[0]}
    num_prompt, num_output = len(output.prompt_token_ids), sum(len(c.token_ids) for c in output.outputs)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    answer = choices[0] | {"usage": usage}
    if len(choices) > 1:
        answer["choices"] = choices
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = _make_logprobs(output.prompt_logprobs)
    return answer


def _make_choice(choice: CompletionOutput) -> dict[str, Any]:
    logprobs = None if choice.logprobs is None else _make_logprobs(choice.logprobs)
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "logprobs": logprobs,
    }


def _make_logprobs(positions: Any) -> list[list[dict[str, Any]] | None]:
    """Each position's token first, then the likeliest."""

    def entries(position: PositionLogprobs) -> list[dict[str, Any]]:
        return [
            {"token_id": token, "token": one.decoded_token, "logprob": one.logprob, "rank": one.rank}
            for token, one in position.items()
        ]

    return [None if position is None else entries(position) for position in positions]
