"""A constraint among the other processors; the grammar here is a table of what may follow what."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from foretoken.core.interface.output import Refusal
from foretoken.core.interface.sampling import (
    ConstraintFailed,
    Mask,
    SamplingMetadata,
    TokenSamplingParams,
)
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.logits_processors import apply_processors
from foretoken.core.sampling.verifier import ALL_BANNED, sample, verify

VOCAB, STOP = 8, 7
Path = tuple[int, ...]


class Table:
    """Constraint by a table of the tokens that may follow each path; other paths have no limit."""

    def __init__(self, table: dict[Path, Sequence[int]]) -> None:
        self.table, self.asked = table, []

    def allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        path = (*tokens[start:], *tail)
        self.asked.append(path)
        if path not in self.table:
            return None
        if not self.table[path]:
            raise ConstraintFailed("the table is broken")
        return np.isin(np.arange(VOCAB), self.table[path]).data


def make_row(
    table: Table | None, output: Sequence[int] = (), tail: Sequence[int] = (), **params: object
) -> DraftedRow:
    sampling = SamplingMetadata(
        params=TokenSamplingParams(**{"temperature": 0.0, **params}),  # type: ignore[arg-type]
        seed=5,
        prompt_len=2,
        stop_ids=frozenset({STOP}),
        constraint=table,  # type: ignore[arg-type]
    )
    return DraftedRow(array("q", [9, 9, *output]), sampling, tail)


def left(row: DraftedRow) -> list[int]:
    """The tokens that the edits leave."""
    values = torch.zeros(1, VOCAB)
    assert apply_processors(values, [row]) == [None]
    return torch.nonzero(values[0] > -torch.inf)[:, 0].tolist()


def test_a_row_with_a_constraint_is_edited_and_one_without_is_not() -> None:
    assert make_row(Table({})).is_edited(VOCAB)
    assert not make_row(None).is_edited(VOCAB)


def test_the_mask_belongs_to_the_path_of_output_and_tail_without_the_prompt() -> None:
    table = Table({(): [1], (3,): [2, 4], (3, 4): [5]})
    assert left(make_row(table)) == [1]
    assert left(make_row(table, [3])) == [2, 4]
    assert left(make_row(table, [3], [4])) == left(make_row(table, [3, 4])) == [5]
    assert table.asked == [(), (3,), (3, 4), (3, 4)]


def test_where_a_constraint_says_nothing_nothing_is_banned() -> None:
    assert left(make_row(Table({}), [6], [6])) == list(range(VOCAB))


def test_other_bans_hold_beside_it() -> None:
    row = make_row(Table({(): [1, 2, 3]}), allowed_token_ids=[2, 3, 4], logit_bias={2: 50.0})
    assert left(row) == [2, 3]
    banned = make_row(Table({(): [1]}), allowed_token_ids=[2])
    assert sample(torch.zeros(1, VOCAB), [banned])[0].error == ALL_BANNED


def test_min_tokens_keeps_an_answer_going_only_where_it_can_go_on() -> None:
    table = Table({(): [1, STOP], (1,): [STOP]})
    assert left(make_row(table, min_tokens=3)) == [1]
    assert left(make_row(table, [1], min_tokens=3)) == [STOP]
    assert left(make_row(table, min_tokens=0)) == [1, STOP]
    assert left(make_row(Table({(1,): [1, STOP]}), [1], min_tokens=1)) == [1, STOP]


def test_a_mask_of_another_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match=f"the mask has {VOCAB} tokens, but the vocabulary has 9"):
        apply_processors(torch.zeros(1, 9), [make_row(Table({(): [1]}))])


def test_a_constraint_that_fails_is_an_error_of_its_row_alone() -> None:
    rows = [make_row(Table({(): []})), make_row(Table({(): [4]}))]
    choices = sample(torch.zeros(2, VOCAB), rows)
    assert [choice.error for choice in choices] == ["the table is broken", None]
    assert [choice.token_id for choice in choices] == [-1, 4]


@pytest.mark.parametrize(
    ("draft", "num_right"),
    [((), 0), ((1, 2, 3), 3), ((1, 5, 3), 1), ((6, 6), 0), ((1, 2, 4, 4), 2)],
)
def test_a_draft_is_followed_while_it_is_allowed_and_changes_no_token(draft, num_right) -> None:
    table = Table({(): [1], (1,): [2], (1, 2): [3], (1, 2, 3): [STOP]})
    row = make_row(table)
    logits = torch.zeros(len(draft) + 1, VOCAB)
    (verified,) = verify(logits, [DraftedRow(row.tokens, row.sampling, draft)])
    assert verified.error is None
    assert verified.num_accepted == num_right
    assert verified.token_ids == (1, 2, 3, STOP)[: num_right + 1]


def test_what_is_kept_of_a_request_goes_with_it() -> None:
    import gc
    import weakref

    table = Table({(): [1]})
    row = make_row(table)
    left(row)
    gone = weakref.ref(table)
    del row, table
    gc.collect()
    assert gone() is None


def test_a_constraint_that_fails_is_the_requests_own_fault() -> None:
    broken = make_row(Table({(): []}))
    (choice,) = sample(torch.zeros(1, VOCAB), [broken])
    assert isinstance(choice.error, Refusal)
    assert choice.error == "the table is broken"
    (banned,) = sample(torch.full((1, VOCAB), torch.nan), [make_row(None)])
    assert not isinstance(banned.error, Refusal)
