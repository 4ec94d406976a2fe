"""``foretoken bench phases``: prefill, decode, batches, cache and drafts against the roofline."""

from .command import main

__all__ = ["main"]
