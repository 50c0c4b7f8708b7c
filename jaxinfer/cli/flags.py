"""The one door to absl: a command's flags, their parsing and their help."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal

from absl import flags

from jaxinfer.weights.fetch import DEFAULT_MODEL

Kind = Literal["text", "texts", "switch", "integer", "number"]
_DEFINE: dict[Kind, Callable[..., Any]] = {
    "text": flags.DEFINE_string,
    "texts": flags.DEFINE_multi_string,
    "switch": flags.DEFINE_bool,
    "integer": flags.DEFINE_integer,
    "number": flags.DEFINE_float,
}


class UsageError(Exception):
    """A command line that cannot be meant; the message says what to write."""


class CommandFlags:
    """The flags of one command, apart from absl's global ones; read a value with ``flags["name"]``.

    Args:
      command: its name. about: what it does, a line. examples: command lines to copy.
    """

    def __init__(self, command: str, about: str, examples: Sequence[str]) -> None:
        self._command, self._about, self._examples = command, about, examples
        self._values = flags.FlagValues()
        self._values.set_gnu_getopt(True)
        self._metavars: dict[str, str] = {}
        self._helps: dict[str, str] = {}

    def __getitem__(self, name: str) -> Any:
        return self._values[name].value

    def __contains__(self, name: str) -> bool:
        return name in self._helps

    def add(self, name: str, metavar: str, about: str, kind: Kind = "text", **options: Any) -> None:
        """Adds a flag.

        Args:
          name: without dashes. metavar: what stands for its value in help. about: its line of help.
          kind: what its value is; ``texts`` may be repeated. options: of absl, such as ``lower_bound``.
        """
        define = _DEFINE[kind]
        default = {"texts": [], "switch": False}.get(kind)
        # A flag that is given twice is an error, since one of the two would be ignored.
        once = {} if kind == "texts" else {"allow_overwrite": False}
        define(name, default, about, flag_values=self._values, **once, **options)
        self._metavars[name] = "" if kind == "switch" else f" {metavar}"
        self._helps[name] = about

    def add_model(self) -> None:
        """Adds the flags that name a model and its number formats."""
        about = f"registered model, local folder or file, or hf:org/name[@revision] (default {DEFAULT_MODEL})"
        self.add("model", "NAME", about)
        self.add(
            "policy", "FORMAT", "number formats, such as float32 or bfloat16 (default what suits the device)"
        )

    def add_hosts(self) -> None:
        """Adds the flags of a run over several devices, and over several hosts."""
        about = "devices that share the work, such as tensor=4,data=2; the same as run.mesh"
        self.add("mesh", "AXIS=N,...", about)
        about = "processes of the run, one a host; Slurm and Cloud TPU tell this and the next two"
        self.add("num_processes", "N", about, "integer", lower_bound=1)
        about = "which of them this is, from 0, which schedules"
        self.add("process_id", "I", about, "integer", lower_bound=0)
        self.add("coordinator", "HOST:PORT", "where process 0 is, and a port that is free there")

    def add_bundle(self) -> None:
        """Adds the flag that names a bundle to run from."""
        about = "run from what jaxinfer compile --bundle wrote, and compile nothing; the same as run.bundle"
        self.add("bundle", "DIR", about)

    def add_settings(self) -> None:
        """Adds the flags that reach every setting."""
        self.add("config", "FILE.toml", "settings in sections; configs/ holds some to start from")
        self.add("set", "SECTION.KEY=VALUE", "one such setting; may be repeated", "texts")

    def parse(self, args: Sequence[str]) -> bool:
        """Reads a command line.

        Returns:
          False when help was asked for, and printed.

        Raises:
          UsageError: an unknown flag, a bad value, a flag given twice, or an argument that is no flag.
        """
        if {"--help", "-h", "-help"} & set(args):
            print(self.help())
            return False
        try:
            rest = self._values([self._command, *args])[1:]
        except flags.UnrecognizedFlagError as error:
            raise UsageError(self._unknown(error.flagname)) from None
        except (flags.Error, ValueError) as error:
            raise UsageError(str(error).replace("\n", " ")) from None
        if rest:
            raise UsageError(f"{rest[0]!r} belongs to no flag; quote a value that holds spaces")
        return True

    def help(self) -> str:
        """Returns the command's own flags (none of absl's), fitted to the terminal."""
        lines = [f"jaxinfer {self._command}: {self._about}", ""]
        lines += [f"  jaxinfer {self._command} {example}" for example in self._examples]
        names = [f"  --{name}{metavar}" for name, metavar in self._metavars.items()]
        indent = max(map(len, names)) + 2
        width = max(shutil.get_terminal_size().columns, indent + 40)
        lines += ["", "flags:"]
        for left, name in zip(names, self._metavars, strict=True):
            about = textwrap.wrap(self._helps[name], width - indent)
            lines.append(f"{left:<{indent}}" + f"\n{'':<{indent}}".join(about))
        return "\n".join(lines)

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name.replace("-", "_"), self._helps, n=3)
        hint = (
            f"did you mean --{' or --'.join(close)}?" if close else f"there are --{', --'.join(self._helps)}"
        )
        return f"no flag --{name}; {hint}" + (
            "; settings go by --set SECTION.KEY=VALUE" if "set" in self._helps else ""
        )
