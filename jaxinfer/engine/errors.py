"""What goes wrong with the engine itself, not with a request."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The loop itself failed: requests in flight ended with ``error``, and the engine takes no more."""


class EngineDraining(EngineError):
    """The engine is about to end: what runs may finish, and nothing new is taken."""
