"""LmProposer: drafts with a smaller language model, using the noise that the verifier will use.

With the verifier's own Gumbel noise, draft and target choose the same token far more often than
with independent draws (Daliri, Musco, Suresh, arXiv 2408.07978).

The draft model's KV has its own pool with the *same page ids* as the target's pool, so a prefix hit
includes the draft KV. A page whose draft KV is complete has a ready mark. Missing KV is computed
only after a request's first token, so that it never delays the first token. One step computes the
missing KV of at most ``window`` tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...core.execution.proposer import VerifiedRequest
from ...core.interface.draft import Draft
from ...core.interface.plan import ScheduledRequest
from ...core.interface.protocols import ProposerTraits
from ...core.model.decoder import Decoder
from ...core.ops.batch import ForwardOutput, RaggedBatch, Segment, Taps
from ...core.ops.kv_pool import KVPool
from .kind import DrafterContext, LoadedDrafter, ProposerKind
from .text_proposer import TextProposer
from .tree_grower import DecoderProposer, Opened
from .tree_growth import ROOT, TreeGrowth

SOURCE = "lm"


@dataclass(slots=True)
class _DraftKV:
    """The part of a request whose draft KV is computed."""

    num_computed: int = 0  # number of leading tokens that have draft KV
    num_marked: int = 0  # number of leading pages that this request has marked ready


class LmProposer(DecoderProposer):
    """Drafts by running ``decoder`` on the request's tokens.

    ``window``: maximum number of tokens whose missing KV one step computes, over the whole batch.
    """

    source = SOURCE
    taps: Taps = ()
    traits = ProposerTraits(tokens_per_pass=1, catches_up=True, weighs=True)

    def __init__(self, decoder: Decoder, pool: KVPool, *, window: int = 256) -> None:
        super().__init__(decoder, pool)
        self._pool = pool
        self._window = window
        self._ready = bytearray(pool.num_pages)  # 1: every position of the page has draft KV
        self._draft_kvs: dict[str, _DraftKV] = {}

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Forget the KV of ended requests and the ready marks of newly allocated pages."""
        self._grower.forget(request_ids)
        for request_id in request_ids:
            self._draft_kvs.pop(request_id, None)
        for page_id in newly_allocated_pages:
            self._ready[page_id] = 0

    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """Compute missing KV within the window, then draft for requests with complete KV."""
        self._grower.begin()
        draft_kvs = [self._follow(scheduled) for scheduled in requests]
        trees = [self._grower.tree(scheduled) for scheduled in requests]
        self._grower.grow(trees, self._catch_up(draft_kvs, trees))
        owed = [self._owed(*each) for each in zip(draft_kvs, requests, strict=True)]
        return self._grower.drafts(trees, owed)

    def _owed(self, draft_kv: _DraftKV, scheduled: ScheduledRequest) -> int:
        """Return the number of tokens without draft KV.

        Returns 0 if the request is too long for the decoder's context, because then its draft KV is
        never computed.
        """
        has_room = self._grower.has_room(scheduled)
        return len(scheduled.tokens) - draft_kv.num_computed if has_room else 0

    def observe(
        self,
        batch: RaggedBatch,  # noqa: ARG002
        output: ForwardOutput,  # noqa: ARG002
        verified: Sequence[VerifiedRequest],
    ) -> None:
        """Learn from verified trees; move accepted nodes' KV to the slots of their positions."""
        moves: list[tuple[int, int]] = []
        for request_id, computed in self._grower.judge(verified):
            self._draft_kvs[request_id].num_computed += len(computed)
            moves += [(slot, home) for slot, home in computed if slot != home]
        if moves:
            self._pool.copy_slots(*zip(*moves, strict=True))

    # -- cursor ---------------------------------------------------------------------------------

    def _follow(self, scheduled: ScheduledRequest) -> _DraftKV:
        """Return the record of a request's draft KV, updated with the pages that are ready now."""
        draft_kv = self._draft_kvs.setdefault(scheduled.request_id, _DraftKV())
        self._skip_ready(scheduled, draft_kv)
        return draft_kv

    def _skip_ready(self, scheduled: ScheduledRequest, draft_kv: _DraftKV) -> None:
        """Count ready pages as computed, except for the last token, whose logits are needed."""
        page_size, last = self._pool.page_size, len(scheduled.tokens) - 1
        page = draft_kv.num_computed // page_size
        while (page + 1) * page_size <= last and self._ready[scheduled.page_ids[page]]:
            page += 1
            draft_kv.num_computed = max(draft_kv.num_computed, page * page_size)
        draft_kv.num_computed = min(draft_kv.num_computed, last)
        self._mark_ready(scheduled, draft_kv)

    def _mark_ready(self, scheduled: ScheduledRequest, draft_kv: _DraftKV) -> None:
        num_whole = draft_kv.num_computed // self._pool.page_size
        for page_id in scheduled.page_ids[draft_kv.num_marked : num_whole]:
            self._ready[page_id] = 1
        draft_kv.num_marked = max(draft_kv.num_marked, num_whole)

    # -- forward passes -------------------------------------------------------------------------

    def _catch_up(self, draft_kvs: Sequence[_DraftKV], trees: Sequence[TreeGrowth]) -> Opened:
        """Compute missing KV; return the first level of each tree whose KV is now complete."""
        stops = self._stops(draft_kvs, trees)
        if not stops:
            return Opened((), ())
        segments, whole = [], list[tuple[TreeGrowth, int]]()
        for index, stop in stops.items():
            scheduled, start = trees[index].scheduled, draft_kvs[index].num_computed
            is_whole = stop == len(scheduled.tokens)
            segments.append(
                Segment(scheduled.text_ids(start, stop), start, scheduled.page_ids, int(is_whole))
            )
            if is_whole:
                whole.append((trees[index], ROOT))
        opened = self._grower.run(segments, whole)
        # The counts change after the pass, because a pass that fails computes no KV.
        for index, stop in stops.items():
            draft_kvs[index].num_computed = stop
            self._mark_ready(trees[index].scheduled, draft_kvs[index])
        return opened

    def _stops(self, draft_kvs: Sequence[_DraftKV], trees: Sequence[TreeGrowth]) -> dict[int, int]:
        """Return the position up to which the missing KV of each request is computed in this step.

        The keys are indices of requests. Requests with the least missing KV come first, until the
        window of the step is used up.
        """
        room, stops = self._window + len(trees), {}
        owed = [
            len(t.scheduled.tokens) - draft_kv.num_computed
            for t, draft_kv in zip(trees, draft_kvs, strict=True)
        ]
        for index in sorted(range(len(trees)), key=owed.__getitem__):
            count = min(owed[index], room)
            if self._grower.has_room(trees[index].scheduled) and count > 0:
                stops[index] = draft_kvs[index].num_computed + count
                room -= count
        return stops


# -- loading --------------------------------------------------------------------------------------


def _is_model(found: Path) -> bool:  # noqa: ARG001
    """Whether a path may hold a draft model: any path that no other kind recognises."""
    return True


def _load(context: DrafterContext) -> LoadedDrafter:
    """Load a draft model.

    If its tokens differ from the target's, the two models exchange text (`TextProposer`).
    """
    assert context.found is not None
    decoder = context.load_decoder(context.found)
    texts = context.texts_between(context.found, decoder)
    if texts is None:
        return LoadedDrafter(partial(LmProposer, decoder), decoder)
    theirs, own = texts
    return LoadedDrafter(partial(TextProposer, decoder, target=theirs, own=own), decoder)


LM = ProposerKind(name=SOURCE, recognises=_is_model, load=_load)
