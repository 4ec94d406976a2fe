"""Tokens chosen by the kernels against the torch oracle, and every row on its own."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.interface.output import Refusal
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.ops.native import Variant, native_library, variants
from foretoken.core.ops.native.sampler import NativeSampler
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.logits_processors import apply_processors, scaled, truncate
from foretoken.core.sampling.sampler import DraftVocab, TorchSampler
from foretoken.core.sampling.verifier import (
    ALL_BANNED,
    NOT_FINITE,
    Best,
    SampledToken,
    Verified,
)
from support.draft_trees import tree_of
from support.native_variants import every_variant
from support.sampling_rows import (
    PROMPT_LEN,
    Countdown,
    best_of,
    logits_of,
    random_row,
    random_wishes,
    row_of,
    sampling_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")
INF, NAN = math.inf, math.nan
ORACLE = TorchSampler()


def sampler_of(variant: Variant) -> NativeSampler:
    library = native_library(variant)
    if library is None:
        pytest.skip("no native kernels on this machine")
    return NativeSampler(library)


@pytest.fixture(params=every_variant(), scope="module")
def sampler(request: pytest.FixtureRequest) -> NativeSampler:
    return sampler_of(request.param)


@given(
    vocab=st.integers(1, 700),
    shape=st.sampled_from(["normal", "ties", "flat", "steep", "sparse"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_any_mixture_of_parameters_draws_what_torch_draws(
    sampler: NativeSampler, vocab: int, shape: str, seed: int
) -> None:
    rng, spread = random.Random(seed), {"flat": 0.05, "steep": 30.0}.get(shape, 2.0)
    logits = logits_of(20, vocab, spread, seed)
    if shape == "ties":
        logits.round_()
    if shape == "sparse":
        logits[logits < 0] = -INF
    rows = [random_row(rng, vocab) for _ in range(20)]
    assert sampler.sample(logits, rows) == ORACLE.sample(logits, rows)


CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 50},
    {"top_k": 3000},
    {"top_p": 0.95},
    {"top_p": 0.3, "temperature": 1.4},
    {"min_p": 0.05},
    {"top_k": 400, "top_p": 0.9, "min_p": 0.001},
]


@pytest.mark.parametrize("spread", [0.0, 0.2, 2.0, 6.0])
def test_big_vocabularies_draw_what_torch_draws(sampler: NativeSampler, spread: float) -> None:
    rows = [row_of(seed, **cut) for seed, cut in enumerate(CUTS * 3)]
    logits = logits_of(len(rows), 10_007, spread)
    logits[len(CUTS) :] = logits[len(CUTS) :].bfloat16()  # ties
    assert sampler.sample(logits, rows) == ORACLE.sample(logits, rows)


@pytest.mark.slow  # compiles all variants
def test_all_variants_draw_the_same_tokens() -> None:
    rows = [row_of(seed, **cut) for seed, cut in enumerate(CUTS * 25)]
    logits = logits_of(len(rows), 3001)
    drawn = [sampler_of(variant).sample(logits, rows) for variant in variants()]
    assert all(each == drawn[0] for each in drawn)


@pytest.mark.parametrize(
    "form",
    [
        {"top_k": 7},
        {"top_p": 0.55},
        {"top_p": 0.5},
        {"min_p": math.exp(-1)},
        {"top_k": 9, "top_p": 0.6},
        {"top_k": 12, "min_p": math.exp(-1), "top_p": 0.9},
    ],
    ids=str,
)
def test_exactly_the_tokens_that_the_cuts_leave_are_drawn(
    sampler: NativeSampler, form: dict[str, Any]
) -> None:
    """Among values that tie, at the edge too: those with the lowest ids stay."""
    values = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 3.0, 3.0, 2.0, 1.0, 2.0] * 7)
    rows = [row_of(seed, **form, temperature=1.0) for seed in range(3000)]
    drawn = {choice.token_id for choice in sampler.sample(values.expand(3000, -1), rows)}
    _, kept = truncate(scaled(values[None], rows[:1]), rows[:1])
    assert drawn == set(kept[0].tolist())


def exact_probs(values: torch.Tensor, row: DraftedRow) -> torch.Tensor:
    values = values[None].clone()
    apply_processors(values, [row])
    kept, ids = truncate(scaled(values, [row]), [row])
    dense = torch.full((values.shape[1],), -INF, dtype=torch.float64)
    dense[ids[0]] = kept[0].double()
    return dense.softmax(0)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.8, "min_p": 0.02},
        {"logit_bias": {3: 1.0}, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_draws_have_the_distribution_that_was_asked_for(form: dict[str, Any]) -> None:
    sampler = sampler_of(variants()[0])  # the others draw the same, as seen above
    num_samples, values = 20_000, logits_of(1, 19)[0]
    params = TokenSamplingParams(**form)
    rows = [
        DraftedRow(
            array("q", (0, 4)), SamplingMetadata(params=params, seed=seed, prompt_len=PROMPT_LEN)
        )
        for seed in range(num_samples)
    ]
    choices = sampler.sample(values.expand(num_samples, -1), rows)
    counts = torch.bincount(torch.tensor([c.token_id for c in choices]), minlength=19).double()
    expected = exact_probs(values, rows[0]) * num_samples
    assert int(counts[expected == 0].sum()) == 0
    cells = expected > 0
    chi = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    df = int(cells.sum()) - 1
    assert ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df)) < 4


@pytest.mark.parametrize(
    "form",
    [
        {"frequency_penalty": 0.4},
        {"presence_penalty": 1.5, "frequency_penalty": -0.2},
        {"repetition_penalty": 1.4},
    ],
    ids=str,
)
def test_penalties_count_a_long_history_as_torch_counts_it(
    sampler: NativeSampler, form: dict[str, Any]
) -> None:
    rng, logits = random.Random(3), logits_of(60, 40)
    rows = [
        row_of(seed, [rng.choice([rng.randrange(40), 7, 9, -5, 2**40]) for _ in range(50)], **form)
        for seed in range(60)
    ]
    drawn = sampler.sample(logits, rows)
    assert drawn == ORACLE.sample(logits, rows)
    assert drawn != sampler.sample(logits, [row_of(seed) for seed in range(60)])


# ---- a row on its own --------------------------------------------------------------------------


@pytest.fixture
def many_threads(sampler: NativeSampler) -> Iterator[None]:
    sampler._library.set_threads(3)
    yield
    sampler._library.set_threads(1)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("vocab", [301, 40_003])
def test_a_row_draws_the_same_alone_and_in_any_company(sampler: NativeSampler, vocab: int) -> None:
    rng = random.Random(vocab)
    rows = [random_row(rng, vocab) for _ in range(24)]
    logits = logits_of(24, vocab)
    together = sampler.sample(logits, rows)
    order = rng.sample(range(24), 24)
    assert sampler.sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    for i, row in enumerate(rows):
        moved = torch.cat((torch.zeros(i), logits[i]))[i:][None]  # at another alignment
        assert sampler.sample(moved, [row]) == [together[i]]


# ---- the best of a place -----------------------------------------------------------------------


@pytest.mark.parametrize("num_best", [1, 4, 8])
@pytest.mark.parametrize("vocab", [5, 301, 4096])
def test_the_best_are_those_of_torch_and_the_first_is_drawn(
    sampler: NativeSampler, vocab: int, num_best: int
) -> None:
    rng = random.Random(vocab)
    rows, logits = [random_row(rng, vocab) for _ in range(60)], logits_of(60, vocab)
    found = sampler.best(logits, rows, num_best)
    wanted = ORACLE.best(logits, rows, num_best)
    drawn = sampler.sample(logits, rows)
    for best, other, choice in zip(found, wanted, drawn, strict=True):
        assert (best.token_ids, best.error) == (other.token_ids, other.error)
        assert best.scores == pytest.approx(other.scores, abs=1e-4)
        assert best.token_ids[:1] == ((choice.token_id,) if choice.error is None else ())
        assert list(best.scores) == sorted(best.scores, reverse=True)
    assert max(len(best.token_ids) for best in found) == min(num_best, vocab)


@pytest.mark.parametrize("seed", range(3))
def test_a_part_of_the_vocabulary_races_as_if_all_others_were_banned(
    sampler: NativeSampler, seed: int
) -> None:
    """Alone where ids matter to the noise only, else over the whole vocabulary."""
    rng, vocab = random.Random(seed), 301
    ids = torch.tensor(sorted(rng.sample(range(vocab), 70)))
    draft_vocab = DraftVocab(ids, vocab)
    edited = [random_row(rng, vocab) for _ in range(40)]
    plain = [row_of(number, top_k=rng.choice([0, 5]), top_p=0.9) for number in range(20)]
    greedy = [row_of(number, temperature=0.0) for number in range(20)]
    for rows in (plain, greedy, edited, [*plain, *edited]):
        narrow = logits_of(len(rows), 70)
        found = sampler.best(narrow, rows, 4, draft_vocab=draft_vocab)
        wanted = ORACLE.best(narrow, rows, 4, draft_vocab=draft_vocab)
        wide = ORACLE.best(draft_vocab.widened(narrow), rows, 4)
        assert [best.token_ids for best in wanted] == [best.token_ids for best in wide]
        for best, other in zip(found, wanted, strict=True):
            assert (best.token_ids, best.error) == (other.token_ids, other.error)
            assert best.scores == pytest.approx(other.scores, abs=1e-4)
            assert set(best.token_ids) <= set(ids.tolist())


def test_the_best_of_a_greedy_row_are_its_greatest_logits(sampler: NativeSampler) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0, -1.0], [0.0, NAN, 0.0, 0.0, 0.0]])
    row = DraftedRow(array("q", [0]), sampling_of(temperature=0.0))
    first, second = sampler.best(logits, [row, row], 3)
    assert first == Best((1, 2, 3), (5.0, 5.0, 2.0))
    assert second == Best((), (), NOT_FINITE)
    with pytest.raises(ValueError, match="1 rows, with num_best 3"):
        sampler.best(logits, [row], 3)


# ---- drafts ------------------------------------------------------------------------------------


def test_drafts_are_followed_as_torch_follows_them(sampler: NativeSampler) -> None:
    rng, vocab = random.Random(5), 61
    logits = logits_of(900, vocab, 4.0)
    rows, at = list[DraftedRow](), 0
    while at + 8 < 900:
        form = random_wishes(rng, vocab) | {"logprobs": rng.choice([None, None, 2])}
        if rng.random() < 0.3:
            form |= {"constraint": Countdown(vocab, rng.choice([3, 99])), "min_tokens": 2}
        depth = rng.randrange(6)
        draft = best_of(logits[at : at + depth], rng)
        tokens = array("q", [rng.randrange(vocab) for _ in range(4)])
        rows.append(DraftedRow(tokens, sampling_of(rng.getrandbits(64), **form), draft))
        at += depth + 1
    logits = logits[:at]
    logits[::37, 0] = NAN
    found = sampler.verify(logits, rows)
    assert found == ORACLE.verify(logits, rows)
    assert {type(each.error) for each in found} == {type(None), str, Refusal}
    assert max(each.num_accepted for each in found) >= 4


def test_trees_are_followed_as_torch_follows_them(sampler: NativeSampler) -> None:
    rng, vocab = random.Random(6), 61
    logits = logits_of(1500, vocab, 4.0)
    rows, at = list[DraftedRow](), 0
    while at + 20 < 1500:
        form = random_wishes(rng, vocab) | {"logprobs": rng.choice([None, None, 2])}
        if rng.random() < 0.3:
            form |= {"constraint": Countdown(vocab, rng.choice([3, 99])), "min_tokens": 2}
        tokens = array("q", [rng.randrange(vocab) for _ in range(4)])
        paths = [best_of(logits[at : at + rng.randrange(1, 5)], rng) for _ in range(4)]
        sampling = sampling_of(rng.getrandbits(64), **form)
        said = list[int]()  # a path that comes true, if no logits are spoilt
        for _ in range(3):
            (choice,) = ORACLE.sample(logits[at : at + 1], [DraftedRow(tokens, sampling, said)])
            said.append(max(0, choice.token_id))
        draft = tree_of([*paths[:2], said, *paths[2:]])
        row = DraftedRow(tokens, sampling, draft.token_ids, draft.parents)
        logits[at + 1 : at + len(draft.token_ids) + 1] = logits[at]
        rows.append(row)
        at += len(draft.token_ids) + 1
    logits = logits[:at]
    logits[::37, 0] = NAN
    found = sampler.verify(logits, rows)
    assert found == ORACLE.verify(logits, rows)
    assert max(each.num_accepted for each in found) >= 3
    assert any(each.path and each.path[-1] >= len(each.path) for each in found)


def test_a_constraint_is_asked_about_no_place_that_is_not_reached(sampler: NativeSampler) -> None:
    constraint, logits = Countdown(12), torch.zeros(5, 12)
    logits[range(5), [11, 3, 4, 5, 6]] = 3.0
    sampling = sampling_of(temperature=0.0, constraint=constraint)
    row = DraftedRow(array("q", (0, 0)), sampling, (0, 3, 9, 5))
    assert sampler.verify(logits, [row]) == [Verified((0, 3, 4), (0, 1))]
    assert constraint.asked == [0, 1, 2]


def test_what_a_constraint_fails_with_is_the_requests_own_fault(sampler: NativeSampler) -> None:
    sampling = sampling_of(temperature=0.0, constraint=Countdown(12, fails_at=1))
    rows = [
        DraftedRow(array("q", (0, 0)), sampling, (0,)),
        DraftedRow(array("q", (0,)), sampling_of(temperature=0.0)),
    ]
    first, second = sampler.verify(torch.zeros(3, 12), rows)
    assert (first.token_ids, first.num_accepted, first.error) == ((0,), 1, "no way on")
    assert isinstance(first.error, Refusal)
    assert second == Verified((0,), ())


@pytest.mark.parametrize(("num_allowed", "chosen"), [(1, 0), (2, 1)])
def test_an_answer_that_must_end_may_be_shorter_than_min_tokens(
    sampler: NativeSampler, num_allowed: int, chosen: int
) -> None:
    """At output 10 - n the constraint allows the first n ids, of which 0 ends the answer."""
    tokens = array("q", [5] * (PROMPT_LEN + 10 - num_allowed))
    sampling = sampling_of(
        temperature=0.0, constraint=Countdown(12), min_tokens=50, stop_ids=frozenset({0})
    )
    logits = torch.arange(12.0, 0.0, -1.0)[None]
    assert sampler.sample(logits, [DraftedRow(tokens, sampling)]) == [SampledToken(chosen)]


def test_a_mask_of_another_vocabulary_is_an_error_and_no_wild_read(sampler: NativeSampler) -> None:
    row = row_of(constraint=Countdown(11))
    with pytest.raises(ValueError, match="the mask has 11 tokens"):
        sampler.sample(torch.zeros(1, 12), [row])


def test_a_wrong_number_of_logits_is_refused(sampler: NativeSampler) -> None:
    row = DraftedRow(array("q", (0, 0)), sampling_of())
    with pytest.raises(ValueError, match="2 rows of logits for 1 drafts"):
        sampler.verify(torch.zeros(2, 5), [row])
    assert sampler.verify(torch.zeros(0, 5), []) == []


# ---- errors and edges --------------------------------------------------------------------------


SOME_WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9},
    {"top_k": 2},
    {"allowed_token_ids": [0]},
]


@pytest.mark.parametrize("vocab", [5, 16, 77])
@pytest.mark.parametrize("form", SOME_WISHES, ids=str)
@pytest.mark.parametrize("bad", [INF, NAN, -NAN])
def test_logits_that_are_not_finite_fail_their_own_request_only(
    sampler: NativeSampler, bad: float, form: dict[str, Any], vocab: int
) -> None:
    logits = logits_of(3, vocab)
    rows = [row_of(seed, **form) for seed in range(3)]
    healthy = sampler.sample(logits, rows)
    for place in (0, vocab - 1):
        broken = logits.clone()
        broken[1, place] = bad
        assert sampler.sample(broken, rows) == [
            healthy[0],
            SampledToken(-1, NOT_FINITE),
            healthy[2],
        ]
    logits[1] = -INF
    assert sampler.sample(logits, rows)[1] == SampledToken(-1, NOT_FINITE)


def test_a_request_that_bans_every_token_fails_alone(sampler: NativeSampler) -> None:
    banned = row_of(allowed_token_ids=[0], bad_words_ids=((0,),))
    logits = torch.tensor([[3.0, 1.0, -INF]] * 2)
    found = sampler.sample(logits, [banned, row_of(temperature=0.0)])
    assert found == [SampledToken(-1, ALL_BANNED), SampledToken(0)]


def test_ids_outside_the_vocabulary_fail_their_own_request_only(sampler: NativeSampler) -> None:
    rows = [row_of(logit_bias={5: 1.0}), row_of(logit_bias={4: 99.0})]
    logits = torch.zeros(2, 5)
    failed, served = sampler.sample(logits, rows)
    assert failed == ORACLE.sample(logits, rows)[0]
    assert failed.error is not None
    assert "not 5" in failed.error
    assert served == SampledToken(4)
    logits[0, 0] = NAN
    assert sampler.sample(logits, rows)[0] == SampledToken(-1, NOT_FINITE)


def test_what_is_known_of_a_request_is_known_of_one_width_of_logits(
    sampler: NativeSampler,
) -> None:
    row = row_of(logit_bias={5: 1.0})
    for width in (8, 4, 8):
        [choice] = sampler.sample(logits_of(1, width), [row])
        assert (choice.error is None) == (width == 8)


def test_tiny_temperatures_are_greedy_and_huge_ones_know_no_favourite(
    sampler: NativeSampler,
) -> None:
    logits = logits_of(400, 50, 3.0)
    greedy = sampler.sample(logits, [row_of(temperature=0.0)] * 400)
    assert [c.token_id for c in greedy] == logits.argmax(-1).tolist()
    for temperature, top_p in ((1e-300, 1.0), (1e-9, 1.0), (1e-9, 0.999)):
        rows = [row_of(seed, temperature=temperature, top_p=top_p) for seed in range(400)]
        assert sampler.sample(logits, rows) == greedy
    rows = [row_of(seed, temperature=100.0) for seed in range(400)]
    drawn = sampler.sample(logits / 1e20, rows)
    assert len({choice.token_id for choice in drawn}) == 50


def test_ties_go_to_the_lowest_id_and_zeros_of_either_sign_tie(sampler: NativeSampler) -> None:
    logits = torch.full((1, 200), -1.0)
    logits[0, [150, 151, 70]] = torch.tensor([0.0, 0.0, -0.0])
    assert sampler.sample(logits, [row_of(temperature=0.0)]) == [SampledToken(70)]


def test_half_precision_and_strided_logits_are_accepted_and_only_read(
    sampler: NativeSampler,
) -> None:
    logits = logits_of(40, 33)
    rows = [row_of(seed, presence_penalty=1.0) for seed in range(20)]
    before = logits.clone()
    expected = ORACLE.sample(logits[::2].bfloat16(), rows)
    assert sampler.sample(logits[::2].bfloat16(), rows) == expected
    assert sampler.sample(logits[::2], rows) == ORACLE.sample(logits[::2], rows)
    assert torch.equal(logits, before)


def test_as_many_rows_as_logits_are_wanted(sampler) -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 3 tokens"):
        sampler.sample(logits_of(2, 9), [row_of(), row_of(), row_of()])
