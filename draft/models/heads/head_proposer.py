"""HeadProposer: what proposers with a trained head share.

A head's KV lies under the same page ids as the target's, in a pool of its own. It is written from
the target's hidden states, for the positions that were committed: a draft's own columns are void by
then, wherever they were, so nothing is ever rolled back. The KV of a position depends on tokens up
to that position alone, hence a prefix hit brings it along. Positions wait until a page is whole, or
until a draft reads them: while nothing is drafted, a step costs a copy of its hidden states.

A page whose positions all have head KV carries a ready mark. Where head KV is missing (a proposer
that failed, a page that came without it) drafts see only what lies behind the hole. The target
computes nothing for a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....core.errors import is_out_of_memory
from ....core.execution.proposer import VerifiedRequest
from ....core.interface.draft import NO_DRAFT, Draft, DraftPlan
from ....core.interface.plan import ScheduledRequest
from ....core.interface.protocols import ProposerTraits
from ....core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ....core.ops.batch import ForwardOutput, RaggedBatch, Taps
from ....core.ops.kv_pool import KVPool
from ....core.sampling.sampler import Columns, Sampler
from ..tree_growth import (
    ROOT,
    GapModel,
    TreeGrowth,
    choose,
    default_gap_models,
    frontiers,
    sample_rows,
)
from .head_layers import KeysValues, TapConfig

IntArray: TypeAlias = NDArray[np.int64]
MOST_COPIED = 256 * 2**20  # bytes: the copy of head KV that requests draft from together
REGROWTH = 1 / 64  # of a limit lowered by lack of memory, for each draft that filled it and fitted
TRIED_PRICE = 1e-9  # of a row where passes are timed: tokens are raced for, none is too dear


@dataclass(slots=True)
class HeadKV:
    """The positions of one request that have head KV: ``start`` to ``stop``, and those of pages
    before that are ready. Some behind ``stop`` may wait to be written.
    """

    start: int = 0
    stop: int = 0
    feature: Tensor | None = None  # [hidden] of position ``stop - 1``, for heads that want it
    waiting: list[Tensor] = field(default_factory=list)  # taps of the positions from ``stop`` on
    waiting_ids: list[int] = field(default_factory=list)  # their tokens

    @property
    def reached(self) -> int:
        """Behind the last position that has head KV or waits for it."""
        return self.stop + len(self.waiting_ids)


class Written(NamedTuple):
    """Positions that the target has computed, over all requests of a step."""

    taps: Tensor  # [num, num_taps * target_hidden]
    token_ids: Tensor  # [num]
    positions: Tensor  # [num]
    firsts: IntArray  # [num_requests] where the positions of each begin
    before: Sequence[Tensor | None]  # [num_requests] the feature of the position before; or None


class DraftStart(NamedTuple):
    """Where a draft begins: behind the last of the request's tokens."""

    scheduled: ScheduledRequest
    first: int  # the first position whose head KV it may see, and that of all behind
    feature: Tensor | None  # [hidden] of the position before the last token; or None


def features_of(starts: Sequence[DraftStart]) -> Tensor:
    """``[b, hidden]``."""
    known = [start.feature for start in starts if start.feature is not None]
    assert len(known) == len(starts)
    return torch.stack(known)


class Anchors(NamedTuple):
    """The last tokens of the requests that draft, and the head KV that they see."""

    token_ids: Tensor  # [b]
    positions: Tensor  # [b]
    context: list[KeysValues]  # of each layer, [b, num_kv_heads, T, head_dim] each
    seen: Tensor  # bool [b, T]


class Place(NamedTuple):
    """A token behind which a head predicts: the anchor, or a draft token."""

    request: int
    level: int  # draft tokens up to it, itself included
    parent: int  # its place in the call before, one level up; -1 for an anchor
    token_id: int
    slots: Sequence[
        int
    ] = ()  # of the columns of the draft tokens up to it, if they lie in the pool


class Drafting(ABC):
    """The drafts of some requests, level by level."""

    @abstractmethod
    def logits(self, places: Sequence[Place]) -> Tensor:
        """Of what follows each place, [len(places), draft_vocab].

        All are of one level, one deeper than those of the call before; in the order of requests,
        of which there are never more than before.
        """


