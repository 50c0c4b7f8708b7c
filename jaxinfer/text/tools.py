"""Tool calls in the text of an answer, found while it streams.

What a model writes for a call is fixed by its chat template, where `tool_format_of` reads it. A parser holds text back
while it may be a call, hands out a call once all of it is there and well-formed, and gives all else back as text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from jaxinfer.text.tool_json import JsonEnd, is_name, may_be_call, read_arguments, read_call

_ALPHANUMERIC = string.ascii_letters + string.digits
_PYTHON_TAG = "<|python_tag|>"
# Mistral's newer way: a name, perhaps an id, and the arguments.
_NAMED = re.compile(r"\s*([\w./-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_NAMED_TAGS = ("[CALL_ID]", "[ARGS]")
_MAX_HEAD = 256  # characters from the marker to the arguments; a longer one is no call


@dataclass(frozen=True, slots=True)
class TextAdded:
    """Text of the answer that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call: its number in the answer from 0, an id of its own, and the function's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsAdded:
    """Arguments of call ``index``; all of its pieces together are a JSON object."""

    index: int
    text: str


Event = TextAdded | CallBegun | ArgumentsAdded


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
      name: hermes, mistral, phi4, functools, nemotron or llama.
      open: what comes before calls. close: what comes after them, where the model writes it; "" for nothing.
      needs_special_tokens: whether the markers may be special tokens, so that text must be made with
        ``skip_special_tokens=False``.
      begins_answer: calls are bare JSON at the very start of an answer, and ``open`` may be missing.
      is_named: a name may stand outside of the JSON: ``open name[ARGS]{...}``.
      id_length: characters of an id without its prefix. id_prefix: what ids begin with.
    """

    name: str
    open: str
    close: str = ""
    needs_special_tokens: bool = True
    begins_answer: bool = False
    is_named: bool = False
    id_length: int = 24
    id_prefix: str = "call_"

    def make_id(self) -> str:
        """Returns an id for a call, at random."""
        return self.id_prefix + "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self.id_length))

    def parser(
        self, *, names: Collection[str] | None = None, make_id: Callable[[], str] | None = None
    ) -> ToolParser:
        """Returns a parser for one answer.

        Args:
          names: functions that the request offers; a call of any other is text. None takes every name.
          make_id: makes the ids of calls; `make_id` of the format when None.
        """
        return ToolParser(self, names, make_id or self.make_id)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
# Mistral's templates refuse any other length of id.
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", is_named=True, id_length=9, id_prefix="")
PHI4 = ToolFormat("phi4", "<|tool_call|>", "<|/tool_call|>")
FUNCTOOLS = ToolFormat("functools", "functools", needs_special_tokens=False)
NEMOTRON = ToolFormat("nemotron", "<TOOLCALL>", "</TOOLCALL>", needs_special_tokens=False)
# Where the tag is skipped with the special tokens, the JSON behind it begins the answer.
LLAMA = ToolFormat("llama", _PYTHON_TAG, needs_special_tokens=False, begins_answer=True)


def tool_format_of(chat_template: str | None, family: str) -> ToolFormat | None:
    """Returns how a model writes calls, by what its chat template says.

    Args:
      chat_template: the Jinja source that prompts are made with (`find_template` with tools), None for none.
      family: of the model, such as ``llama``; Microsoft's template for Phi-4 mini shows tools and no call.

    Returns:
      The format, or None where the template defines none that is known: answers are plain text then.
    """
    template = chat_template or ""
    if "<function=" in template or "<arg_key>" in template:
        return None  # these put the arguments into tags of their own, not JSON
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<TOOLCALL>" in template:
        return NEMOTRON
    if "functools[" in template:
        return FUNCTOOLS
    if "<|tool_call|>" in template or (family.startswith("phi") and "<|/tool|>" in template):
        return PHI4
    if _PYTHON_TAG in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA
    return None


def gather(events: Iterable[Event]) -> tuple[str, list[tuple[str, str, str]]]:
    """Returns the text of events, and ``(id, name, arguments)`` of each call."""
    text: list[str] = []
    calls: list[tuple[str, str, str]] = []
    for event in events:
        if isinstance(event, TextAdded):
            text.append(event.text)
        elif isinstance(event, CallBegun):
            calls.append((event.id, event.name, ""))
        else:
            ident, name, arguments = calls[event.index]
            calls[event.index] = ident, name, arguments + event.text
    return "".join(text), calls


class ToolParser:
    """Finds the calls of one answer.

    Text is kept to the letter, but for white space between calls and the beginning or the end of the answer. Where the
    answer is cut into pieces changes nothing but the cuts, and nothing that a model writes raises.

    Args:
      format, names, make_id: see `ToolFormat.parser`.
    """

    def __init__(self, format: ToolFormat, names: Collection[str] | None, make_id: Callable[[], str]):
        self._format = format
        self._names = None if names is None else frozenset(names)
        self._make_id = make_id
        self._events: list[Event] = []
        self._num_calls = 0
        self._space = ""  # at the end of the text so far; shown only if more text follows, or no call does
        self._said = self._follows_call = False
        self._rest = ""  # came and is not decided
        # A state reads `_rest` and returns whether it is worth another look; it then begins with a marker of
        # `_head` characters, and what comes before `_at` is read.
        self._outside = self._plain if format.begins_answer else self._text
        self._state: Callable[[], bool] = self._start if format.begins_answer else self._text
        self._head = self._at = 0
        self._name: str | None = None
        self._end = JsonEnd(0)

    def push(self, text: str) -> list[Event]:
        """Takes more of the answer; returns what is certain now."""
        self._rest += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> list[Event]:
        """Takes the end of the answer; returns what was held back, a call cut short as the text that it is."""
        rest = self._rest.strip()
        closing = self._state == self._close and (rest == ";" or self._format.close.startswith(rest))
        if not closing and not (self._state == self._item and rest == ","):
            self._say(self._rest)
        self._rest = ""
        if self._space and not self._follows_call:
            self._events.append(TextAdded(self._space))
        self._space = ""
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        """Adds text; white space at its end waits for what comes next."""
        text = self._space + text
        if self._num_calls and not self._said:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._events.append(TextAdded(shown))
            self._said, self._follows_call = True, False

    def _call(self, name: str, arguments: str, end: int, state: Callable[[], bool]) -> bool:
        index = self._num_calls
        self._events += [CallBegun(index, self._make_id(), name), ArgumentsAdded(index, arguments)]
        self._num_calls += 1
        self._follows_call = True
        return self._move(end, state)

    def _move(self, count: int, state: Callable[[], bool]) -> bool:
        self._rest, self._state = self._rest[count:], state
        self._head = self._at = 0
        return True

    def _give_back(self, count: int) -> bool:
        """Says what looked like a call and is none; a call may yet follow it, but for bare ones."""
        self._say(self._rest[:count])
        return self._move(count, self._outside)

    def _peek(self) -> str:
        """Skips white space from `_at` on and returns the character there, "" where none has come."""
        rest, at = self._rest, self._at
        while at < len(rest) and rest[at].isspace():
            at += 1
        self._at = at
        return rest[at : at + 1]

    def _plain(self) -> bool:
        self._say(self._rest)
        self._rest = ""
        return False

    def _text(self) -> bool:
        """Outside of calls: text up to the next marker, less what may be the beginning of one."""
        marker, rest = self._format.open, self._rest
        found = rest.find(marker)
        if found >= 0:
            self._say(rest[:found])
            self._move(found, self._body)
            self._head = self._at = len(marker)
            return True
        sizes = range(min(len(marker) - 1, len(rest)), 0, -1)
        held = next((size for size in sizes if marker.startswith(rest[-size:])), 0)
        self._say(rest[: len(rest) - held])
        self._rest = rest[len(rest) - held :]
        return False

    def _start(self) -> bool:
        """Where a bare call may stand: at the start of the answer, or behind another call."""
        marker, rest = self._format.open, self._rest.lstrip()
        if marker.startswith(rest) and rest != marker:
            return False
        space = len(self._rest) - len(rest)
        if rest.startswith(marker) or rest.startswith("{"):
            self._head = self._at = space + (len(marker) if rest.startswith(marker) else 0)
            self._state = self._body
            return True
        return self._move(0, self._plain)

    def _body(self) -> bool:
        """Behind a marker: an object, a list of them, or a name."""
        char = self._peek()
        if char == "{":
            self._end, self._name, self._state = JsonEnd(self._at), None, self._object
        elif char == "[":
            self._at += 1
            self._state = self._item
        elif self._format.is_named and _NAMED.match(char):
            self._state = self._named
        else:
            return bool(char) and self._give_back(self._head)
        return True

    def _named(self) -> bool:
        match = _NAMED.match(self._rest, self._head)
        assert match is not None
        rest = self._rest[match.end() :]
        if match.end() - self._head > _MAX_HEAD:
            return self._give_back(self._head)
        if rest.startswith("{"):
            self._at = match.end()
            self._end, self._name, self._state = JsonEnd(self._at), match[1], self._object
            return True
        return not any(tag.startswith(rest) for tag in _NAMED_TAGS) and self._give_back(self._head)

    def _object(self) -> bool:
        return self._read(self._close)

    def _item(self) -> bool:
        """In a list, where an object must come."""
        if (char := self._peek()) != "{":
            return bool(char) and self._give_back(self._head)
        self._end, self._name, self._state = JsonEnd(self._at), None, self._listed
        return True

    def _listed(self) -> bool:
        return self._read(self._separator)

    def _separator(self) -> bool:
        """In a list, behind a call."""
        char = self._peek()
        if char == ",":
            self._move(self._at, self._item)
            self._head = self._at = 1
            return True
        if char == "]":
            return self._move(self._at + 1, self._close)
        return bool(char) and self._move(0, self._outside)

    def _read(self, state: Callable[[], bool]) -> bool:
        """Reads the object at `_at` once it is whole, and goes on to a state."""
        bare = self._format.begins_answer
        if bare and not may_be_call(self._rest, self._at):
            return self._give_back(self._head)  # JSON as an answer streams as it comes
        end = self._end.find(self._rest)
        if end is None:
            return False
        found = self._rest[self._at : end]
        if self._name is None:
            call = read_call(found, needs_arguments=bare)
        else:
            arguments = read_arguments(found)
            call = None if arguments is None or not is_name(self._name) else (self._name, arguments)
        if call is None or (self._names is not None and call[0] not in self._names):
            return self._give_back(end)
        return self._call(*call, end, state)

    def _close(self) -> bool:
        """Behind a call: the closing marker where there is one, and where calls are bare perhaps another."""
        rest, close = self._rest.lstrip(), self._format.close
        if not self._format.begins_answer:
            if close and rest.startswith(close):
                return self._move(self._rest.index(close) + len(close), self._text)
            return not (close and close.startswith(rest)) and self._move(0, self._text)
        behind = rest[1:].lstrip() if rest.startswith(";") else rest
        if not behind:
            return False
        if rest.startswith(";") and behind.startswith("{"):
            self._at = self._head = len(self._rest) - len(behind)
            self._state = self._body
            return True
        return self._move(0, self._plain if rest.startswith(";") else self._start)
