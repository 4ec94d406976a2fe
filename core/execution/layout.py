"""Where the tokens of a step lie: segments, slots of draft trees, and what the logits decide.

A draft tree is verified without an ancestor mask. Each run of its nodes, every one the child of
the node before it, is a segment. The trunk, the first run, follows the pending tokens in the slots
that its positions have in the page table; the others take slots of spare pages, and their segments'
tails say where the keys of their ancestors are. So every row adds up the keys of its own path, each
at its absolute position: the bits of plain decoding.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..interface.draft import Draft
from ..interface.output import TokenLogprob
from ..interface.plan import ScheduledRequest
from ..ops.batch import SamplingPlan, Segment
from ..sampling.logits_processors import SampleRow
from ..sampling.logprobs import token_logprobs
from ..sampling.rejection import SampledDraft
from ..sampling.verifier import VerifyRequest

# -- slots and segments ----------------------------------------------------------------------------


def fitting(draft: Draft, scheduled: ScheduledRequest, page_size: int) -> Draft:
    """The draft without the last nodes for which no slot of the spare pages is left."""
    if not draft.parents:
        return draft
    room = len(scheduled.spare_page_ids) * page_size
    count = draft.trunk_len
    return draft.first(count + room) if room else draft.trunk()


def spare_slots(scheduled: ScheduledRequest, page_size: int) -> list[int]:
    """The slots for nodes beside the trunk."""
    return [
        page_id * page_size + place
        for page_id in scheduled.spare_page_ids
        for place in range(page_size)
    ]


def natural_slots(scheduled: ScheduledRequest, first: int, count: int, page_size: int) -> list[int]:
    """Where the page table has ``count`` positions from ``first`` on."""
    return [
        scheduled.page_ids[position // page_size] * page_size + position % page_size
        for position in range(first, first + count)
    ]


def request_segments(
    scheduled: ScheduledRequest, tokens: array[int], draft: Draft, page_size: int
) -> list[Segment]:
    """A request's pending ``tokens`` and its trunk, then the other runs of its draft."""
    runs = draft.runs()
    if len(runs) < 2:
        tokens.extend(draft.token_ids)
        return [
            Segment(
                tokens,
                scheduled.start,
                scheduled.page_ids,
                num_logits(scheduled, len(draft.token_ids)),
            )
        ]
    trunk_len = runs[0][1]
    tokens.extend(draft.token_ids[:trunk_len])
    segments = [
        Segment(tokens, scheduled.start, scheduled.page_ids, num_logits(scheduled, trunk_len))
    ]
    spare = spare_slots(scheduled, page_size)
    for first, stop in runs[1:]:
        path = draft.path(first)
        own = spare[first - trunk_len : stop - trunk_len]
        ancestors = [spare[node - trunk_len] for node in path[:-1] if node >= trunk_len]
        segments.append(
            Segment(
                token_ids=draft.token_ids[first:stop],
                start=scheduled.stop + len(path) - 1,
                page_ids=scheduled.page_ids,
                num_logits=stop - first,
                tail=array("q", ancestors + own),
            )
        )
    return segments


def moves(
    scheduled: ScheduledRequest, draft: Draft, path: Sequence[int], page_size: int
) -> list[tuple[int, int]]:
    """(from, to) of the slots of accepted nodes that are not where their positions want them.

    ``path``: the accepted nodes, the first level first.
    """
    if not draft.parents or not path or path[-1] == len(path) - 1:
        return []
    trunk_len, spare = draft.trunk_len, spare_slots(scheduled, page_size)
    targets = natural_slots(scheduled, scheduled.stop, len(path), page_size)
    pairs = zip(path, targets, strict=True)
    return [(spare[node - trunk_len], slot) for node, slot in pairs if node >= trunk_len]


# -- logits ----------------------------------------------------------------------------------------


