"""ChainedRows: rows of several passes, each of which takes its tokens from the pass before it.

All passes are launched before the host reads any result (`ChainedPasses` in core.ops.base). Each
row is one token of a request, and its logits choose the next token.
"""

from __future__ import annotations

from array import array
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..interface.sampling import SamplingMetadata
from .batch import IntArray

# Number of fields of pass_inputs.c's ``ft_chained_row``, and the indices of some.
NUM_FIELDS, REQUEST, POSITION, OUTPUT_POSITION = 8, 0, 3, 7


class ChainedRows:
    """Records of the rows of all passes, and the requests that they follow.

    The page tables are copied, because another thread may append to a request's own table
    meanwhile.
    """

    def __init__(self) -> None:
        self.records: list[int] = []  # the fields of ``ft_chained_row``, row after row
        self.counts: list[int] = []  # number of rows of each pass
        self.num_best: list[int] = []  # number of tokens that each pass chooses after a row
        self.tail_counts: list[int] = []  # number of tail slots of each pass
        self._num_tails = 0  # number of tail slots of all passes that have ended
        self.tails = array("q")  # slots of the rows' tails, row after row (`Segment.tail`)
        self.page_ids = array("q")  # page tables, request after request
        self.num_pages: list[int] = []  # number of pages of each request
        self.samplings: list[SamplingMetadata] = []  # sampling parameters of each request

    def add_request(self, page_ids: array[int], sampling: SamplingMetadata) -> None:
        """Add a request, whose index is the number of requests before it."""
        self.page_ids.extend(page_ids)
        self.num_pages.append(len(page_ids))
        self.samplings.append(sampling)

    def end_pass(self, num_rows: int, num_best: int) -> None:
        """End a pass, whose ``num_rows`` rows are the last ones.

        ``num_best``: number of tokens to choose after each row; above 1 they have scores.
        """
        self.counts.append(num_rows)
        self.num_best.append(num_best)
        self.tail_counts.append(len(self.tails) - self._num_tails)
        self._num_tails = len(self.tails)

    @property
    def first_pages(self) -> IntArray:
        """Index of each request's first page in ``page_ids``, and the number of all pages."""
        return np.fromiter(accumulate(self.num_pages, initial=0), np.int64)

    @property
    def table(self) -> NDArray[np.int64]:
        """The records of the rows, [number of rows, `NUM_FIELDS`]."""
        return np.array(self.records, np.int64).reshape(-1, NUM_FIELDS)
