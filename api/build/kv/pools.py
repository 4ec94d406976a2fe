"""KV pools of the target and its draft model, with the same number of pages.

A target with recurrent layers also has a pool of states, which shares the memory of the KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ....core.config import EngineConfig, Sizes, format_size
from ....core.errors import InvalidRequest, ModelLoadError, is_out_of_memory
from ....core.model.decoder import Decoder
from ....core.ops.kv_pool import KVPool
from ....core.ops.machine.device import free_memory
from ....core.ops.state_pool import STATE_PAGE_SIZES, StatePool, bytes_per_log, bytes_per_slot
from ....core.options.settings import parse_size
from ....core.startup import timed
from ....draft.proposers.kind import Pooled

HOST_KV_BYTES = 2 * 2**30
LEAST_TOKENS = 256  # minimum size of a default pool in tokens, which ordinary requests need
# Memory to leave free on a GPU: 2 GiB for steps, their graphs and logits, and for the target and
# its draft model each 256 MiB for attention's partial results and 128 MiB for the logits of small
# graphs.
WORKSPACE_BYTES = 11 * 2**28


@timed("KV pools")
def make_pools(
    target: Decoder, drafts: Sequence[Pooled], config: EngineConfig, sizes: Sizes
) -> list[KVPool]:
    """Return a pool for the target and one for each draft model, with the same page ids.

    All pools have the same data type. Raises `InvalidRequest` for a size that is too small, and
    `ModelLoadError` if memory is insufficient.
    """
    counts = count_states(target, config, sizes) if target.states else None
    num_state_bytes = 0 if counts is None else counts.num_bytes
    num_pages = count_pages(target, drafts, config, sizes, num_state_bytes)
    with out_of_memory_hint(f"allocating {num_pages} KV pages", "lower --kv-memory or --kv-tokens"):
        states = None if counts is None else _make_states(target, counts, sizes)
        return [
            target.make_pool(
                num_pages,
                page_size=sizes.page_size,
                kv_dtype=config.kv_cache_dtype,
                states=states,
            ),
            *(
                model.make_pool(
                    num_pages, page_size=sizes.page_size, kv_dtype=config.kv_cache_dtype
                )
                for model in drafts
            ),
        ]


class StateCounts(NamedTuple):
    """The size of a pool of recurrent states."""

    num_slots: int
    num_logs: int
    num_bytes: int


def count_states(target: Decoder, config: EngineConfig, sizes: Sizes) -> StateCounts:
    """Return how many slots and logs fit into ``state_memory``, by default half the KV memory.

    Each running request needs a log and a slot. The other slots are for cached states; there are at
    most as many of them as pages that can be in use at once. Raises the errors of `make_pools`.
    """
    page_size = sizes.page_size
    if page_size not in STATE_PAGE_SIZES:
        *others, last = map(str, STATE_PAGE_SIZES)
        known = f"{', '.join(others)} or {last}"
        message = f"page_size must be {known} for a model with recurrent states, not {page_size}"
        raise InvalidRequest(message, param="page_size")
    slot = bytes_per_slot(target.states, target.dtype)
    log = bytes_per_log(target.states, target.dtype, page_size=page_size)
    memory = (
        _kv_budget(target, config) // 2
        if config.state_memory is None
        else parse_size(config.state_memory)
    )
    if memory < 2 * slot + log:
        message = (
            f"state_memory must be at least {2 * slot + log} bytes (2 x {format_size(slot)} for "
            f"recurrent states, {format_size(log)} for a running request)"
        )
        raise InvalidRequest(message, param="state_memory")
    num_logs, num_slots = sizes.max_running, (memory - sizes.max_running * log) // slot
    if num_slots < num_logs + 2:
        num_slots = max(2, (memory + 2 * log) // (slot + log))
        num_logs = max(1, num_slots - 2)
    useful = _useful_pages(target, config, sizes)
    if config.state_memory is None:
        page = target.bytes_per_page(page_size=page_size, kv_dtype=config.kv_cache_dtype)
        shared = _kv_budget(target, config) - num_logs * log
        useful = max(1, min(useful, shared // (page + slot)))
    num_slots = min(num_slots, num_logs + useful)
    return StateCounts(num_slots, num_logs, num_slots * slot + num_logs * log)


def _make_states(target: Decoder, counts: StateCounts, sizes: Sizes) -> StatePool:
    num_slots, num_logs, _ = counts
    return target.make_state_pool(num_slots, num_logs, page_size=sizes.page_size)


def count_pages(
    target: Decoder,
    drafts: Sequence[Pooled],
    config: EngineConfig,
    sizes: Sizes,
    num_state_bytes: int = 0,
) -> int:
    """Return the number of pages per pool for which all pools fit the budget.

    ``num_state_bytes``: size of the recurrent states, which is subtracted from the budget unless
    ``state_memory`` is set. Raises the errors of `make_pools`.
    """
    per_page = sum(
        model.bytes_per_page(page_size=sizes.page_size, kv_dtype=config.kv_cache_dtype)
        for model in (target, *drafts)
    )
    if config.kv_tokens is not None:
        num_pages = -(-config.kv_tokens // sizes.page_size)
    elif config.kv_memory is not None:
        shared = num_state_bytes if config.state_memory is None else 0
        num_pages = (parse_size(config.kv_memory) - shared) // per_page
    else:
        return _default_pages(target, config, sizes, per_page, num_state_bytes)
    if num_pages < 1:
        message = f"kv_memory must be at least {per_page} bytes, the size of one KV page"
        raise InvalidRequest(message, param="kv_memory")
    if target.device.type == "cpu":
        _check_free(num_pages * per_page + num_state_bytes, free_memory(target.device))
    return num_pages


def _check_free(num_bytes: int, free: int) -> None:
    """Raise `ModelLoadError` for a pool that is larger than the free memory of the host.

    The system overcommits memory and would kill the process once the pool fills.
    """
    if num_bytes > free:
        raise ModelLoadError(
            f"a KV pool of {format_size(num_bytes)} is larger than the free memory of this machine "
            f"or container, {format_size(free)}: lower --kv-memory or --kv-tokens"
        )


def _kv_budget(target: Decoder, config: EngineConfig) -> int:
    """Return the size of the memory for KV and recurrent states together, in bytes."""
    if config.kv_memory is not None:
        return parse_size(config.kv_memory)
    return default_budget(target.device)


def _useful_pages(target: Decoder, config: EngineConfig, sizes: Sizes) -> int:
    """Return the number of pages that can be in use at the same time."""
    return sizes.max_running * -(-model_len(config, target) // sizes.page_size)


def _default_pages(
    target: Decoder, config: EngineConfig, sizes: Sizes, per_page: int, num_state_bytes: int
) -> int:
    """Return the default number of pages.

    It is limited by the default budget, and by the number of pages that can be in use at once.
    Raises `ModelLoadError` if the budget is too small.
    """
    useful = _useful_pages(target, config, sizes)
    budget = max(0, default_budget(target.device) - num_state_bytes)
    num_pages = min(useful, budget // per_page)
    least = min(useful, -(-LEAST_TOKENS // sizes.page_size))
    if num_pages < least:
        raise ModelLoadError(
            f"not enough memory: the default KV pool has {format_size(budget)}, but "
            f"{least * sizes.page_size} tokens need {format_size(least * per_page)}; free memory "
            "or set --kv-memory"
        )
    return num_pages


def default_budget(device: torch.device) -> int:
    """Return the default size of all pools together, in bytes.

    On the host, it is a quarter of the free memory, but at most 2 GiB. On a GPU, it is the free
    memory minus a tenth or minus the memory for steps (at most a half), whichever is smaller.
    """
    free = free_memory(device)
    if device.type == "cpu":
        return min(HOST_KV_BYTES, free // 4)
    return free - max(free // 10, min(WORKSPACE_BYTES, free // 2))


def model_len(config: EngineConfig, target: Decoder) -> int:
    """Return the context length in tokens. Raises `InvalidRequest` above the model's maximum."""
    longest = target.config.max_model_len
    if config.max_model_len is not None and config.max_model_len > longest:
        message = f"max_model_len {config.max_model_len} exceeds the model's {longest}"
        raise InvalidRequest(message, param="max_model_len")
    return config.max_model_len or longest


@contextmanager
def out_of_memory_hint(when: str, remedy: str) -> Iterator[None]:
    """Convert out-of-memory errors in the block to a `ModelLoadError` with a remedy."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(f"out of memory {when}: {remedy}") from error
