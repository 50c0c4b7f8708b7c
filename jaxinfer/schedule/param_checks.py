"""Checks of single sampling fields: each returns the value in its one normal form, or says what is allowed."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np


class SamplingParamsError(ValueError):
    """A sampling field that cannot be served.

    Attributes:
      field: name of the field, as the caller spelled it. got: the value. allowed: what would have worked.

    Args:
      where: the field, or a place in it (``stop[0]``).
    """

    def __init__(self, where: str, got: object, allowed: str):
        super().__init__(f"{where}: got {got!r}, allowed: {allowed}")
        self.where, self.field, self.got, self.allowed = where, where.partition("[")[0], got, allowed

    def __reduce__(self):
        return type(self), (self.where, self.got, self.allowed)


# A check takes the field's name and value and returns the value in its one normal form.
Check = Callable[[str, Any], Any]


def integer(low: int, high: int | None = None) -> Check:
    """Accepts integers (numpy's too, no booleans) from ``low`` to ``high``."""
    allowed = f"an integer from {low}" + ("" if high is None else f" to {high}")

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise SamplingParamsError(name, value, allowed)
        if int(value) < low or (high is not None and int(value) > high):
            raise SamplingParamsError(name, value, allowed)
        return int(value)

    return check


def number(low: float, high: float) -> Check:
    """Accepts finite numbers from ``low`` to ``high`` and makes them float."""
    allowed = f"a finite number from {low:g} to {high:g}"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise SamplingParamsError(name, value, allowed)
        if not low <= value <= high:  # false for NaN, so NaN is refused
            raise SamplingParamsError(name, value, allowed)
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """Accepts a boolean."""
    if not isinstance(value, bool):
        raise SamplingParamsError(name, value, "True or False")
    return value


def only(expected: object) -> Check:
    """Accepts one object."""

    def check(name: str, value: Any) -> Any:
        if value is not expected:
            raise SamplingParamsError(name, value, f"{expected!r} only; nothing else is supported")
        return value

    return check


def maybe(inner: Check) -> Check:
    """Accepts None, and what ``inner`` accepts."""
    return lambda name, value: None if value is None else inner(name, value)


def many(inner: Check, allowed: str) -> Check:
    """Accepts a list (None is the empty one) of what ``inner`` accepts, and makes it a tuple without repeats."""

    def check(name: str, value: Any) -> tuple[Any, ...]:
        if value is None:
            return ()
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise SamplingParamsError(name, value, allowed)
        return tuple(dict.fromkeys(inner(f"{name}[{i}]", item) for i, item in enumerate(value)))

    return check


def text(name: str, value: Any) -> str:
    """Accepts a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise SamplingParamsError(name, value, "a string of at least one character")
    return value


def stop(name: str, value: Any) -> tuple[str, ...]:
    """Accepts a string or a list of strings, none of them empty."""
    listed = [text(name, value)] if isinstance(value, str) else value
    return many(text, "a string or a list of strings")(name, listed)


def bias(name: str, value: Any) -> dict[int, float]:
    """Accepts a mapping of token ids, which JSON spells as strings, to numbers from -100 to 100."""
    if not isinstance(value, Mapping):
        raise SamplingParamsError(name, value, "a mapping of token id to a number from -100 to 100")
    biases: dict[int, float] = {}
    for key, amount in value.items():
        where = f"{name}[{key!r}]"
        # JSON has no integer keys; ten digits hold every id.
        spelled = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        token = token_id(where, int(key) if spelled else key)
        if token in biases:
            raise SamplingParamsError(where, amount, "one bias a token id")
        biases[token] = number(-100, 100)(where, amount)
    return biases


token_id = integer(0, 2**31 - 1)
token_ids = many(token_id, "a list of token ids")


def id_sequence(name: str, value: Any) -> tuple[int, ...]:
    """Accepts a list of token ids that is not empty, in order."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise SamplingParamsError(name, value, "a list of token ids")
    ids = tuple(token_id(f"{name}[{i}]", item) for i, item in enumerate(value))
    if not ids:
        raise SamplingParamsError(name, value, "at least one token id")
    return ids


def some_ids(name: str, value: Any) -> tuple[int, ...]:
    """Accepts a list of token ids that is not empty, as a set."""
    return tuple(dict.fromkeys(id_sequence(name, value)))
