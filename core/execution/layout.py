"""Where the rows of a step lie: its segments, the slots of draft trees, and what the logits decide.

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

from ..interface.step import Draft, PlanRow, TokenLogprob
from ..ops.batch import SamplingPlan, Segment
from ..sampling.logits_processors import SampleRow
from ..sampling.logprobs import token_logprobs
from ..sampling.rejection import SampledDraft
from ..sampling.verifier import VerifyRow

# -- slots and segments ----------------------------------------------------------------------------


def fitting(draft: Draft, row: PlanRow, page_size: int) -> Draft:
    """The draft without the last nodes for which no slot of the spare pages is left."""
    if not draft.parents:
        return draft
    room = len(row.spare_page_ids) * page_size
    count = draft.trunk_len
    return draft.first(count + room) if room else draft.trunk()


def spare_slots(row: PlanRow, page_size: int) -> list[int]:
    """The slots for nodes beside the trunk."""
    return [
        page_id * page_size + place for page_id in row.spare_page_ids for place in range(page_size)
    ]


def natural_slots(row: PlanRow, first: int, count: int, page_size: int) -> list[int]:
    """Where the page table has ``count`` positions from ``first`` on."""
    return [
        row.page_ids[position // page_size] * page_size + position % page_size
        for position in range(first, first + count)
    ]


def row_segments(row: PlanRow, tokens: array[int], draft: Draft, page_size: int) -> list[Segment]:
    """A row's pending ``tokens`` and its trunk, then the other runs of its draft."""
    runs = draft.runs()
    if len(runs) < 2:
        tokens.extend(draft.token_ids)
        return [Segment(tokens, row.start, row.page_ids, num_logits(row, len(draft.token_ids)))]
    trunk_len = runs[0][1]
    tokens.extend(draft.token_ids[:trunk_len])
    segments = [Segment(tokens, row.start, row.page_ids, num_logits(row, trunk_len))]
    spare = spare_slots(row, page_size)
    for first, stop in runs[1:]:
        path = draft.path(first)
        own = spare[first - trunk_len : stop - trunk_len]
        ancestors = [spare[node - trunk_len] for node in path[:-1] if node >= trunk_len]
        segments.append(
            Segment(
                token_ids=draft.token_ids[first:stop],
                start=row.stop + len(path) - 1,
                page_ids=row.page_ids,
                num_logits=stop - first,
                tail=array("q", ancestors + own),
            )
        )
    return segments


def moves(row: PlanRow, draft: Draft, path: Sequence[int], page_size: int) -> list[tuple[int, int]]:
    """(from, to) of the slots of accepted nodes that are not where their positions want them.

    ``path``: the accepted nodes, the first level first.
    """
    if not draft.parents or not path or path[-1] == len(path) - 1:
        return []
    trunk_len, spare = draft.trunk_len, spare_slots(row, page_size)
    targets = natural_slots(row, row.stop, len(path), page_size)
    pairs = zip(path, targets, strict=True)
    return [(spare[node - trunk_len], slot) for node, slot in pairs if node >= trunk_len]


# -- logits ----------------------------------------------------------------------------------------


def num_logits(row: PlanRow, draft_len: int) -> int:
    """Last rows of the first segment whose logits matter, ``draft_len`` of them of the draft."""
    wants_prompt = row.sampling.params.prompt_logprobs is not None
    if wants_prompt and row.start + 1 < row.sampling.prompt_len:
        return row.stop - row.start + draft_len
    return draft_len + 1 if row.samples else 0


@dataclass(frozen=True, slots=True)
class LogitsLayout:
    """What logits decide: the drafts of the rows that sample, one after another."""

    rows: list[VerifyRow]
    drafts: list[Draft]
    num_ahead: list[int]  # of each row: tokens that the device alone knows
    places: list[int]  # the rows of logits that decide, among all that were wanted

    @classmethod
    def of(cls, rows: Sequence[PlanRow], drafts: Sequence[Draft]) -> LogitsLayout:
        """That of a step, whose logits lie as its segments do."""
        layout = cls([], [], [], [])
        at = 0
        for row, draft in zip(rows, drafts, strict=True):
            at += num_logits(row, len(draft.token_ids))
            if row.samples:
                layout.rows.append(
                    VerifyRow(row.tokens, draft.token_ids, row.sampling, draft.parents)
                )
                layout.drafts.append(draft)
                layout.num_ahead.append(int(row.is_ahead))
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
        """What is to be drawn, said before the pass; None where some of the logits do not decide.

        A place for each draft token and one before them, in the order of `walk_drafts`.
        """
        if len(self.places) != num_logits:
            return None
        rows, counts = [], []
        for row, draft, ahead in zip(self.rows, self.drafts, self.num_ahead, strict=True):
            runs = draft.runs()
            rows.append(SampleRow(row.tokens, row.sampling, num_ahead=ahead))
            counts.append(1 + (runs[0][1] if runs else 0))
            for first, stop in runs[1:]:
                rows.append(SampleRow(row.tokens, row.sampling, row.tail(first), ahead))
                counts.append(stop - first)
        return SamplingPlan(rows, counts)

    def sample_rows(self) -> list[SampleRow]:
        """What each of the decisive rows decides."""
        return [
            SampleRow(row.tokens, row.sampling, row.tail(node), ahead)
            for row, ahead in zip(self.rows, self.num_ahead, strict=True)
            for node in range(-1, len(row.draft))
        ]


def prompt_logprobs(
    rows: Sequence[PlanRow], drafts: Sequence[Draft], logits: Tensor
) -> list[Sequence[TokenLogprob]]:
    """Log-probabilities of the prompt tokens behind the chunk's, for rows that request them."""
    if all(row.sampling.params.prompt_logprobs is None for row in rows):
        return [()] * len(rows)
    found: list[Sequence[TokenLogprob]] = []
    at = 0
    for row, draft in zip(rows, drafts, strict=True):
        num_top = row.sampling.params.prompt_logprobs
        following = row.tokens[row.start + 1 : min(row.stop + 1, row.sampling.prompt_len)]
        if num_top is None or not following:
            found.append(())
        else:
            chunk = logits[at : at + len(following)]
            found.append(token_logprobs(chunk, following, num_top))
        at += num_logits(row, len(draft.token_ids))
    return found
