"""StepLayout: the rows and KV slots of a step's tokens, and the meaning of its logits.

A draft tree is verified without an ancestor mask. It is split into runs, in which every node is the
child of the node before it; each run is a segment. The trunk, which is the first run, follows the
pending tokens and takes the slots of its positions in the page table. The other runs take slots of
spare pages. The ``tail`` of such a segment lists the slots of its ancestors off the trunk and of
its own nodes. So every row attends to the keys of its own path, each at its absolute position, and
yields the same bits as plain decoding.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress

from torch import Tensor

from ..interface.draft import Draft
from ..interface.extras.branches import Branches
from ..interface.output import TokenLogprob
from ..interface.plan import PLAIN, ScheduledRequest
from ..interface.sampling import Pooling
from ..ops.batch import SamplingPlan, Segment
from ..ops.row_extras import RowExtras, SegmentState
from ..ops.rows.row_table import RowTable
from ..ops.rows.step_inputs import rows_library
from ..sampling.drafted_row import DraftedRow
from ..sampling.logprobs import token_logprobs
from ..sampling.sampler import Sampler
from .compared_answer import compare_answer
from .image_positions import image_positions, image_reaches

# -- slots and segments ----------------------------------------------------------------------------


def cut_to_spare_pages(draft: Draft, scheduled: ScheduledRequest, page_size: int) -> Draft:
    """Return the draft without the last nodes, for which the spare pages have no slots."""
    if not draft.parents:
        return draft
    num_spare = len(scheduled.spare_page_ids) * page_size
    return draft.first_nodes(draft.trunk_len + num_spare) if num_spare else draft.trunk()


def spare_slots(scheduled: ScheduledRequest, page_size: int) -> list[int]:
    """Return the slots of the spare pages, which hold the nodes off the trunk, in order."""
    return [
        page_id * page_size + offset
        for page_id in scheduled.spare_page_ids
        for offset in range(page_size)
    ]


def table_slots(scheduled: ScheduledRequest, first: int, count: int, page_size: int) -> list[int]:
    """Return the slots of the positions ``first`` to ``first + count`` of a request."""
    first -= scheduled.extras.num_packed_away
    return [
        scheduled.page_ids[place // page_size] * page_size + place % page_size
        for place in range(first, first + count)
    ]


def request_segments(
    scheduled: ScheduledRequest,
    tokens: array[int],
    draft: Draft,
    page_size: int,
    *,
    samples: bool,
) -> list[Segment]:
    """Return the segments of a request: its pending ``tokens`` with the trunk, then each other run.

    ``tokens`` is extended by the tokens of the trunk.
    """
    if scheduled.extras.branches is not None and scheduled.pools:
        return _branch_segments(scheduled, scheduled.extras.branches, page_size)
    runs = draft.runs
    shift = scheduled.extras.num_packed_away
    trunk_len = runs[0][1] if runs else 0
    tokens.extend(draft.token_ids[:trunk_len])
    segments = [
        Segment(
            tokens,
            scheduled.start - shift,
            scheduled.page_ids,
            num_logits(scheduled, trunk_len, samples=samples),
            extras=row_extras(scheduled, scheduled.start, len(tokens)),
        )
    ]
    if len(runs) > 1:
        slots = spare_slots(scheduled, page_size)
        segments += _runs_off_trunk(scheduled, draft, scheduled.stop, slots)
    return segments


def _branch_segments(
    scheduled: ScheduledRequest, branches: Branches, page_size: int
) -> list[Segment]:
    """Return the segments of the last chunk of a prompt with branches.

    The KV of each branch is in the slot of its index among the request's tokens.
    """
    tree, start = branches.tree(scheduled.tokens), scheduled.start
    trunk_stop = branches.first + tree.trunk_len
    first = Segment(
        scheduled.tokens[start:trunk_stop],
        start,
        scheduled.page_ids,
        num_logits=1 + tree.trunk_len,
        extras=row_extras(scheduled, start, trunk_stop - start),
    )
    slots = table_slots(scheduled, trunk_stop, scheduled.stop - trunk_stop, page_size)
    return [first, *_runs_off_trunk(scheduled, tree, branches.first, slots)]


def _runs_off_trunk(
    scheduled: ScheduledRequest, tree: Draft, begin: int, slots: list[int]
) -> list[Segment]:
    """Return a segment for each run of a tree after the trunk.

    ``begin``: position of the tree's first level. ``slots``: slots of the nodes off the trunk.
    """
    trunk_len, segments = tree.trunk_len, []
    for first, stop in tree.runs[1:]:
        path = tree.path(first)
        own = slots[first - trunk_len : stop - trunk_len]
        ancestors = [slots[node - trunk_len] for node in path[:-1] if node >= trunk_len]
        start = begin + len(path) - 1
        segments.append(
            Segment(
                token_ids=tree.token_ids[first:stop],
                start=start - scheduled.extras.num_packed_away,
                page_ids=scheduled.page_ids,
                num_logits=stop - first,
                tail=array("q", ancestors + own),
                extras=row_extras(scheduled, start, stop - first),
            )
        )
    return segments


def all_plain(requests: Sequence[ScheduledRequest]) -> bool:
    """Whether no request has extras."""
    return not [each for each in requests if each.extras is not PLAIN]  # faster than `any`


def add_rows(
    rows: RowTable,
    scheduled: ScheduledRequest,
    tokens: array[int],
    draft: Draft,
    num_logits: int,
) -> None:
    """Add the rows of a request without extras to ``rows``, laid out as by `request_segments`."""
    page_ids, runs = scheduled.page_ids, draft.runs
    if len(runs) > 1:
        spare = scheduled.spare_page_ids
        args = (draft.token_ids, draft.parents, runs, spare)
        rows.add_tree(tokens, scheduled.start, num_logits, page_ids, *args)
    else:
        rows.add(tokens, scheduled.start, num_logits, page_ids, draft.token_ids)


def row_extras(scheduled: ScheduledRequest, start: int, num_rows: int) -> RowExtras | None:
    """Return the extras of ``num_rows`` rows from position ``start`` on; None for a plain request.

    Rows from ``scheduled.stop`` on are drafts. The draft of a request with a recurrent state is a
    chain, so the state belongs to a single segment.
    """
    extras = scheduled.extras
    if extras is PLAIN:
        return None
    images, stop, state = extras.images, start + num_rows, None
    if (use := extras.state) is not None:
        state = SegmentState(use.slot, use.log, scheduled.stop, use.keeps)
    return RowExtras(
        state=state,
        adapter=extras.adapter,
        rope_positions=image_positions(images, start, stop),
        shift=extras.num_packed_away,
        reaches=image_reaches(images, start, stop),
    )


def request_copies(
    scheduled: ScheduledRequest, draft: Draft, path: Sequence[int], page_size: int
) -> list[tuple[int, int]]:
    """Return pairs (from, to) of slots that move the KV of accepted nodes to their positions.

    ``path``: the accepted nodes, the first level first. Nodes of the trunk need no copy.
    """
    if not draft.parents or not path or path[-1] == len(path) - 1:
        return []
    trunk_len, spare = draft.trunk_len, spare_slots(scheduled, page_size)
    targets = table_slots(scheduled, scheduled.stop, len(path), page_size)
    pairs = zip(path, targets, strict=True)
    return [(spare[node - trunk_len], slot) for node, slot in pairs if node >= trunk_len]


def num_logits(scheduled: ScheduledRequest, num_drafted: int, *, samples: bool) -> int:
    """Return how many of the request's last rows need logits, draft rows included.

    ``num_drafted``: number of draft rows. ``samples``: whether the request samples a token in this
    step.
    """
    pooling = scheduled.sampling.pooling
    if pooling is not None:
        if pooling.compares:
            return scheduled.num_pooled
        return len(pooling.rows) if scheduled.pools else 0
    wants_prompt = scheduled.sampling.params.prompt_logprobs is not None
    if wants_prompt and scheduled.start + 1 < scheduled.sampling.prompt_len:
        return scheduled.stop - scheduled.start + num_drafted
    return num_drafted + 1 if samples else 0


# -- the step --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Layout of a step: which rows of the batch and of the logits belong to which request.

    Rows and logits are in the order of the requests. ``unknown_rows`` maps the id of a request to
    its batch row whose token the previous step is still choosing. ``sampled_rows`` lists the rows
    of the logits that decide a token.
    """

    requests: Sequence[ScheduledRequest]
    drafts: Sequence[Draft]
    page_size: int
    # The rows of all requests; None if they are in `segments`, because a request has extras.
    rows: RowTable | None
    segments: list[Segment]
    first_rows: list[int]  # first batch row of each request
    first_logits: list[int]  # first row of logits of each request
    samples: list[bool]  # `ScheduledRequest.samples` of each request
    unknown_rows: dict[str, int]
    sampled_rows: list[int]
    drafted: list[DraftedRow]  # one for each request that samples

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch."""
        if self.rows is not None:
            return self.rows.num_rows
        return sum(len(segment.token_ids) for segment in self.segments)

    @classmethod
    def of(
        cls, requests: Sequence[ScheduledRequest], drafts: Sequence[Draft], page_size: int
    ) -> StepLayout:
        """Return the layout of a step with these requests and drafts."""
        has_records = all_plain(requests) and rows_library() is not None
        rows = RowTable(page_size) if has_records else None
        segments, samples = list[Segment](), [each.samples for each in requests]
        lens = list(map(len, [draft.token_ids for draft in drafts]))
        counts = [
            num_logits(own, length, samples=draws)
            for own, length, draws in zip(requests, lens, samples, strict=True)
        ]
        row_ends = accumulate(
            [own.stop - own.start + length for own, length in zip(requests, lens, strict=True)]
        )
        first_rows, logit_ends = [0, *row_ends][:-1], list(accumulate(counts))
        pairs = list(zip(requests, drafts, strict=True))
        for (scheduled, draft), draws, count in zip(pairs, samples, counts, strict=True):
            tokens = scheduled.tokens[scheduled.start : scheduled.stop - scheduled.is_ahead]
            if scheduled.is_ahead:
                tokens.append(0)
            if rows is None:
                segments += request_segments(scheduled, tokens, draft, page_size, samples=draws)
            elif draft.parents:
                add_rows(rows, scheduled, tokens, draft, count)
            else:
                rows.add(tokens, scheduled.start, count, scheduled.page_ids, draft.token_ids)
        drawn = compress(zip(logit_ends, lens, strict=True), samples)
        placed = zip(requests, first_rows, strict=True)
        return cls(
            requests=requests,
            drafts=drafts,
            page_size=page_size,
            rows=rows,
            segments=segments,
            first_rows=first_rows,
            first_logits=[0, *logit_ends][:-1],
            samples=samples,
            unknown_rows={own.request_id: row for own, row in placed if own.is_ahead},
            sampled_rows=[row for end, num in drawn for row in range(end - 1 - num, end)],
            drafted=[
                DraftedRow(own.tokens, own.sampling, each.token_ids, each.parents, own.is_ahead)
                for own, each in compress(pairs, samples)
            ],
        )

    # -- before the outcome is known

    def sampled_logits(self, logits: Tensor) -> Tensor:
        """Return the rows of ``logits`` that decide a token, [num_sampled, vocab]."""
        return logits if len(self.sampled_rows) == len(logits) else logits[self.sampled_rows]

    def sampling_plan(self, num_logits: int) -> SamplingPlan | None:
        """Return the rows that the pass itself can sample; None if some logits decide no token.

        ``num_logits``: number of rows of the logits. The plan does not depend on the drafted
        tokens. Its first run for a request begins after the request's last token and covers the
        trunk; each other run covers a run of draft nodes.
        """
        if len(self.sampled_rows) != num_logits:
            return None
        if not [draft for draft in self.drafts if draft.parents]:  # faster than `any`
            lens = map(len, [drafted.draft for drafted in self.drafted])
            return SamplingPlan(self.drafted, [1 + num_nodes for num_nodes in lens])
        rows, counts = list[DraftedRow](), list[int]()
        drafts = [
            draft for draft, samples in zip(self.drafts, self.samples, strict=True) if samples
        ]
        for drafted, draft in zip(self.drafted, drafts, strict=True):
            if not draft.parents:
                rows.append(drafted)
                counts.append(1 + len(draft.token_ids))
                continue
            depths = draft.depths()
            for first, stop in draft.runs:
                rows.append(drafted.at_depth(depths[stop - 1]))
                counts.append(stop - first if first else 1 + stop)
        return SamplingPlan(rows, counts)

    def sample_rows(self) -> list[DraftedRow]:
        """Return the `DraftedRow` to sample for each row of `sampled_logits`."""
        return [
            drafted.at(node) for drafted in self.drafted for node in range(-1, len(drafted.draft))
        ]

    # -- once the accepted path of each request is known

    def kv_copies(self, paths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Return pairs (from, to) of slots that move the KV of accepted nodes to their positions.

        ``paths``: the accepted nodes of each request.
        """
        return [
            pair
            for scheduled, draft, path in zip(self.requests, self.drafts, paths, strict=True)
            if draft.parents
            for pair in request_copies(scheduled, draft, path, self.page_size)
        ]

    def kept_rows(self, paths: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the batch rows of each request's pending and accepted tokens, in order.

        ``paths``: the accepted nodes of each request.
        """
        kept = []
        for scheduled, first, path in zip(self.requests, self.first_rows, paths, strict=True):
            first_draft = first + scheduled.stop - scheduled.start
            kept.append([*range(first, first_draft), *(first_draft + node for node in path)])
        return kept

    def pooled(self, hidden: Tensor, logits: Tensor, sampler: Sampler) -> list[array[float] | None]:
        """Return the pooled numbers of each request; None if it pools nothing now.

        ``hidden`` [num_rows, hidden], ``logits`` [num_logits, vocab]. ``sampler`` chooses the
        model's own tokens, with which recorded answers are compared.
        """
        return [
            _pooled(
                each,
                pooling,
                hidden[row + each.stop - each.start - 1],
                logits[logit:],
                sampler,
            )
            if (pooling := each.sampling.pooling) is not None and each.pools
            else None
            for each, row, logit in zip(
                self.requests, self.first_rows, self.first_logits, strict=True
            )
        ]

    def prompt_logprobs(self, logits: Tensor) -> list[Sequence[TokenLogprob]]:
        """Return, for each request, log-probabilities of the prompt tokens after its chunk's rows.

        The sequence of a request that did not ask for them is empty.
        """
        return [
            () if each.sampling.params.prompt_logprobs is None else _logprobs(each, first, logits)
            for each, first in zip(self.requests, self.first_logits, strict=True)
        ]


def _logprobs(scheduled: ScheduledRequest, first: int, logits: Tensor) -> Sequence[TokenLogprob]:
    num_top, prompt_len = scheduled.sampling.params.prompt_logprobs, scheduled.sampling.prompt_len
    following = scheduled.tokens[scheduled.start + 1 : min(scheduled.stop + 1, prompt_len)]
    if num_top is None or not following:
        return ()
    return token_logprobs(logits[first : first + len(following)], following, num_top)


def _pooled(
    scheduled: ScheduledRequest,
    pooling: Pooling,
    hidden: Tensor,
    logits: Tensor,
    sampler: Sampler,
) -> array[float]:
    """Return the pooled numbers of a request: its last row of ``hidden``, or scores of tokens.

    ``hidden`` is [hidden]. The first rows of ``logits`` [_, vocab] belong to `Pooling.rows`, or to
    the ``num_pooled`` tokens of a recorded answer that is compared.
    """
    if pooling.compares:
        return compare_answer(scheduled, logits[: scheduled.num_pooled], sampler)
    rows = pooling.rows
    if not rows:
        return array("f", hidden.float().cpu().numpy().tobytes())
    places = [row for row, token_ids in enumerate(rows) for _ in token_ids]
    found = logits[places, [each for token_ids in rows for each in token_ids]].float()
    if pooling.is_normalized:
        found -= logits[: len(rows)].float().logsumexp(1)[places]
    return array("f", found.cpu().numpy().tobytes())
