"""`jaxinfer generate --chat`: a conversation, typed or piped in, a line a turn."""

from __future__ import annotations

import difflib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.progress import say
from jaxinfer.cli.settings import Settings
from jaxinfer.cli.start import (
    draws_of,
    fit_run,
    open_llm,
    open_model_of,
    settle_temperature,
    tell_unused,
    unseen_fields,
)
from jaxinfer.cli.stream import report_end, stream_text, summarize_to_stderr
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.text import Tokenizer, encode_chat

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

COMMANDS = ("/reset", "/exit")


def converse(prompt: str | None, settings: Settings, params: SamplingParams) -> int:
    """Answers turns until they end.

    Args:
      prompt: the only turn, or None to read turns from stdin.
      settings: ``chat.system`` opens the conversation. params: of every turn; one choice.

    Returns:
      1 when a turn could not be answered.
    """
    if params.n > 1:
        raise ValueError(f"sampling.n: got {params.n}, a conversation goes on from one choice: must be 1")
    tell_unused(unseen_fields(settings))
    model = open_model_of(settings)
    params = settle_temperature(params, model)
    fitted: dict[str, Any] = {"max_num_seqs": 1, "draws": draws_of(model, params)}
    if prompt is not None:
        ids = encode_turns(model.tokenizer, Conversation.opening(settings.chat), prompt, settings.chat)
        fitted = fit_run(model, len(ids), params)
    conversation = Conversation(open_llm(settings, model, **fitted), settings.chat, params)
    is_typed = prompt is None and sys.stdin.isatty()
    if is_typed:
        say(f"a line a turn; {', '.join(COMMANDS)} or Ctrl-D; Ctrl-C stops an answer")
    code = 0
    for line in [prompt] if prompt is not None else _read_turns(is_typed):
        if line.strip() == "/exit":
            break
        if re.fullmatch(r"/\w+", line.strip()):
            _obey(line.strip(), conversation)
        elif line.strip():
            code = max(code, conversation.answer(line, is_typed))
    return code


class Conversation:
    """What was said so far, and the model that goes on from it.

    Args:
      llm: the model. chat: the section ``chat`` of the settings. params: of every turn.
    """

    def __init__(self, llm: LLM, chat: dict[str, Any], params: SamplingParams) -> None:
        self._llm, self._chat, self._params = llm, chat, params
        self.messages = self.opening(chat)

    @staticmethod
    def opening(chat: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the messages that stand before the first turn."""
        return [{"role": "system", "content": chat["system"]}] if chat.get("system") else []

    def reset(self) -> None:
        """Forgets every turn."""
        self.messages = self.opening(self._chat)

    def answer(self, text: str, is_typed: bool = False) -> int:
        """Streams the answer to a turn; a turn that fails or is interrupted is forgotten.

        Returns:
          0, or 1 when there was no answer.
        """
        try:
            ids = encode_turns(self._llm.get_tokenizer(), self.messages, text, self._chat)
            with _interruptible(is_typed) as is_interrupted:
                handle = stream_text(self._llm, ids, self._params, is_interrupted)
        except ValueError as error:
            say(f"error: {error}; /reset forgets the conversation")
            return 1
        choice = handle.output().outputs[0]
        if choice.finish_reason in ("stop", "length"):
            said = {"role": "user", "content": text}, {"role": "assistant", "content": choice.text}
            self.messages = [*self.messages, *said]
            summarize_to_stderr([handle])
        return report_end(handle)


def encode_turns(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], text: str, chat: dict[str, Any]
) -> list[int]:
    """Returns the ids of a conversation with a new turn of the user's."""
    turns = [*messages, {"role": "user", "content": text}]
    return encode_chat(
        tokenizer,
        turns,
        chat_template=chat.get("template"),
        chat_template_kwargs=chat.get("template_kwargs"),
    )


@contextmanager
def _interruptible(is_typed: bool) -> Iterator[Callable[[], bool]]:
    """Makes Ctrl-C a question to ask between steps, where a person types; else it ends the program."""
    if not is_typed:
        yield lambda: False
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def _read_turns(is_typed: bool) -> Iterator[str]:
    if not is_typed:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with suppress(ImportError):  # not on Windows
        import readline  # noqa: F401 (it gives `input` its editing and its history)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return


def _obey(command: str, conversation: Conversation) -> None:
    if command == "/reset":
        conversation.reset()
        say("the conversation starts anew")
        return
    close = difflib.get_close_matches(command, COMMANDS, n=1)
    say(
        f"no command {command}; "
        + (f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}")
    )
