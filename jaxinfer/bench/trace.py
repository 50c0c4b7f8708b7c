"""A load from a file: a request a line, as somebody recorded or wrote it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.bench.load import Arrivals, Lengths, Prompt, Shot

PROMPTS = ("prompt", "prompt_token_ids", "messages")
KEYS = (*PROMPTS, "max_tokens", "arrival")


def read_trace(path: str, output_len: Lengths, arrivals: Arrivals | None, seed: int) -> list[Shot]:
    """Reads a JSONL file.

    Each line has one of `PROMPTS`, and may have ``max_tokens`` and ``arrival`` (seconds after the start).

    Args:
      path: the file. output_len: of lines without ``max_tokens``.
      arrivals: None takes those of the file. seed: of what the file leaves open.

    Returns:
      The requests in the order of their arrival.

    Raises:
      ValueError: what is wrong, by line and field.
    """
    rng = random.Random(f"{seed}/trace")
    lines = [
        (number, line) for number, line in enumerate(Path(path).read_bytes().splitlines(), 1) if line.strip()
    ]
    if not lines:
        raise ValueError(f"{path}: holds no request")
    shots = [
        _read_line(f"{path}:{number}", i, line, output_len, rng) for i, (number, line) in enumerate(lines)
    ]
    if arrivals is not None:
        times = arrivals.draw(rng, len(shots))
    else:
        missing = [number for (number, _), shot in zip(lines, shots, strict=True) if shot.at is None]
        if missing:
            raise ValueError(f"{path}:{missing[0]}: arrival: missing; every line has one, or give --arrivals")
        times = [shot.at for shot in shots]
    order = sorted(range(len(shots)), key=lambda i: times[i] or 0.0)
    return [
        Shot(place, times[i], shots[i].prompt, shots[i].max_tokens, shots[i].num_prompt)
        for place, i in enumerate(order)
    ]


def has_arrivals(path: str) -> bool:
    """Tells whether the first request of a file says when it comes."""
    with open(path, "rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        return "arrival" in json.loads(first)
    except (ValueError, TypeError):
        return False  # `read_trace` says what is wrong


def _read_line(where: str, index: int, line: bytes, output_len: Lengths, rng: random.Random) -> Shot:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(
            f"{where}: got {type(fields).__name__}, expected an object with {' or '.join(PROMPTS)}"
        )
    if unknown := [key for key in fields if key not in KEYS]:
        raise ValueError(f"{where}: {unknown[0]}: no such field; there are {', '.join(KEYS)}")
    given = [key for key in PROMPTS if key in fields]
    if len(given) != 1:
        raise ValueError(
            f"{where}: got {' and '.join(given) or 'no prompt'}, expected one of {', '.join(PROMPTS)}"
        )
    prompt = _check_prompt(where, given[0], fields[given[0]])
    arrival = fields.get("arrival")
    if arrival is not None and not (_is_number(arrival) and 0 <= arrival < math.inf):
        raise ValueError(f"{where}: arrival: got {arrival!r}, must be seconds after the start, at least 0")
    max_tokens = fields.get("max_tokens")
    if max_tokens is None:
        max_tokens = output_len.draw(rng)
    elif not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ValueError(f"{where}: max_tokens: got {max_tokens!r}, must be a whole number of at least 1")
    num_prompt = len(prompt) if given == ["prompt_token_ids"] else None
    return Shot(index, None if arrival is None else float(arrival), prompt, max_tokens, num_prompt)


def _check_prompt(where: str, name: str, value: Any) -> Prompt:
    expected = {
        "prompt": ("a text", isinstance(value, str) and value != ""),
        "prompt_token_ids": (
            "a list of token ids",
            isinstance(value, list)
            and value != []
            and all(type(item) is int and item >= 0 for item in value),
        ),
        "messages": (
            "a list of objects with role and content",
            isinstance(value, list)
            and value != []
            and all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in value),
        ),
    }
    says, good = expected[name]
    if not good:
        raise ValueError(f"{where}: {name}: got {json.dumps(value)[:60]}, must be {says}, not empty")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
