"""KVPool: keys and values of every layer, indexed by page."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """One tensor ``[num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]``.

    A page is one contiguous blob over all layers: the unit of ownership, copying and transfer.
    Content is void until written; who owns which page is the prefix cache's business.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages = num_pages
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.dtype = dtype
        # Zeros come from fresh memory that the system maps on first touch: void pages cost nothing.
        self.data: Tensor = torch.zeros(
            (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim),
            dtype=dtype,
            device=device,
        )

    def copy_page(self, source: int, target: int) -> None:
        """One page's content, over all layers, into another."""
        self.data[target].copy_(self.data[source])

    @property
    def num_bytes(self) -> int:
        """Size of the pool in bytes."""
        return self.data.nbytes


def bytes_per_page(
    *, num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * num_layers * num_kv_heads * page_size * head_dim * dtype.itemsize
