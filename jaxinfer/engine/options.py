"""What a request may say beside its prompt and sampling, checked at the door."""

from __future__ import annotations

import math
from typing import TypedDict

from jaxinfer.schedule.request import Pooling, RequestRefused


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.submit` and its like.

    Attributes:
      request_id: a name that no live request has; made up when left out.
      priority: lower is more important: admitted first and preempted last.
      pooling: ask for the prompt's hidden state and no tokens, see `Handle.embedding`; without sampling settings.
      cache_salt: share cached beginnings only with requests of the same salt.
      timeout: seconds from now after which the request ends with ``timeout``, whatever it is doing.
    """

    request_id: str | None
    priority: int
    pooling: Pooling | None
    cache_salt: str | None
    timeout: float | None


def check_options(options: RequestOptions) -> None:
    """Checks what needs no engine to be checked.

    Raises:
      RequestRefused: with the name, what was got and what is allowed.
    """
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"no options {sorted(unknown)}; there are {', '.join(RequestOptions.__annotations__)}"
        )
    priority = options.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > 2**31:
        raise RequestRefused(f"priority: got {priority!r}, must be an integer of at most 32 bits")
    salt = options.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestRefused(f"cache_salt: got {salt!r}, must be a text that is not empty, or None")
    name = options.get("request_id")
    if name is not None and (not isinstance(name, str) or not name):
        raise RequestRefused(f"request_id: got {name!r}, must be a text that is not empty, or None")
    timeout = options.get("timeout")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise RequestRefused(f"timeout: got {timeout!r}, must be seconds above 0, or None")
