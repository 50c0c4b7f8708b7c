"""The command `jaxinfer`: finds the subcommand and turns what goes wrong into a line and an exit code."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

import jaxinfer
from jaxinfer.cli.flags import UsageError
from jaxinfer.weights.hub import FetchError

COMMANDS = {
    "generate": "complete a prompt, chat, or answer a file of requests",
    "score": "log-likelihood and perplexity of a text; number formats compared",
    "serve": "answer OpenAI's API over HTTP, with a page to chat and to watch",
    "bench": "measure endpoints, or an engine in this process, under load",
    "convert": "write a checkpoint that starts faster",
    "quantize": "write a checkpoint of 4-bit weights, calibrated on a text",
    "selfcheck": "whether these devices compute as they should, layer by layer",
    "compile": "what a model needs of TPUs or GPUs that are not here",
}
OK, FAILED, USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141  # the last two are the shell's 128 + signal
USER_ERRORS = (ValueError, FetchError, OSError)  # a checkpoint's, a request's and a setting's are ValueErrors


def run() -> NoReturn:
    """Runs the command line of this process and exits."""
    try:
        code = main(sys.argv[1:])
    except BaseException:
        if not _left_hosts():
            raise
        traceback.print_exc()
        code = FAILED
    if _left_hosts():
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _left_hosts() -> bool:
    """Returns whether an error parted this process from the others of its run, for which jax would wait at its end."""
    hosts = sys.modules.get("jaxinfer.engine.hosts")
    return hosts is not None and hosts.current_hosts() is not None


def main(args: Sequence[str]) -> int:
    """Runs one command.

    Args:
      args: the command line without the program's name.

    Returns:
      The exit code: 0, 1 for what failed, 2 for a wrong command line, 130 after Ctrl-C.
    """
    name = args[0] if args else ""
    try:
        code = _run_command(name, args[1:])
        sys.stdout.flush()
        return code
    except UsageError as error:
        _complain(name, f"{error}\nsee: jaxinfer {name + ' ' if name in COMMANDS else ''}--help")
        return USAGE
    except BrokenPipeError:
        # The reader went away (`| head`); Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except USER_ERRORS as error:
        _complain(name, _describe(error))
        return FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def _run_command(name: str, args: Sequence[str]) -> int:
    if name in ("--help", "-h", "help"):
        print(_overview())
        return OK
    if name == "--version":
        print(f"jaxinfer {jaxinfer.__version__}")
        return OK
    if not name:
        print(_overview(), file=sys.stderr)
        return USAGE
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(COMMANDS)}"
        raise UsageError(f"no command {name!r}; {hint}")
    return import_module(f"jaxinfer.cli.{name}").main(args)


def _overview() -> str:
    lines = [f"  {name:<10}{says}" for name, says in COMMANDS.items()]
    head = ["usage: jaxinfer COMMAND [flags]", "", "commands:"]
    return "\n".join([*head, *lines, "", "Its flags: jaxinfer COMMAND --help"])


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"  # without the number that Python puts before it
    return str(error) or type(error).__name__


def _complain(name: str, text: str) -> None:
    print(f"jaxinfer{' ' + name if name in COMMANDS else ''}: error: {text}", file=sys.stderr, flush=True)
