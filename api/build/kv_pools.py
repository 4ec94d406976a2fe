"""KV pools: the number of pages that fit, the same for the target and its draft model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ...core.config import EngineConfig, Sizes, format_size
from ...core.errors import InvalidRequest, ModelLoadError, is_out_of_memory
from ...core.interface.settings import parse_size
from ...core.model.decoder import Decoder
from ...core.ops.device import free_memory
from ...core.ops.kv_pool import KvDtype, KVPool

HOST_KV_BYTES = 2 * 2**30
LEAST_TOKENS = 256  # of a pool of the default size: a smaller one serves no usual request
# Of a GPU, beside the pools: 2 GiB for what steps, their graphs and logits take, and for the target
# and its draft model each 256 MiB for the sums of attention and 128 MiB for the logits that graphs
# of few rows keep.
WORKSPACE_BYTES = 11 * 2**28


class Pooled(Protocol):
    """A model with a KV pool: a decoder or a head."""

    def make_pool(self, num_pages: int, *, page_size: int, kv_dtype: KvDtype) -> KVPool:
        """Make a pool of its shape."""

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype) -> int:
        """Bytes of one page."""


def make_pools(
    target: Decoder, drafts: Sequence[Pooled], config: EngineConfig, sizes: Sizes
) -> list[KVPool]:
    """A pool for the target and each model that drafts: one page id is valid in all of them.

    All have the same data type. Raises `InvalidRequest` for a size that is too small, and
    `ModelLoadError` where there is not enough memory.
    """
    num_pages = count_pages(target, drafts, config, sizes)
    with out_of_memory_told(f"allocating {num_pages} KV pages", "lower --kv-memory or --kv-tokens"):
        return [
            model.make_pool(num_pages, page_size=sizes.page_size, kv_dtype=config.kv_cache_dtype)
            for model in (target, *drafts)
        ]


def count_pages(
    target: Decoder, drafts: Sequence[Pooled], config: EngineConfig, sizes: Sizes
) -> int:
    """Number of pages of each pool, so that all pools together fit the budget.

    Raises what `make_pools` raises.
    """
    per_page = sum(
        model.bytes_per_page(page_size=sizes.page_size, kv_dtype=config.kv_cache_dtype)
        for model in (target, *drafts)
    )
    if config.kv_tokens is not None:
        num_pages = -(-config.kv_tokens // sizes.page_size)
    elif config.kv_memory is not None:
        num_pages = parse_size(config.kv_memory) // per_page
    else:
        return _default_pages(target, config, sizes, per_page)
    if num_pages < 1:
        message = f"kv_memory must be at least {per_page} bytes, the size of one KV page"
        raise InvalidRequest(message, param="kv_memory")
    if target.device.type == "cpu":
        _check_free(num_pages * per_page, free_memory(target.device))
    return num_pages


def _check_free(num_bytes: int, free: int) -> None:
    """Raise `ModelLoadError` for a pool that is larger than the free memory of the host.

    The host grants memory that it does not have, and kills the process once the pool fills.
    """
    if num_bytes > free:
        raise ModelLoadError(
            f"a KV pool of {format_size(num_bytes)} is larger than the free memory of this machine "
            f"or container, {format_size(free)}: lower --kv-memory or --kv-tokens"
        )


def _default_pages(target: Decoder, config: EngineConfig, sizes: Sizes, per_page: int) -> int:
    """Number of pages by default: as many as the budget has, and no more than can be in use."""
    useful = sizes.max_running * -(-model_len(config, target) // sizes.page_size)
    budget = default_budget(target.device)
    num_pages = min(useful, budget // per_page)
    least = min(useful, -(-LEAST_TOKENS // sizes.page_size))
    if num_pages < least:
        raise ModelLoadError(
            f"memory is short: by default the KV pool has {format_size(budget)}, and "
            f"{least * sizes.page_size} tokens need {format_size(least * per_page)}; free memory, "
            "or set --kv-memory"
        )
    return num_pages


def default_budget(device: torch.device) -> int:
    """Default size of all pools in bytes, from the free memory.

    On a GPU nine tenths of it, less what steps need; on the host a quarter, 2 GiB at most.
    """
    free = free_memory(device)
    if device.type == "cpu":
        return min(HOST_KV_BYTES, free // 4)
    return free - max(free // 10, min(WORKSPACE_BYTES, free // 2))


def model_len(config: EngineConfig, target: Decoder) -> int:
    """Tokens of prompt and answer together. Raises `InvalidRequest` beyond the model's own."""
    longest = target.config.max_model_len
    if config.max_model_len is not None and config.max_model_len > longest:
        message = f"max_model_len {config.max_model_len} exceeds the model's {longest}"
        raise InvalidRequest(message, param="max_model_len")
    return config.max_model_len or longest


@contextmanager
def out_of_memory_told(when: str, remedy: str) -> Iterator[None]:
    """Turn out-of-memory errors in the block into a `ModelLoadError` with a remedy."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(f"out of memory {when}: {remedy}") from error
