"""RowTable: the requests of a step as records, from which C lays out their rows.

A request is one record of integers here; as segments of `core.ops.batch` it would be several
objects. Requests with `RowExtras` cannot be in a `RowTable`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class RowTable:
    """Records of the requests of a step, and their lists of numbers, request after request.

    The lists are copied: another thread may append to a request's own list meanwhile, which moves
    its memory.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        # The fields of rows.c's ``ft_requested``, request after request. Each is an int64 in the
        # end; a list grows faster than an array.
        self.records: list[int] = []
        self.token_ids = array("q")  # [num_rows] pending tokens, then the nodes of the draft
        self.page_ids = array("q")
        self.spare_page_ids = array("q")
        self.parents = array("q")  # parents of the nodes of drafts that are trees
        self.num_requests = self.num_logits = self.num_segments = 0
        # Upper bounds of the number of tail slots and of the number of pages, over all segments.
        self.max_tails = self.max_pages = 0

    def add(
        self,
        pending: Sequence[int],
        start: int,
        num_logits: int,
        page_ids: array[int],
        draft: Sequence[int] = (),
    ) -> None:
        """Add a request: ``pending`` tokens from position ``start`` on, then a linear ``draft``.

        ``page_ids``: its page table, which may be longer than needed. ``num_logits``: number of
        last rows whose logits are computed.
        """
        num_pending, num_drafted = len(pending), len(draft)
        num_pages = -(-(start + num_pending + num_drafted) // self.page_size)
        pages = page_ids[:num_pages]
        num_pages = len(pages)
        self.records += (start, num_pending, num_drafted, num_logits, num_pages, 0, 0)
        self.token_ids.extend(pending)
        if num_drafted:
            self.token_ids.extend(draft)
        self.page_ids.extend(pages)
        self.max_pages += num_pages
        self.num_requests += 1
        self.num_logits += num_logits
        self.num_segments += 1

    def add_tree(
        self,
        pending: Sequence[int],
        start: int,
        num_logits: int,
        page_ids: array[int],
        draft: Sequence[int],
        parents: Sequence[int],
        runs: Sequence[tuple[int, int]],
        spare_page_ids: array[int],
    ) -> None:
        """Add a request whose draft is a tree; `Draft` defines ``parents`` and ``runs``.

        The KV of nodes that are not in the trunk goes to the slots of ``spare_page_ids``, in order.
        """
        num_pending, num_drafted, trunk_len = len(pending), len(draft), runs[0][1]
        num_pages = -(-(start + num_pending + trunk_len) // self.page_size)
        num_spare = len(spare_page_ids)
        pages = page_ids[:num_pages]
        num_pages = len(pages)
        self.records += (start, num_pending, num_drafted, num_logits, num_pages, num_spare, 1)
        self.token_ids.extend(pending)
        self.token_ids.extend(draft)
        self.page_ids.extend(pages)
        self.spare_page_ids.extend(spare_page_ids)
        self.parents.extend(parents)
        self.max_pages += num_pages * len(runs)
        self.num_requests += 1
        self.num_logits += num_logits
        self.num_segments += len(runs)
        self.max_tails += num_drafted * (len(runs) - 1)

    @property
    def num_rows(self) -> int:
        """Number of rows of all requests."""
        return len(self.token_ids)
