"""Precision as an argument: one record names the number format of every role."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxinfer.arrays.specs import FLOAT32_ROLES, Role

FORMATS: dict[str, jnp.dtype] = {
    "float32": jnp.dtype(jnp.float32),
    "bfloat16": jnp.dtype(jnp.bfloat16),
    "float16": jnp.dtype(jnp.float16),
}
ALIASES = {
    "fp32": "float32",
    "f32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
}


@dataclass(frozen=True)
class Policy:
    """Number formats by role; every name is a key of `FORMATS`.

    Attributes:
      weights: matrices, embedding and head as they lie in memory.
      kv: pages of the KV cache.
      compute: activations between matmuls and the operands of matmuls.
    Sums inside matmuls, norms, softmax, rope angles, router, logits and sampling are always float32.
    """

    weights: str = "float32"
    kv: str = "float32"
    compute: str = "float32"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Returns the policy that a string names.

        Args:
          text: a format for all roles (``bfloat16``, ``bf16``), or ``weights=bfloat16,kv=float16,compute=bfloat16``
            where a role left out takes the format of ``compute``.

        Raises:
          ValueError: an unknown role or format, with the ones that exist.
        """
        roles = tuple(cls.__dataclass_fields__)
        if "=" not in text:
            name = _format(text, "policy")
            return cls(name, name, name)
        given: dict[str, str] = {}
        for part in text.split(","):
            role, _, value = (piece.strip() for piece in part.partition("="))
            if role not in roles or role in given:
                problem = "named twice" if role in given else "unknown"
                raise ValueError(f"policy {text!r}: role {role!r} is {problem}; roles: {', '.join(roles)}")
            given[role] = _format(value, role)
        base = given.get("compute", given.get("weights", "float32"))
        return replace(cls(base, base, base), **given)

    def dtype_of(self, role: Role) -> jnp.dtype:
        """Returns the dtype in which a parameter of ``role`` lies in memory."""
        return FORMATS["float32"] if role in FLOAT32_ROLES else FORMATS[self.weights]

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations."""
        return FORMATS[self.compute]

    @property
    def kv_dtype(self) -> jnp.dtype:
        """The dtype of KV pages."""
        return FORMATS[self.kv]

    def __str__(self) -> str:
        if self.weights == self.kv == self.compute:
            return self.weights
        return f"weights={self.weights},kv={self.kv},compute={self.compute}"


def _format(text: str, what: str) -> str:
    name = ALIASES.get(text.strip().lower(), text.strip().lower())
    if name not in FORMATS:
        raise ValueError(
            f"{what}: unknown format {text!r}; formats: {', '.join(FORMATS)} (short: {', '.join(ALIASES)})"
        )
    return name
