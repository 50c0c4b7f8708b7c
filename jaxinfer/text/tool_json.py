"""JSON of tool calls: where an object ends, and the raw text of its members."""

from __future__ import annotations

import json

_SPACE = " \t\n\r"
_KEYS = (
    "name",
    "parameters",
    "arguments",
    "type",
    "id",
    "function",
)  # what an object that is a call begins with


class JsonEnd:
    """Finds where the object at ``start`` of a growing text ends, reading each character once."""

    def __init__(self, start: int):
        self._at = start
        self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """Returns the position behind the object, None while it is not whole; ``text`` only ever grows."""
        for at in range(self._at, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        self._at = max(self._at, len(text))
        return None


def may_be_call(text: str, start: int) -> bool:
    """Returns whether the object that begins at ``start``, whole or not, begins as a call does."""
    begun = text[start + 1 : start + 64].lstrip(_SPACE)
    return any(f'"{key}"'.startswith(begun[: len(key) + 2]) for key in _KEYS)


def read_call(text: str, *, needs_arguments: bool) -> tuple[str, str] | None:
    """Returns the name and the arguments (as JSON) of a call that is written as one object, None if it is none.

    Args:
      text: the object. needs_arguments: whether one without arguments is no call.
    """
    members = _read_members(text)
    if members is None:
        return None
    name = members.get("name", (None, ""))[0]
    value, raw = members.get("arguments") or members.get("parameters") or (None, "")
    if not isinstance(name, str) or not is_name(name) or (needs_arguments and not raw):
        return None
    if value is None or value == "":
        return name, "{}"
    # Some write the arguments as JSON in a string.
    arguments = value if isinstance(value, str) else raw
    return (name, arguments) if read_arguments(arguments) is not None else None


def read_arguments(text: str) -> str | None:
    """Returns text that is a JSON object and can be sent, None for other text."""
    return None if _read_members(text) is None else text


def is_name(name: str) -> bool:
    """Returns whether a function can have this name."""
    return bool(name) and name.isprintable()


def _read_members(text: str) -> dict[str, tuple[object, str]] | None:
    """Returns the members of a JSON object, each as a value and as it is written, None for anything else."""
    members: dict[str, tuple[object, str]] = {}
    try:
        text.encode()  # half of a surrogate pair could not be sent
        json.loads(text, parse_constant=_refuse)
        at = _skip(text, _skip(text, 0) + 1)
        while text[at : at + 1] == '"':
            key, at = _DECODER.raw_decode(text, at)
            start = _skip(text, _skip(text, at) + 1)  # behind the colon
            value, at = _DECODER.raw_decode(text, start)
            members[key] = value, text[start:at]
            at = _skip(text, _skip(text, at) + 1)  # behind the comma, or the brace
    except (ValueError, RecursionError):
        return None
    return members if text.lstrip(_SPACE).startswith("{") else None


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in tuple(_SPACE):
        at += 1
    return at
