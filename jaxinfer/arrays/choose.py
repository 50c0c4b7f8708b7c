"""The number formats of a run that names none, and what is said of those that cost more than they save."""

from __future__ import annotations

from jaxinfer.arrays.backend import backend
from jaxinfer.arrays.precision import Policy
from jaxinfer.hardware import has_native_bfloat16


def choose_policy(text: str, converted: str | None = None) -> tuple[Policy, str]:
    """Returns the policy of a run and the reason for it in words.

    Args:
      text: as the user gave it; what it leaves open takes the 16- or 32-bit format that the machine multiplies.
      converted: the policy that a checkpoint of few bits was converted with, None for others.
    """
    if (name := backend()) != "cpu":
        base, why = "bfloat16", f"auto: {name} multiplies bfloat16"
    elif has_native_bfloat16():
        base, why = "bfloat16", "auto: this processor multiplies bfloat16"
    else:
        base, why = "float32", "auto: this processor has no bfloat16 multiply"
    if text != "auto":
        return Policy.parse(text, base), "asked for"
    if converted is not None:
        return Policy.parse(converted, base), "auto: what the checkpoint was converted with"
    return Policy.parse(base), why


def warn_of_widening(policy: Policy) -> list[str]:
    """Returns a line where a policy saves bytes but no time: XLA's CPU backend widens codes at every step."""
    if backend() != "cpu" or policy.weights.is_plain or policy.act != "compute":
        return []
    words = ", act=int8 multiplies them as they lie" if policy.weights.is_integer else ""
    return [f"a CPU widens {policy.weights} weights to {policy.compute} at every step{words}"]