def num_logits(scheduled: ScheduledRequest, draft_len: int) -> int:
    """Last rows of the first segment whose logits matter, ``draft_len`` of them of the draft."""
    wants_prompt = scheduled.sampling.params.prompt_logprobs is not None
    if wants_prompt and scheduled.start + 1 < scheduled.sampling.prompt_len:
        return scheduled.stop - scheduled.start + draft_len
    return draft_len + 1 if scheduled.samples else 0


@dataclass(frozen=True, slots=True)
class LogitsLayout:
    """What logits decide: the drafts of the requests that sample, one after another."""

    requests: list[VerifyRequest]
    drafts: list[Draft]
    num_ahead: list[int]  # of each request: tokens that the device alone knows
    places: list[int]  # the rows of logits that decide, among all that were wanted

    @classmethod
    def of(cls, requests: Sequence[ScheduledRequest], drafts: Sequence[Draft]) -> LogitsLayout:
        """That of a step, whose logits lie as its segments do."""
        layout = cls([], [], [], [])
        at = 0
        for scheduled, draft in zip(requests, drafts, strict=True):
            at += num_logits(scheduled, len(draft.token_ids))
            if scheduled.samples:
                layout.requests.append(
                    VerifyRequest(
                        scheduled.tokens, draft.token_ids, scheduled.sampling, draft.parents
                    )
                )
                layout.drafts.append(draft)
                layout.num_ahead.append(int(scheduled.is_ahead))
                layout.places.extend(range(at - len(draft.token_ids) - 1, at))
        return layout

    @property
    def probs(self) -> list[Tensor | None]:
        """What each draft was drawn from, where it matters."""
        return [d.probs if isinstance(d, SampledDraft) else None for d in self.drafts]

    def decisive(self, logits: Tensor) -> Tensor:
        """The rows that decide, of all ``logits`` of the step."""
        return logits if len(self.places) == len(logits) else logits[self.places]

    def draws(self, num_logits: int) -> SamplingPlan | None:
        """What is to be drawn, known before the pass; None where some of the logits do not decide.

        A place for each draft token and one before them, in the order of `walk_drafts`.
        """
        if len(self.places) != num_logits:
            return None
        rows, counts = [], []
        for request, draft, ahead in zip(self.requests, self.drafts, self.num_ahead, strict=True):
            runs = draft.runs()
            rows.append(SampleRow(request.tokens, request.sampling, num_ahead=ahead))
            counts.append(1 + (runs[0][1] if runs else 0))
            for first, stop in runs[1:]:
                rows.append(SampleRow(request.tokens, request.sampling, request.tail(first), ahead))
                counts.append(stop - first)
        return SamplingPlan(rows, counts)

    def sample_rows(self) -> list[SampleRow]:
        """What each of the decisive rows decides."""
        return [
            SampleRow(request.tokens, request.sampling, request.tail(node), ahead)
            for request, ahead in zip(self.requests, self.num_ahead, strict=True)
            for node in range(-1, len(request.draft))
        ]


def prompt_logprobs(
    requests: Sequence[ScheduledRequest], drafts: Sequence[Draft], logits: Tensor
) -> list[Sequence[TokenLogprob]]:
    """Log-probabilities of the prompt tokens behind the chunk's, for requests that want them."""
    if all(scheduled.sampling.params.prompt_logprobs is None for scheduled in requests):
        return [()] * len(requests)
    found: list[Sequence[TokenLogprob]] = []
    at = 0
    for scheduled, draft in zip(requests, drafts, strict=True):
        num_top = scheduled.sampling.params.prompt_logprobs
        following = scheduled.tokens[
            scheduled.start + 1 : min(scheduled.stop + 1, scheduled.sampling.prompt_len)
        ]
        if num_top is None or not following:
            found.append(())
        else:
            chunk = logits[at : at + len(following)]
            found.append(token_logprobs(chunk, following, num_top))
        at += num_logits(scheduled, len(draft.token_ids))
    return found
