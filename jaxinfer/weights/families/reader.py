"""A configuration read so that no key goes unnoticed, and what can be wrong with one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxinfer.weights.errors import CheckpointError


class ConfigError(CheckpointError):
    """A configuration cannot be served; the message names the keys and what to do."""


class UnknownConfigKeyError(ConfigError):
    """Keys are neither handled nor known to be harmless.

    Attributes:
      keys: all of them, sorted.
    """

    def __init__(self, where: str, keys: Iterable[str]) -> None:
        self.keys = tuple(sorted(keys))
        super().__init__(
            f"{where}: unknown key(s) {', '.join(self.keys)}; a key that is not understood may change what the model "
            "computes, so it is refused. Remove it if it has no effect; else the family must learn it"
        )


class MissingConfigKeyError(ConfigError):
    """A key that the family needs is absent or null."""

    def __init__(self, where: str, key: str) -> None:
        self.key = key
        super().__init__(f"{where}: {key} is absent, and this family has no default for it; add it")


class ConfigValueError(ConfigError):
    """A key is understood, but not with this value."""

    def __init__(self, where: str, key: str, got: Any, allowed: str) -> None:
        self.key = key
        super().__init__(f"{where}: {key} is {got!r}; supported: {allowed}")


class ConfigReader:
    """A configuration that remembers which of its keys were read.

    A null counts as absent, but for `given`. Whoever reads a configuration ends with `finish`, which refuses the
    keys that nobody asked for.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        *,
        defaults: Mapping[str, Any] | None = None,
        harmless: Collection[str] = (),
        prefix: str = "",
    ) -> None:
        """Args: the values; their place for messages; the family's defaults; keys without effect; a key prefix."""
        self.values = values
        self.where = where
        self.prefix = prefix
        self.defaults = dict(defaults or {})
        self._seen = {prefix + key for key in harmless}

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value, else the family's default, else ``default``."""
        self._seen.add(self.prefix + key)
        value = self.values.get(self.prefix + key)
        return self.defaults.get(key, default) if value is None else value

    def given(self, key: str, default: Any) -> Any:
        """Returns a value whose null means off: ``default`` only where the key is absent."""
        self._seen.add(self.prefix + key)
        return self.values.get(self.prefix + key, default)

    def need(self, key: str) -> Any:
        """Returns a value or the family's default.

        Raises:
          MissingConfigKeyError: there is neither.
        """
        value = self.get(key)
        if value is None:
            raise MissingConfigKeyError(self.where, self.prefix + key)
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Refuses a value outside ``allowed``; absent or null is fine.

        Raises:
          ConfigValueError: the value is another one.
        """
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.refuse(key, value, " or ".join(map(repr, allowed)) or "null")

    def choose(self, key: str, choices: Mapping[str, Any]) -> Any:
        """Returns what ``choices`` has for a needed value.

        Raises:
          ConfigValueError: the value is not among them.
        """
        value = self.need(key)
        if value not in choices:
            raise self.refuse(key, value, ", ".join(sorted(choices)))
        return choices[value]

    def section(self, key: str, *, harmless: Collection[str] = ()) -> ConfigReader:
        """Returns a reader of the mapping below ``key``, empty where the key is absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.refuse(key, value, "a mapping or null")
        return ConfigReader(value, f"{self.where}: {self.prefix}{key}", harmless=harmless)

    def refuse(self, key: str, got: Any, allowed: str) -> ConfigValueError:
        """Returns the error that says which values of ``key`` would work."""
        return ConfigValueError(self.where, self.prefix + key, got, allowed)

    def finish(self) -> None:
        """Refuses keys (below the prefix) that were never read.

        Raises:
          UnknownConfigKeyError: lists all of them.
        """
        unknown = [key for key in self.values if key.startswith(self.prefix) and key not in self._seen]
        if unknown:
            raise UnknownConfigKeyError(self.where, unknown)
