"""The sampler's kernels: drafts, edits, errors and edges."""

from __future__ import annotations

import math
import random
from array import array
from typing import Any

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton")

from foretoken.core.interface.output import Refusal
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.verifier import (
    ALL_BANNED,
    NOT_FINITE,
    SampledToken,
    Verified,
)
from support.sampling_rows import (
    Countdown,
    best_of,
    logits_of,
    random_wishes,
    row_of,
    sampling_of,
)
from support.triton_sampling import ORACLE, SAMPLER, as_on_a_gpu, oracle  # noqa: F401

pytestmark = [pytest.mark.usefixtures("one_thread", "as_on_a_gpu"), pytest.mark.slow]
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("bad", [INF, NAN, -NAN])
def test_logits_that_are_not_finite_fail_their_own_request_only(bad: float) -> None:
    form = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 2}, {"allowed_token_ids": [0]}]
    for vocab, place in ((5, 0), (300, 299)):
        rows = [row_of(seed, **each) for seed, each in enumerate(form)]
        logits = logits_of(5, vocab)
        healthy, broken = SAMPLER.sample(logits, rows), logits.clone()
        broken[1:, place], broken[3] = bad, -INF
        assert SAMPLER.sample(broken, rows) == [healthy[0]] + [SampledToken(-1, NOT_FINITE)] * 4


def test_a_request_that_bans_every_token_fails_alone() -> None:
    banned = row_of(allowed_token_ids=[0], bad_words_ids=((0,),))
    logits = torch.tensor([[3.0, 1.0, -INF]] * 2)
    found = SAMPLER.sample(logits, [banned, row_of(temperature=0.0)])
    assert found == [SampledToken(-1, ALL_BANNED), SampledToken(0)]


def test_ids_outside_the_vocabulary_fail_their_own_request_only() -> None:
    rows = [row_of(logit_bias={5: 1.0}), row_of(logit_bias={4: 99.0})]
    logits = torch.zeros(2, 5)
    assert SAMPLER.sample(logits, rows) == oracle(logits, rows)
    logits[0, 0] = NAN
    assert SAMPLER.sample(logits, rows) == [SampledToken(-1, NOT_FINITE), SampledToken(4)]


def test_what_is_known_of_a_request_is_known_of_one_width_of_logits() -> None:
    row = row_of(logit_bias={5: 1.0})
    for width in (8, 4, 8):
        [choice] = SAMPLER.sample(logits_of(1, width), [row])
        assert (choice.error is None) == (width == 8)


def test_tiny_temperatures_are_greedy_and_huge_ones_know_no_favourite() -> None:
    logits = logits_of(20, 50, 3.0)
    greedy = [SampledToken(token_id) for token_id in logits.argmax(-1).tolist()]
    for temperature in (0.0, 1e-300, 1e-9):
        rows = [row_of(seed, temperature=temperature) for seed in range(20)]
        assert SAMPLER.sample(logits, rows) == greedy
    rows = [row_of(seed, temperature=100.0) for seed in range(20)]
    drawn = SAMPLER.sample(logits / 1e20, rows)
    assert drawn == oracle(logits / 1e20, rows)
    assert len({choice.token_id for choice in drawn}) > 12


def test_ties_go_to_the_lowest_id_and_zeros_of_either_sign_tie() -> None:
    logits = torch.full((1, 600), -1.0)
    logits[0, [550, 551, 470]] = torch.tensor([0.0, 0.0, -0.0])
    assert SAMPLER.sample(logits, [row_of(temperature=0.0)]) == [SampledToken(470)]


@pytest.mark.parametrize(
    "form",
    [
        {"frequency_penalty": 0.4},
        {"presence_penalty": 1.5, "frequency_penalty": -0.2},
        {"presence_penalty": -0.5},
        {"repetition_penalty": 1.4},
        {"logit_bias": {3: 2.0, 5: -1.0}},
    ],
    ids=str,
)
def test_what_is_edited_decides_as_it_does_in_torch(form: dict[str, Any]) -> None:
    rng, logits = random.Random(3), logits_of(8, 9, 1.0)
    histories = [rng.choices([0, 1, 2, 3, 4, 5, 6, -5, 9], k=9) for _ in range(8)]
    rows = [row_of(tokens=tokens, temperature=0.0, **form) for tokens in histories]
    drawn = SAMPLER.sample(logits, rows)
    assert drawn == oracle(logits, rows)
    assert drawn != SAMPLER.sample(logits, [row_of(temperature=0.0)] * 8)


def test_a_long_history_is_counted_as_torch_counts_it_while_it_grows() -> None:
    rng, vocab = random.Random(3), 3000
    tokens = array("q", [rng.choice([rng.randrange(vocab), 7, -5, 2**40]) for _ in range(7000)])
    samplings = [
        sampling_of(seed, frequency_penalty=0.4, repetition_penalty=factor)
        for seed, factor in enumerate((1.0, 1.7))
    ]
    for _ in range(3):
        rows = [DraftedRow(tokens, sampling, (7, 11)) for sampling in samplings]
        logits = logits_of(2, vocab, 0.3)
        assert SAMPLER.sample(logits, rows) == oracle(logits, rows)
        tokens.extend([11, 8, 9])


