"""JSON: files of it, and frozen records to it and back by their own annotations."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from jaxinfer.weights.errors import CheckpointError, CorruptFileError, MissingFilesError

T = TypeVar("T")
PairsHook = Callable[[list[tuple[str, Any]]], Any]


def read_json(path: Path, hook: PairsHook | None = None) -> dict[str, Any]:
    """Returns the object that a JSON file holds.

    Args:
      path: the file.
      hook: ``object_pairs_hook`` of the parser.

    Raises:
      MissingFilesError: it is absent.
      CorruptFileError: it is not JSON, or not an object.
    """
    if not path.is_file():
        raise MissingFilesError(path.parent, [path.name])
    return parse_object(path, path.read_bytes(), "content", hook)


def parse_object(path: Path, text: bytes, what: str, hook: PairsHook | None) -> dict[str, Any]:
    """Returns the object that JSON text holds; ``what`` and ``path`` name it in the error, see `read_json`."""
    try:
        parsed = json.loads(text, object_pairs_hook=hook)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(path, f"{what} is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise CorruptFileError(path, f"{what} is JSON but not an object")
    return parsed


def to_json(value: Any) -> Any:
    """Returns a record as what JSON knows: dataclasses are objects, tuples are arrays.

    Raises:
      TypeError: something in it is neither a dataclass, a tuple, a number, a string, a bool nor None.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"to_json: {type(value).__name__} has no JSON form here: {value!r}")


def from_json(cls: type[T], data: Any) -> T:
    """Returns the record of type ``cls`` that `to_json` wrote.

    Args:
      cls: a dataclass, or any annotation that `to_json` can write.
      data: what the JSON parser gave.

    Raises:
      ValueError: a field is unknown, absent without a default, or of another type.
    """
    return _read(cls, data, cls.__name__)


def _read(hint: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _read_record(hint, data, where)
    if origin in (Union, types.UnionType):
        return _read_union(args, data, where)
    if origin is Literal:
        if data in args:
            return data
    elif origin is tuple:
        if isinstance(data, list):
            hints = args[:1] * len(data) if args[1:] == (...,) else args
            if len(hints) == len(data):
                return tuple(
                    _read(h, item, f"{where}[{i}]")
                    for i, (h, item) in enumerate(zip(hints, data, strict=True))
                )
    elif hint is float and type(data) is int:
        return float(data)
    elif (hint is type(None) and data is None) or type(data) is hint:
        return data
    raise ValueError(f"{where}: got {data!r}, expected {hint}")


def _read_record(cls: Any, data: Any, where: str) -> Any:
    hints, fields = typing.get_type_hints(cls), {f.name for f in dataclasses.fields(cls)}
    if not isinstance(data, dict) or not data.keys() <= fields:
        raise ValueError(f"{where}: got {data!r}, expected an object with fields among {sorted(fields)}")
    try:
        return cls(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in data.items()})
    except TypeError as error:  # a field is absent
        raise ValueError(f"{where}: {error}") from error


def _read_union(hints: tuple[Any, ...], data: Any, where: str) -> Any:
    # The exact type first: an int stays an int where both int and float are allowed.
    for hint in sorted(hints, key=lambda hint: type(data) is not hint):
        try:
            return _read(hint, data, where)
        except ValueError:
            continue
    raise ValueError(f"{where}: got {data!r}, expected one of {hints}")
