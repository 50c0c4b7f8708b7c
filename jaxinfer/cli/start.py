"""From settings to a model that is ready, and to sampling settings; shared by the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import say
from jaxinfer.cli.settings import Settings, read_settings
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.weights.fetch import DEFAULT_MODEL

if TYPE_CHECKING:
    from jaxinfer.engine.hosts import Hosts
    from jaxinfer.llm import LLM
    from jaxinfer.weights.model import Model

MAX_TOKENS = 256  # of `generate`, unless told otherwise
# Shapes are powers of two between these, so that a run finds what an earlier one compiled and kept.
_CHUNKS = (32, 512)
_LEAST_LEN = 512


def settings_of(flags: CommandFlags) -> Settings:
    """Returns what the configuration file, `--set` and the flags choose, the later over the earlier.

    What they leave open of a run is its bundle's, where they name one.
    """
    settings = read_settings(flags["config"], flags["set"])
    names = ("model", "policy", "mesh", "bundle")
    named = [name for name in names if name in flags and flags[name] is not None]
    settings.run.update({name: flags[name] for name in named})
    if bundle := settings.run.get("bundle"):
        from jaxinfer.steps.bundle import read_manifest  # jax takes a second to import

        settings.run.update({**read_manifest(Path(bundle).expanduser())["run"], **settings.run})
    return settings


def run_on_hosts(flags: CommandFlags, lead: Callable[[Hosts | None], int]) -> int:
    """Runs a command here, or, as one of several processes, together with them.

    Args:
      flags: with those of `CommandFlags.add_hosts`. lead: the command, given the processes, None where this one is
        alone; only process 0 calls it, and the others do what its engine does.

    Returns:
      The exit code.

    Raises:
      ValueError: of `find_place`, and of `build_engine` in any process.
    """
    from jaxinfer.engine.cluster import find_place
    from jaxinfer.engine.hosts import join

    try:
        place = find_place(flags["num_processes"], flags["process_id"], flags["coordinator"])
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    if place is None:
        return lead(None)
    with join(place) as hosts:
        say(f"process {place.index} of {place.count}, coordinator {place.coordinator}")
        if hosts.leads:
            return lead(hosts)
        from jaxinfer.build import follow

        follow(hosts, say)
        return 0


def read_text(path: str | None) -> str:
    """Returns a text from a file, or from standard input.

    Raises:
      UsageError: no path, and a person at standard input. ValueError: it is not UTF-8.
    """
    if path is None and sys.stdin.isatty():
        raise UsageError("give --text, or pipe a text in")
    data = sys.stdin.buffer.read() if path is None else Path(path).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path or 'standard input'}: not UTF-8 at byte {error.start}") from None


def tell_unused(names: Sequence[str]) -> None:
    """Says which settings have no effect on what runs: a file of them may serve several commands."""
    if names:
        say(f"without effect here: {', '.join(names)}")


def unseen_fields(settings: Settings) -> list[str]:
    """Returns the sampling fields that ask for what plain text does not show."""
    return [f"sampling.{name}" for name in ("logprobs", "prompt_logprobs") if name in settings.sampling]


def params_of(given: dict[str, Any]) -> SamplingParams:
    """Returns sampling settings with the command line's own default for the number of tokens."""
    counted: dict[str, Any] = {"max_tokens": MAX_TOKENS, **given}
    return SamplingParams(**counted)


def open_model_of(settings: Settings) -> Model:
    """Opens the model that settings name: its tokenizer is there before anything is compiled."""
    from jaxinfer.weights.model import (
        open_model,
    )  # jax takes a second to import; a wrong flag need not wait for it

    return open_model(settings.run.get("model", DEFAULT_MODEL))


def settle_temperature(params: SamplingParams, model: Model) -> SamplingParams:
    """Returns settings for text that a person reads: the likeliest token where nobody asks for a draw.

    vLLM's 1 makes small models ramble; 0 is what transformers takes for a checkpoint that names none. Several choices
    can only be drawn.
    """
    named = params.explicit | dict(model.defaults.sampling).keys()
    if params.n > 1 or not named.isdisjoint(("temperature", "do_sample", "top_k", "top_p", "min_p")):
        return params
    say("temperature 0, for neither the command line nor the model asks for a draw")
    return params.replace(temperature=0.0)


def fit_run(model: Model, num_prompt: int, params: SamplingParams) -> dict[str, Any]:
    """Returns the run of one request: as little to compile as it needs, so that it starts soon.

    Args:
      model: its context is the most, its defaults fill ``params``. num_prompt: tokens of the prompt.
      params: of the request.
    """
    max_tokens = params.max_tokens
    chunk = min(max(power_of_two(num_prompt), _CHUNKS[0]), _CHUNKS[1])
    wanted = model.cfg.max_len if max_tokens is None else num_prompt + max_tokens
    max_len = min(max(power_of_two(wanted), _LEAST_LEN), model.cfg.max_len)
    return {
        "max_num_seqs": params.n,
        "enable_prefix_caching": params.n > 1,  # one request has nobody to share with
        "prefill_buckets": ((1, chunk),),
        "max_model_len": max_len,
        "draws": draws_of(model, params),
    }


def draws_of(model: Model, params: SamplingParams) -> tuple[str, ...]:
    """Returns what requests with these settings, filled by the model's defaults, ask of the device."""
    return params.with_defaults(model.defaults.sampling).draws


def open_llm(settings: Settings, model: Model | None = None, **fitted: Any) -> LLM:
    """Loads and compiles.

    Args:
      settings: the user's. model: opened already. fitted: choices for this use, where the user made none.
    """
    from jaxinfer.llm import LLM

    fitted = {} if settings.run.get("bundle") else fitted  # a bundle is of one run
    return LLM(say=say, **{**fitted, **settings.run, "model": model or open_model_of(settings)})


def power_of_two(count: int) -> int:
    """Returns the least one that holds a count."""
    return 1 << max(count - 1, 0).bit_length()
