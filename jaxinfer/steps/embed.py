"""What a prompt's hidden states come down to: the last one, and their sum, from which the host makes the mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.arrays.sharding import from_last
from jaxinfer.steps.steps import PrefillRows


def embed_prompt(x: jax.Array, rows: PrefillRows) -> jax.Array:
    """Returns the last live vector of each chunk and the sum over its live positions.

    A sum and not a mean, for a prompt may come in several chunks.

    Args:
      x: ``[b, T, D]`` of `Ahead`, the normed stream, which the last stage has. rows: the chunks that it came from.

    Returns:
      ``[b, 2, D]`` float32: last, sum. The sum of a padding row is zero, and its last vector means nothing.
    """
    length = rows.packed[:, 2]
    x = x.astype(jnp.float32)
    live = jnp.arange(x.shape[1]) < length[:, None]
    last = jnp.take_along_axis(x, jnp.maximum(length - 1, 0)[:, None, None], axis=1)[:, 0]
    # Chosen, not multiplied by 0: what stands at a padded position may be NaN.
    both = jnp.stack([last, jnp.where(live[:, :, None], x, 0).sum(1)], 1)
    return from_last(both, "layers")
