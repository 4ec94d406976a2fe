"""The rows of a step as arrays, laid out in C from a `RowTable`.

`core.ops.batch.build_batch` defines the results. It is used for requests that a `RowTable` does not
support, and on machines without the C library.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from functools import cache

import numpy as np
import torch

from ..batch import DeviceTokens, RaggedBatch, padded_rows
from ..native.build import NativeBuildError, load_host
from ..native.declarations import STRUCTS, address_of, signatures
from .row_table import RowTable

logger = logging.getLogger(__name__)


@cache
def rows_library() -> ctypes.PyDLL | None:
    """Return the functions of kernels/host, or None if they cannot be built on this machine.

    Calls keep the GIL: they take microseconds, while reacquiring it from another thread may take
    milliseconds.
    """
    try:
        library = load_host()
    except (NativeBuildError, OSError) as error:
        logger.info("the rows of steps are laid out in Python: %s", error)
        return None
    for name, result, arguments in signatures():
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


def lay_out(
    rows: RowTable,
    library: ctypes.PyDLL,
    *,
    device: torch.device | str,
    min_rows: int,
    device_tokens: DeviceTokens | None = None,
) -> RaggedBatch:
    """Return the batch that `build_batch` makes of the same requests.

    Raises ValueError for rows without a page.
    """
    sizes = (rows.num_rows, rows.num_logits, rows.num_segments, rows.max_tails)
    num_rows, num_logits, num_segments, max_tails = sizes
    num_fixed = 2 * num_rows + num_logits + 5 * num_segments + max_tails
    numbers = np.empty(num_fixed + rows.max_pages, np.int64)
    at = address_of(numbers)
    records = array("q", rows.records)
    num_pages = library.ft_lay_out(
        STRUCTS.ft_requested.from_address(records.buffer_info()[0]), rows.num_requests,
        rows.page_size, rows.page_ids.buffer_info()[0], rows.spare_page_ids.buffer_info()[0],
        rows.parents.buffer_info()[0], at, *sizes,
    )  # fmt: skip
    if num_pages < 0:
        raise ValueError("a row of the step has no page")
    at_logits, at_segments = 2 * num_rows, 2 * num_rows + num_logits
    at_tails = num_fixed - max_tails
    starts, lens, first_rows, page_counts, tail_lens = numbers[at_segments:at_tails].reshape(5, -1)
    num_tails = int(tail_lens.sum()) if max_tails else 0
    return RaggedBatch(
        token_ids=padded_rows(np.frombuffer(rows.token_ids, np.int64), min_rows, device),
        positions=padded_rows(numbers[:num_rows], min_rows, device),
        slots=padded_rows(numbers[num_rows:at_logits], min_rows, device),
        logit_rows=padded_rows(numbers[at_logits:at_segments], min_rows, device),
        num_logits=num_logits,
        page_size=rows.page_size,
        starts=starts,
        lens=lens,
        first_rows=first_rows,
        page_counts=page_counts,
        pages=numbers[num_fixed : num_fixed + num_pages],
        tail_lens=tail_lens,
        tails=numbers[at_tails : at_tails + num_tails],
        device_tokens=device_tokens,
    )