def test_half_precision_and_strided_logits_are_accepted() -> None:
    logits = logits_of(16, 33)
    rows = [row_of(seed, presence_penalty=seed % 2) for seed in range(8)]
    for some in (logits[::2].half(), logits[::2], logits.T.contiguous().T[:8]):
        assert SAMPLER.sample(some, rows) == oracle(some, rows)


def test_a_wrong_number_of_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 3 tokens"):
        SAMPLER.sample(logits_of(2, 9), [row_of(), row_of(), row_of()])
    with pytest.raises(ValueError, match="2 rows of logits for 1 drafts"):
        SAMPLER.verify(torch.zeros(2, 5), [DraftedRow(array("q", (0, 0)), sampling_of())])
    assert SAMPLER.verify(torch.zeros(0, 5), []) == []


# ---- drafts ------------------------------------------------------------------------------------


def test_drafts_are_followed_as_torch_follows_them() -> None:
    rng, vocab = random.Random(5), 61
    logits = logits_of(70, vocab, 8.0)
    rows, at = list[DraftedRow](), 0
    while at + 8 < 70:
        form = rng.choice([random_wishes(rng, vocab), {"temperature": 0.0}])
        form["logprobs"] = rng.choice([None, 2])
        if rng.random() < 0.4:
            form |= {"constraint": Countdown(vocab, rng.choice([3, 99])), "min_tokens": 2}
        depth = rng.randrange(6)
        best = logits[at : at + depth]
        draft = rng.choice([best_of(best, rng), best.argmax(-1).tolist()])
        tokens = array("q", [rng.randrange(vocab) for _ in range(4)])
        rows.append(DraftedRow(tokens, sampling_of(rng.getrandbits(64), **form), draft))
        at += depth + 1
    logits = logits[:at]
    logits[::17, 0] = NAN
    found = SAMPLER.verify(logits, rows)
    with torch.device("cpu"):
        expected = ORACLE.verify(logits.cpu(), rows)
    assert [replace(each, logprobs=()) for each in found] == [
        replace(each, logprobs=()) for each in expected
    ]
    assert [len(each.logprobs) for each in found] == [len(each.logprobs) for each in expected]
    assert {type(each.error) for each in found} == {type(None), str, Refusal}
    assert max(each.num_accepted for each in found) >= 3


def test_the_places_of_a_draft_may_be_decided_all_at_once() -> None:
    """A GPU decides each place by its own path, all of one request's masks and history."""
    form = {"repetition_penalty": 1.5, "allowed_token_ids": range(0, 40, 2), "min_tokens": 7}
    sampling = sampling_of(3, **form, stop_ids=frozenset({4}), bad_words_ids=((6, 8),))
    tokens, draft, logits = array("q", (0, 2, 9)), (6, 8, 6, 8), logits_of(5, 40, 1.0)
    rows = [DraftedRow(tokens, sampling, draft[:depth]) for depth in range(5)]
    assert SAMPLER.sample(logits, rows) == oracle(logits, rows)


def test_what_a_constraint_fails_with_is_the_requests_own_fault() -> None:
    sampling = sampling_of(temperature=0.0, constraint=Countdown(12, fails_at=1))
    rows = [
        DraftedRow(array("q", (0, 0)), sampling, (0,)),
        DraftedRow(array("q", (0,)), sampling_of(temperature=0.0)),
    ]
    first, second = SAMPLER.verify(torch.zeros(3, 12), rows)
    assert (first.token_ids, first.num_accepted, first.error) == ((0,), 1, "no way on")
    assert isinstance(first.error, Refusal)
    assert second == Verified((0,), ())


@pytest.mark.parametrize(("num_allowed", "chosen"), [(1, 0), (2, 1)])
def test_an_answer_that_must_end_may_be_shorter_than_min_tokens(
    num_allowed: int, chosen: int
) -> None:
    """At output 10 - n the constraint allows the first n ids, of which 0 ends the answer."""
    sampling = sampling_of(
        temperature=0.0, constraint=Countdown(12), min_tokens=50, stop_ids=frozenset({0})
    )
    row = DraftedRow(array("q", [5] * (12 - num_allowed)), sampling)
    logits = torch.arange(12.0, 0.0, -1.0)[None]
    assert SAMPLER.sample(logits, [row]) == [SampledToken(chosen)]


def test_what_one_list_allows_and_the_constraint_too_is_left() -> None:
    row = row_of(temperature=0.0, allowed_token_ids=[9, 33, 35], constraint=Countdown(40))
    assert SAMPLER.sample(torch.zeros(1, 40), [row]) == [SampledToken(9)]


def test_a_mask_of_another_vocabulary_is_an_error_and_no_wild_read() -> None:
    with pytest.raises(ValueError, match="the mask has 11 tokens"):
        SAMPLER.sample(torch.zeros(1, 12), [row_of(constraint=Countdown(11))])
