"""What attention reads: the pages of one layer, and which of them are whose."""

from __future__ import annotations

from typing import Any

from flax import struct

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import Slab


@struct.dataclass
class PagedKV:
    """Keys and values of one layer.

    Attributes:
      k, v: ``[l, P, Z, ..]`` pages of a stack of l layers, as `arrays.pages` lays a token's ``K*H`` numbers, or
        ``[l, P, rows, lanes]`` of `arrays.pages.value_slab`. Lanes that are not read may hold any codes of finite
        numbers: a weight of 0 must give 0.
      k_scale, v_scale: ``[l, P, Z, ..]`` their scales, or ``[l, P, rows, lanes]`` of `arrays.pages.scale_slab`; None
        where the format is plain.
      layer: which of the l.
      format: of the numbers.
      slab: what the shapes of ``k`` and ``v`` do not tell where these are slabs, else None.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    layer: Any
    format: Format = struct.field(pytree_node=False)
    slab: Slab | None = struct.field(pytree_node=False, default=None)

    @property
    def page_size(self) -> int:
        """Z, tokens a page."""
        return self.slab.page_size if self.slab else self.k.shape[2]

    def count_heads(self, head_dim: int) -> int:
        """Returns K, kv heads of ``head_dim`` numbers that lie in pages."""
        if self.slab:
            return self.slab.num_heads
        return self.k.shape[3] * self.k.dtype.itemsize * 8 // (self.format.bits * head_dim)
