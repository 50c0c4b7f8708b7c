"""Two distributions over the next token, position by position: how far apart they are, as pure functions."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Comparison(NamedTuple):
    """What a model makes of a text beside a reference; each ``[M]`` float32, a position each.

    Attributes:
      nll: negative log-probability of the token that follows, in nats.
      kl: ``KL(reference || model)`` in nats.
      agree: 1 where both find the same token likeliest.
    """

    nll: jax.Array
    kl: jax.Array
    agree: jax.Array


def compare_logits(logits: jax.Array, reference: jax.Array, targets: jax.Array) -> Comparison:
    """Compares a model's logits with a reference's.

    Args:
      logits: ``[M, V]`` float32 of the model. reference: likewise, of the reference.
      targets: ``[M]`` ids that follow.
    """
    q, p = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    nll = -jnp.take_along_axis(q, targets[:, None], 1)[:, 0]
    # A logit of -inf on both sides (an id that neither can say) adds nothing.
    kl = jnp.where(p == -jnp.inf, 0, jnp.exp(p) * (p - q)).sum(-1)
    return Comparison(nll, kl, (logits.argmax(-1) == reference.argmax(-1)).astype(jnp.float32))
