"""``foretoken bench phases``: prefill, decode, batches, cache and drafts beside the roofline."""

from .command import main

__all__ = ["main"]