class HeadProposer(ABC):
    """Follows the target's KV and grows trees, or chains.

    ``independent``: drafts for rejection sampling, drawn with noise of their own.
    """

    source: str  # its name as a source of drafts
    first = 0  # the first position that has a column

    def __init__(
        self, config: TapConfig, pool: KVPool, sampler: Sampler, *, independent: bool = False
    ) -> None:
        self.config, self.pool = config, pool
        self._sampler, self._independent = sampler, independent
        self._ready = np.zeros(pool.num_pages, dtype=np.bool_)
        self._head_kvs: dict[str, HeadKV] = {}
        self._trees: dict[str, TreeGrowth] = {}  # of the step under way, by request
        self._page_bytes = pool.data[0].nbytes
        self._most_copied: float = MOST_COPIED  # less once memory ran out
        self._odds = default_gap_models()  # by whether tokens are sampled
        self._taps: Taps = tuple(dict.fromkeys(config.taps))
        self.dtype, self.device = pool.dtype, pool.data.device
        self._order = [self._taps.index(boundary) for boundary in config.taps]

    def begin_with(self, odds: Mapping[bool, tuple[float, float, float]]) -> None:
        """Odds that were fitted before, by whether tokens are sampled; they are learnt on from."""
        self._odds |= {is_sampled: GapModel(*numbers) for is_sampled, numbers in odds.items()}

    @property
    def taps(self) -> Taps:
        """The boundaries that the head reads, each once."""
        return self._taps

    @property
    def traits(self) -> ProposerTraits:
        """How it works; a draft for rejection sampling has all its tokens, whatever they cost."""
        return ProposerTraits(
            tokens_per_pass=self.tokens_per_pass,
            catches_up=False,  # its KV is written from the target's own passes
            weighs=not self._independent,
        )

    # -- what heads do --------------------------------------------------------------------------

    @property
    @abstractmethod
    def tokens_per_pass(self) -> int:
        """Tokens of a draft that one pass of the head yields."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of a draft at most."""

    @property
    def reads_in_place(self) -> bool:
        """Whether kernels read head KV where it lies; else a draft copies what it sees."""
        return False

    @property
    def keeps_columns(self) -> bool:
        """Whether the columns of draft tokens lie in the pool until the step is verified."""
        return False

    @abstractmethod
    def columns(self, written: Written) -> tuple[list[KeysValues], Tensor | None]:
        """Keys and values [num, num_kv_heads, head_dim] of each layer, and features [num, hidden].

        A column whose feature before is unknown is void.
        """

    @abstractmethod
    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """Draft up to ``num_drafted`` tokens behind the last token of each request."""

    # -- the target's steps ---------------------------------------------------------------------

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Forget requests that released their pages; pages that were allocated are void."""
        for request_id in request_ids:
            self._head_kvs.pop(request_id, None)
        if newly_allocated_pages:
            self._ready[np.asarray(newly_allocated_pages)] = False

    @torch.inference_mode()
    def observe(
        self, batch: RaggedBatch, output: ForwardOutput, verified: Sequence[VerifiedRequest]
    ) -> None:
        """Judge the trees; write the head KV of what was committed."""
        del batch
        for each in verified:
            tree = (
                self._trees.pop(each.scheduled.request_id, None)
                if each.scheduled.draft_plan.max_draft
                else None
            )
            if tree is not None and each.output.error is None:
                tree.judge(each.output.token_ids)
        assert output.taps is not None
        live = [each for each in verified if self._is_live(each)]
        if not live:
            return
        at = [scheduled for each in live for scheduled in each.batch_rows]
        device, counts = output.taps.device, [len(each.batch_rows) for each in live]
        taps = self._ordered(output.taps.index_select(0, torch.tensor(at, device=device)))
        for each, part in zip(live, torch.split(taps, counts), strict=True):
            head_kv = self._reached(each.scheduled)
            head_kv.waiting.append(part)
            head_kv.waiting_ids += _token_ids(each)
        self._write_waiting([each.scheduled for each in live if self._ends_page(each.scheduled)])
        for each in live:  # a part is a view of the whole step's taps
            waiting = self._head_kvs[each.scheduled.request_id].waiting
            if waiting:
                waiting[-1] = waiting[-1].clone()

    def _ends_page(self, scheduled: ScheduledRequest) -> bool:
        """Whether positions that wait end a page, which others may find once it is released."""
        head_kv = self._head_kvs[scheduled.request_id]
        return head_kv.reached // self.pool.page_size > head_kv.stop // self.pool.page_size

    def _write_waiting(self, requests: Sequence[ScheduledRequest]) -> None:
        """Write the head KV of the positions of requests that wait for it; there are some."""
        if not requests:
            return
        head_kvs, device = (
            [self._head_kvs[scheduled.request_id] for scheduled in requests],
            self.device,
        )
        counts = np.array([len(head_kv.waiting_ids) for head_kv in head_kvs])
        firsts = np.cumsum(counts) - counts
        owners = np.repeat(np.arange(len(requests)), counts)
        starts = np.array([head_kv.stop for head_kv in head_kvs])
        positions = np.arange(len(owners)) + (starts - firsts)[owners]
        written = Written(
            torch.cat([part for head_kv in head_kvs for part in head_kv.waiting]),
            torch.tensor([i for head_kv in head_kvs for i in head_kv.waiting_ids], device=device),
            torch.from_numpy(positions).to(device),
            firsts,
            [head_kv.feature for head_kv in head_kvs],
        )
        page_size = self.pool.page_size
        at_pages = zip(owners.tolist(), (positions // page_size).tolist(), strict=True)
        pages = np.array([requests[owner].page_ids[page] for owner, page in at_pages])
        features = self._write_context(written, pages * page_size + positions % page_size, counts)
        for scheduled, head_kv, start, num in zip(requests, head_kvs, firsts, counts, strict=True):
            mine = None if features is None else features[start : start + num]
            self._advance(scheduled, head_kv, int(num), mine)
            head_kv.waiting, head_kv.waiting_ids = [], []

    def _is_live(self, verified: VerifiedRequest) -> bool:
        """Whether a request was committed, to pages that are still the request's.

        A step launched ahead may end behind the one in which its request did: then its pages may
        have gone to others, and the request has been forgotten. The dummy request of a health
        check has no id, and would never be forgotten.
        """
        scheduled = verified.scheduled
        is_known = len(scheduled.tokens) >= scheduled.stop
        return (
            bool(verified.batch_rows and scheduled.request_id)
            and is_known
            and not (scheduled.is_ahead and scheduled.request_id not in self._head_kvs)
        )

    def _reached(self, scheduled: ScheduledRequest) -> HeadKV:
        """The head KV of a request whose positions from ``start`` on were committed."""
        head_kv = self._head_kvs.get(scheduled.request_id)
        if head_kv is None or head_kv.reached != scheduled.start:
            head_kv = HeadKV(scheduled.start, scheduled.start, self._feature_before(scheduled))
            self._head_kvs[scheduled.request_id] = head_kv
        return head_kv

    def _feature_before(self, scheduled: ScheduledRequest) -> Tensor | None:
        """The feature of the position before the first one, if a ready page ends there."""
        page, rest = divmod(scheduled.start, self.pool.page_size)
        if rest or not page or not self._ready[scheduled.page_ids[page - 1]]:
            return None
        return self.page_feature(scheduled.page_ids[page - 1])

    @abstractmethod
    def page_feature(self, page_id: int) -> Tensor | None:
        """The feature of a ready page's last position, for heads that want it."""

    @abstractmethod
    def keep_page_feature(self, page_id: int, feature: Tensor) -> None:
        """Keep the feature of a page's last position."""

    def _advance(
        self, scheduled: ScheduledRequest, head_kv: HeadKV, count: int, features: Tensor | None
    ) -> None:
        """Columns of a request were written: mark the pages that became whole."""
        begin, page_size = head_kv.stop, self.pool.page_size
        if features is not None and head_kv.feature is None and head_kv.start == begin:
            head_kv.start = begin + 1  # the first column lacks its feature
        head_kv.stop = begin + count
        for page in range(begin // page_size, head_kv.stop // page_size):
            if max(page * page_size, self.first) >= head_kv.start:
                self._ready[scheduled.page_ids[page]] = True
            if features is not None:
                last = (page + 1) * page_size - 1
                self.keep_page_feature(scheduled.page_ids[page], features[last - begin])
        if features is not None:
            head_kv.feature = features[-1].clone()

    def _ordered(self, taps: Tensor) -> Tensor:
        """Taps in the order of the head's, which may name one twice."""
        if self._order == list(range(len(self._taps))):
            return taps
        parts = taps.chunk(len(self._taps), dim=-1)
        return torch.cat([parts[index] for index in self._order], dim=-1)

    # -- the pool -------------------------------------------------------------------------------

    def _write_context(self, written: Written, slots: IntArray, lens: IntArray) -> Tensor | None:
        """Compute and write the columns of positions [n] to ``slots`` [n]; returns their features.

        ``lens`` [num_requests]: positions of each request.
        """
        del lens
        columns, features = self.columns(written)
        self._write(columns, *np.divmod(slots, self.pool.page_size))
        return features

    def _write(self, columns: list[KeysValues], pages: IntArray, places: IntArray) -> None:
        data = self.pool.data
        at, where = (torch.from_numpy(each).to(data.device) for each in (pages, places))
        for layer, pair in enumerate(columns):
            for kind, values in enumerate(pair):
                data[:, layer, kind][at, :, where] = values.to(data.dtype)

    def _read(
        self, requests: Sequence[ScheduledRequest], firsts: Sequence[int]
    ) -> tuple[list[KeysValues], Tensor]:
        """The KV of each request from ``firsts`` to its last token; and which of it are seen."""
        page_size, data = self.pool.page_size, self.pool.data
        stops = np.array([len(scheduled.tokens) - 1 for scheduled in requests])
        counts = [self._num_pages_seen(scheduled) for scheduled in requests]
        num_pages = max(1, *counts)
        table = np.zeros((len(requests), num_pages), dtype=np.int64)
        for row, scheduled, num_seen in zip(table, requests, counts, strict=True):
            row[:num_seen] = scheduled.page_ids[:num_seen]
        places = np.arange(num_pages * page_size)
        seen = torch.from_numpy((places >= np.array(firsts)[:, None]) & (places < stops[:, None]))
        seen = seen.to(data.device)
        ids = torch.from_numpy(table).to(data.device)
        void = ~seen[:, None, :, None]
        context: list[KeysValues] = []
        for layer in range(self.pool.num_layers):
            # [b, pages, 2, kv, page_size, dim] -> [2, b, kv, positions, dim]
            found = data[:, layer][ids].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            # a copy by now: what is not seen may be NaN, and NaN times weight 0 would be NaN
            keys, values = found.masked_fill_(void, 0.0).unbind()
            context.append((keys, values))
        return context, seen

    def _num_pages_seen(self, scheduled: ScheduledRequest) -> int:
        """Pages of the positions before the request's last token."""
        return -(-(len(scheduled.tokens) - 1) // self.pool.page_size)

    def _first_seen(self, scheduled: ScheduledRequest, head_kv: HeadKV) -> int:
        """The lowest position from which on all head KV is there."""
        page_size = self.pool.page_size
        num_whole = (len(scheduled.tokens) - 1) // page_size
        if head_kv.start > num_whole * page_size:
            return head_kv.start
        missing = np.flatnonzero(~self._ready[np.asarray(scheduled.page_ids[:num_whole], np.int64)])
        return max(self.first, (int(missing[-1]) + 1) * page_size if len(missing) else 0)

    def try_draft(self, num_requests: int, num_tokens: int) -> None:
        """Compute what the first tokens of so many drafts cost, over void head KV; to be timed."""
        count = max(1, min(num_tokens // self.pool.page_size, self.pool.num_pages))
        pages = array("q", range(count))
        tokens = array("q", [0] * (count * self.pool.page_size))
        sampling = SamplingMetadata(
            params=TokenSamplingParams(temperature=1.0), seed=0, prompt_len=1
        )
        scheduled = ScheduledRequest(
            request_id="", tokens=tokens, start=0, stop=0, page_ids=pages, sampling=sampling,
            draft_plan=DraftPlan(max_draft=self.tokens_per_pass, row_price=TRIED_PRICE),
        )  # fmt: skip
        feature = torch.zeros(self.config.hidden_size, dtype=self.dtype, device=self.device)
        self._grow_all([DraftStart(scheduled, self.first, feature)] * num_requests)

    # -- drafts ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """A tree for each request that has head KV, with the verifier's noise.

        If memory runs out, that is raised, and later drafts copy half as much head KV at a time.
        """
        self._trees = {}  # those of a step that failed are void
        self._write_waiting([scheduled for scheduled in requests if self._waits(scheduled)])
        starts = [start for start in map(self._start, requests) if start is not None]
        if starts:
            self._trees = {tree.scheduled.request_id: tree for tree in self._grow_all(starts)}
        found = [self._trees.get(scheduled.request_id) for scheduled in requests]
        return [NO_DRAFT if tree is None else tree.draft() for tree in found]

    def _waits(self, scheduled: ScheduledRequest) -> bool:
        head_kv = self._head_kvs.get(scheduled.request_id)
        return head_kv is not None and bool(head_kv.waiting_ids)

    def _start(self, scheduled: ScheduledRequest) -> DraftStart | None:
        """Where the request's draft begins; None where the head lacks what it reads."""
        head_kv = self._head_kvs.get(scheduled.request_id)
        if head_kv is None or head_kv.stop < len(scheduled.tokens) - 1:
            return None
        return DraftStart(scheduled, self._first_seen(scheduled, head_kv), head_kv.feature)

    def _grow_all(self, starts: Sequence[DraftStart]) -> list[TreeGrowth]:
        """Grow the trees of some requests, one group after another; in the order of the groups.

        Whether another pass pays is decided for each group: each has passes of its own.
        """
        groups = self._groups(starts)
        try:
            trees = [tree for group in groups for tree in self._grow(group)]
        except Exception as failure:
            if is_out_of_memory(failure):
                self._most_copied = max(self._page_bytes, self._most_copied / 2)
            raise
        if len(groups) > 1:
            self._most_copied = min(MOST_COPIED, self._most_copied * (1 + REGROWTH))
        return trees

    def _groups(self, starts: Sequence[DraftStart]) -> list[list[DraftStart]]:
        """Split requests by length, so that the copy of head KV for each group is within the limit.

        The copy has as many pages for each request as for the longest one of its group. A request
        whose own copy exceeds the limit is alone.
        """
        if self.reads_in_place:
            return [list(starts)]
        groups: list[list[DraftStart]] = [[]]
        for start in sorted(starts, key=lambda start: len(start.scheduled.tokens)):
            num_pages = (len(groups[-1]) + 1) * max(1, self._num_pages_seen(start.scheduled))
            if groups[-1] and num_pages * self._page_bytes > self._most_copied:
                groups.append([])
            groups[-1].append(start)
        return groups

    @torch.inference_mode()
    def _grow(self, starts: Sequence[DraftStart]) -> list[TreeGrowth]:
        trees = [self._tree(start.scheduled) for start in starts]
        num_drafted = min(
            self.longest, max(start.scheduled.draft_plan.max_draft for start in starts)
        )
        drafting = self.begin(starts, num_drafted)
        nodes, before = [[ROOT] for _ in trees], dict[tuple[int, int], int]()
        for level in count():
            opened = [(index, node) for index, each in enumerate(nodes) for node in each]
            if not opened:
                break
            places = [self._place(trees[index], index, node, before) for index, node in opened]
            self._expand([(trees[i], n) for i, n in opened], drafting.logits(places))
            before = {each: at for at, each in enumerate(opened)}
            nodes = self._next_level(trees, level + 1)
        return trees

    def anchors(self, starts: Sequence[DraftStart]) -> Anchors:
        """The last tokens of requests, and a copy of the head KV that they see."""
        requests = [start.scheduled for start in starts]
        context, seen = self._read(requests, [start.first for start in starts])
        return Anchors(
            torch.tensor([scheduled.tokens[-1] for scheduled in requests], device=self.device),
            torch.tensor([len(scheduled.tokens) - 1 for scheduled in requests], device=self.device),
            context,
            seen,
        )

    def _tree(self, scheduled: ScheduledRequest) -> TreeGrowth:
        odds = self._odds[scheduled.sampling.params.temperature > 0.0]
        page_size = self.pool.page_size if self.keeps_columns else 0
        return TreeGrowth(scheduled, odds, self.source, page_size, most_levels=self.longest)

    def _place(
        self, tree: TreeGrowth, request: int, node: int, before: dict[tuple[int, int], int]
    ) -> Place:
        if node == ROOT:
            return Place(request, 0, -1, tree.scheduled.tokens[-1])
        found = tree.nodes[node]
        parent = before[request, found.parent]
        return Place(request, found.level, parent, found.token_id, tree.path_slots(node))

    def _expand(self, places: Sequence[tuple[TreeGrowth, int]], logits: Tensor) -> None:
        found = choose(
            places, logits, sample_rows(places), self._sampler,
            independent=self._independent, columns=self._columns,
        )  # fmt: skip
        for (tree, node), best in zip(places, found, strict=True):
            tree.expand(node, best)

    def _next_level(self, trees: Sequence[TreeGrowth], level: int) -> list[list[int]]:
        """The nodes of each tree that are worth expanding, a pass if they take one."""
        takes_pass = level % self.tokens_per_pass == 0
        found = frontiers(trees, level, takes_pass=takes_pass)
        return [tree.open(nodes) for tree, nodes in zip(trees, found, strict=True)]

    @cached_property
    def _columns(self) -> Columns | None:
        """The tokens that the head can draft, where it cannot draft all."""
        ids = self.draft_ids
        return None if ids is None else Columns(ids, self.config.vocab_size)

    @property
    def draft_ids(self) -> Tensor | None:
        """The target's ids of the head's, [draft_vocab]; None if they are the same."""
        return None


def _token_ids(verified: VerifiedRequest) -> Sequence[int]:
    """Of the committed positions: pending tokens, then accepted ones."""
    scheduled = verified.scheduled
    pending = scheduled.tokens[scheduled.start : scheduled.stop]
    num_accepted = len(verified.batch_rows) - len(pending)
    return [*pending, *verified.output.token_ids[:num_accepted]]
