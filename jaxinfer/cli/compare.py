"""The part of `jaxinfer score` that measures several policies, one after the other in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.bench.quality import draw_quality, format_quality
from jaxinfer.cli.bench import PICTURES, check_outputs
from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import Progress, say
from jaxinfer.cli.settings import Settings
from jaxinfer.cli.start import open_model_of, tell_unused
from jaxinfer.text.windows import cut_windows

if TYPE_CHECKING:
    from jaxinfer.quality.measure import Quality
    from jaxinfer.weights.model import Model

CONTEXT = 2048  # tokens of a window at most
DECODE_ROWS = (1, 16)
_ALONE = ("reference", "reference_model", "without_speed", "output")  # flags that need --policies


def read_policies(flags: CommandFlags) -> list[str]:
    """Returns the policies to compare, in their order; none where the text is only scored.

    Raises:
      UsageError: an empty or repeated one, or flags that do not go together.
    """
    policies = [part.strip() for text in flags["policies"] for part in text.split(";")]
    if not policies:
        for name in _ALONE:
            if flags[name] not in (None, [], False):
                raise UsageError(f"--{name} compares policies: give --policies too")
        return []
    if flags["policy"] is not None:
        raise UsageError("--policy names one policy and --policies several: give one of the two")
    if "" in policies or len(set(policies)) < len(policies):
        raise UsageError(
            f"--policies: got {'; '.join(policies)!r}, each must be named once, with ; between them: "
            "--policies 'bfloat16; w8a8,kv8'"
        )
    check_outputs(flags["output"])
    return policies


def compare(flags: CommandFlags, settings: Settings, policies: Sequence[str], text: str) -> int:
    """Measures policies over a text, and writes the table (or JSON) to stdout and the rest where it is asked for.

    Args:
      flags: of the command. settings: the user's. policies: as the user wrote them. text: to read.

    Returns:
      The exit code.
    """
    tell_unused([name for name in settings.run if name not in ("model", "policy")])
    model = open_model_of(settings)
    source = model
    if flags["reference_model"] is not None:
        if flags["reference"] is None:
            raise UsageError("--reference_model needs --reference, the policy that it runs in")
        source = open_model_of(Settings(run={"model": flags["reference_model"]}))
    ids = model.tokenizer.encode(text)
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens, and the first has no score: give more")
    if source.tokenizer.encode(text) != ids:
        raise ValueError(f"--reference_model {source.name}: reads the text as other tokens than {model.name}")
    runs = [(model, policy) for policy in policies]
    first = (source, flags["reference"] or policies[0])
    runs = [first, *(run for run in runs if run != first)]
    rows = () if flags["without_speed"] else DECODE_ROWS
    found = _measure(runs, ids, rows)
    record = {"model": model.name, "tokens": len(ids), "policies": found}
    print(json.dumps(record) if flags["json"] else format_quality(found))
    for path in flags["output"]:
        if Path(path).suffix in PICTURES:
            draw_quality(found, path, f"{model.name}, {len(ids):,} tokens")
        else:
            Path(path).write_text(json.dumps(record) + "\n", encoding="utf-8")
        say(f"wrote {path}")
    return 0


def _measure(runs: Sequence[tuple[Model, str]], ids: list[int], rows: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the figures of each model and policy, the first being the reference."""
    from jaxinfer.build import choose_policy
    from jaxinfer.quality.measure import CHUNK, measure

    chosen = [(model, text, _choose(choose_policy, text, model)) for model, text in runs]
    found, reference = [], None
    length = min(CONTEXT, *(model.cfg.max_len for model, _ in runs))
    tokenizer = runs[0][0].tokenizer
    bos = ids[0] == tokenizer.bos_id
    windows = cut_windows(ids, length - bos, tokenizer.bos_id)
    chunks = sum(-(-len(window) // CHUNK) for window in windows)
    with Progress("scoring", chunks * len(runs), "chunk") as progress:
        for model, text, policy in chosen:
            say(f"{model.name}: {policy}")
            quality, own = measure(model, policy, windows, reference, rows, progress.advance)
            reference = reference or own
            found.append(_figures(text, model.name, quality, windows))
    return found


def _choose(choose: Any, text: str, model: Model) -> Any:
    """Returns a policy, held against the model before anything is run."""
    try:
        policy, _ = choose(text, model.policy)
        model.settle(policy)
    except ValueError as error:
        hint = "; several policies have ; between them" if "," in text else ""
        raise ValueError(f"--policies {text}: {error}{hint}") from None
    return policy


def _figures(text: str, name: str, quality: Quality, windows: Sequence[Sequence[int]]) -> dict[str, Any]:
    context = max(map(len, windows))
    return {
        "policy": text,
        "model": name,
        "formats": quality.policy,
        "weight_bytes": quality.weight_bytes,
        "kv_bytes_a_token": quality.kv_bytes,
        "bytes": sum(quality.weight_bytes.values()) + round(quality.kv_bytes * context),
        "perplexity": quality.perplexity,
        "kl": quality.kl,
        "top1": quality.agreement,
        "tokens_per_second": quality.speeds,
    }
