"""Asked: what the logits of a step are for, known before they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .batch import Draws
from .logprobs import token_logprobs
from .rejection import SampledDraft
from .sampling import SampleRow
from .step import Draft, PlanRow, TokenLogprob
from .verify import VerifyRow

Paths = Sequence[Sequence[Draft]]  # of each row: the draft on its own pages, then its branches


@dataclass(frozen=True, slots=True)
class Asked:
    """What logits decide: every path of the rows that sample, one after another."""

    rows: list[VerifyRow]
    num_ahead: list[int]  # of each row: tokens that the device alone knows
    probs: list[Tensor | None]  # what each draft was drawn from, where it matters
    places: list[int]  # the rows of logits that decide, among all that were wanted

    @classmethod
    def of(cls, rows: Sequence[PlanRow], paths: Paths) -> Asked:
        """Those of a step, whose logits lie as its segments do."""
        asked = cls([], [], [], [])
        at = 0
        for row, drafts in zip(rows, paths, strict=True):
            for index, draft in enumerate(drafts):
                at += num_logits(row, draft) if index == 0 else len(draft.token_ids) + 1
                if row.samples:
                    asked.rows.append(VerifyRow(row.tokens, draft.token_ids, row.sampling))
                    asked.num_ahead.append(int(row.is_ahead))
                    asked.probs.append(draft.probs if isinstance(draft, SampledDraft) else None)
                    asked.places.extend(range(at - len(draft.token_ids) - 1, at))
        return asked

    def decisive(self, logits: Tensor) -> Tensor:
        """The rows that decide, of all ``logits`` of the step."""
        return logits if len(self.places) == len(logits) else logits[self.places]

    def draws(self, num_logits: int) -> Draws | None:
        """What is to be drawn, said before the pass; None where some of the logits do not decide.

        A place for each draft token and one behind it, as `walk_drafts` would ask for them.
        """
        if len(self.places) != num_logits:
            return None
        pairs = zip(self.rows, self.num_ahead, strict=True)
        rows = [SampleRow(row.tokens, row.sampling, num_ahead=ahead) for row, ahead in pairs]
        return Draws(rows, [len(row.draft) + 1 for row in self.rows])

    def sample_rows(self) -> list[SampleRow]:
        """What each of the decisive rows decides."""
        return [
            SampleRow(row.tokens, row.sampling, row.draft[:depth], ahead)
            for row, ahead in zip(self.rows, self.num_ahead, strict=True)
            for depth in range(len(row.draft) + 1)
        ]


def num_logits(row: PlanRow, draft: Draft) -> int:
    """Last rows of a segment whose logits matter."""
    wants_prompt = row.sampling.params.prompt_logprobs is not None
    if wants_prompt and row.start + 1 < row.sampling.prompt_len:
        return row.stop - row.start + len(draft.token_ids)
    return len(draft.token_ids) + 1 if row.samples else 0


def prompt_logprobs(
    rows: Sequence[PlanRow], paths: Paths, logits: Tensor
) -> list[Sequence[TokenLogprob]]:
    """For rows that ask: log-probabilities of the prompt tokens that follow the chunk's."""
    if all(row.sampling.params.prompt_logprobs is None for row in rows):
        return [()] * len(rows)
    found: list[Sequence[TokenLogprob]] = []
    at = 0
    for row, (draft, *others) in zip(rows, paths, strict=True):
        num_top = row.sampling.params.prompt_logprobs
        following = row.tokens[row.start + 1 : min(row.stop + 1, row.sampling.prompt_len)]
        if num_top is None or not following:
            found.append(())
        else:
            chunk = logits[at : at + len(following)]
            found.append(token_logprobs(chunk, following, num_top))
        at += num_logits(row, draft) + sum(len(other.token_ids) + 1 for other in others)
    return found
