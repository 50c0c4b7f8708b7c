"""What attention reads: the pages of one layer, and which of them are whose."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct


@struct.dataclass
class PagedKV:
    """Keys and values of one layer.

    Attributes:
      k, v: ``[l, P, Z, K*H]`` pages of a stack of l layers, stored as `arrays.pages` does for ``dtype``. Lanes that are
        not read may hold anything finite: a weight of 0 must give 0.
      layer: which of the l.
      dtype: of the numbers.
    """

    k: Any
    v: Any
    layer: Any
    dtype: jnp.dtype = struct.field(pytree_node=False)
