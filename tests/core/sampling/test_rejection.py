"""Rejection sampling: exact in distribution, though not in its tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.sampling import rejection
from foretoken.core.sampling.logits_processors import SampleRow
from foretoken.core.sampling.rejection import SampledDraft, draw, probabilities, verify_by_rejection
from foretoken.core.sampling.verifier import (
    ALL_BANNED,
    NOT_FINITE,
    Verified,
    VerifyRequest,
    sample,
    verify,
)

pytestmark = pytest.mark.slow

VOCAB, DEPTH = 8, 2  # tokens: in the vocabulary, per draft
PROMPT = (4, 7)
GENERATOR = torch.Generator().manual_seed(1)
# The toy models look their logits up by the last token; the draft is a blurred target.
TARGET = torch.randn(VOCAB, VOCAB, generator=GENERATOR) * 1.4
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=GENERATOR)
Drafts = tuple[list[tuple[int, ...]], list[torch.Tensor | None]]


def make_sampling(seed: int = 1, **form: Any) -> SamplingMetadata:
    bad_words = form.pop("bad_words_ids", ())
    params = TokenSamplingParams(**form)
    return SamplingMetadata(
        params=params, seed=seed, prompt_len=len(PROMPT), bad_words_ids=bad_words
    )


def lm_drafts(outputs: Sequence[array[int]], samplings: Sequence[SamplingMetadata]) -> Drafts:
    """Drawn from the draft model with noise of its own."""
    tails: list[tuple[int, ...]] = [()] * len(outputs)
    probs = []
    for _ in range(DEPTH):
        rows = [SampleRow(*each) for each in zip(outputs, samplings, tails, strict=True)]
        last = [[*tokens[-1:], *tail][-1] for tokens, tail in zip(outputs, tails, strict=True)]
        choices, drawn_from = draw(DRAFT[last], rows)
        tails = [(*tail, c.token_id) for tail, c in zip(tails, choices, strict=True)]
        probs.append(drawn_from)
    return tails, list(torch.stack(probs, 1))


def certain_drafts(outputs: Sequence[array[int]], samplings: Sequence[SamplingMetadata]) -> Drafts:
    """Draft as a look-up does: by the tokens alone; some of it is nonsense."""
    drafts = [(int(DRAFT[tokens[-1]].argmax()), (tokens[-1] * 3) % VOCAB) for tokens in outputs]
    return drafts, [None] * len(outputs)


def peeking_drafts(outputs: Sequence[array[int]], samplings: Sequence[SamplingMetadata]) -> Drafts:
    """Negative control: a draft is dropped after a look at it."""
    tails, probs = lm_drafts(outputs, samplings)
    keep = [0 if tail[0] in (0, 1, 5) else len(tail) for tail in tails]
    short = [None if p is None else p[:count] for p, count in zip(probs, keep, strict=True)]
    return [tail[:count] for tail, count in zip(tails, keep, strict=True)], short


Drafter = Callable[[Sequence["array[int]"], Sequence[SamplingMetadata]], Drafts]


def decode(
    samplings: Sequence[SamplingMetadata], drafter: Drafter, length: int = 3
) -> list[list[int]]:
    """The first ``length`` tokens of a stream for each sampling, all of them in one batch."""
    streams = [array("q", PROMPT) for _ in samplings]
    while short := [i for i, s in enumerate(streams) if len(s) < len(PROMPT) + length]:
        asked, theirs = [streams[i] for i in short], [samplings[i] for i in short]
        drafts, probs = drafter(asked, theirs)
        rows = [VerifyRequest(*each) for each in zip(asked, drafts, theirs, strict=True)]
        for stream, result in zip(asked, step(rows, probs), strict=True):
            assert result.error is None
            stream.extend(result.token_ids)
    return [stream[len(PROMPT) : len(PROMPT) + length].tolist() for stream in streams]


def step(rows: Sequence[VerifyRequest], probs: Sequence[torch.Tensor | None]) -> list[Verified]:
    last = [token for row in rows for token in (row.tokens[-1], *row.draft)]
    return verify_by_rejection(TARGET[last], rows, probs)


def joint(length: int, **form: Any) -> torch.Tensor:
    """Exact probabilities of the first ``length`` tokens, float64 [vocab, ...]."""
    result = torch.zeros([VOCAB] * length, dtype=torch.float64)
    for path in product(range(VOCAB), repeat=length):
        chance = 1.0
        for at, token in enumerate(path):
            chance *= float(next_probs(path[:at], **form)[token])
        result[path] = chance
    return result


CACHE: dict[str, torch.Tensor] = {}


def next_probs(tail: tuple[int, ...], **form: Any) -> torch.Tensor:
    """By hand: temperature, top-k, top-p and a frequency penalty."""
    key = f"{tail}{form}"
    if key not in CACHE:
        values = TARGET[[*PROMPT, *tail][-1]].double()
        counts = torch.bincount(torch.tensor(tail, dtype=torch.int64), minlength=VOCAB)
        values = values - counts * form.get("frequency_penalty", 0.0)
        values = values / form.get("temperature", 1.0)
        lowest = values.sort(descending=True).values[form.get("top_k", VOCAB) - 1]
        probs = torch.where(values >= lowest, values, -math.inf).softmax(0)
        ranked, order = probs.sort(descending=True)
        probs[order[ranked.cumsum(0) - ranked >= form.get("top_p", 1.0)]] = 0.0
        CACHE[key] = probs / probs.sum()
    return CACHE[key]


def deviation(outputs: Sequence[Sequence[int]], **form: Any) -> float:
    """Sigmas by which the chi-square of the outputs' joint distribution is too large."""
    length = len(outputs[0])
    expected = joint(length, **form).flatten() * len(outputs)
    places = torch.tensor(outputs) @ torch.tensor([VOCAB**i for i in reversed(range(length))])
    counts = torch.bincount(places, minlength=VOCAB**length).double()
    assert int(counts[expected == 0].sum()) == 0
    rare = expected < 5  # pooled into one cell
    cells = [(counts[~rare], expected[~rare]), (counts[rare].sum(), expected[rare].sum())]
    chi = sum(float(((c - e) ** 2 / e.clamp(min=1e-9)).sum()) for c, e in cells)
    df = int((~rare).sum())
    return ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def many(num_samples: int, **form: Any) -> list[SamplingMetadata]:
    base = make_sampling(**form)
    return [
        SamplingMetadata(params=base.params, seed=seed * 0x9E3779B1, prompt_len=len(PROMPT))
        for seed in range(num_samples)
    ]


@pytest.mark.parametrize("drafter", [lm_drafts, certain_drafts], ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    ("num_samples", "form"),
    [
        (10_000, {}),
        (4_000, {"temperature": 0.6}),
        (4_000, {"temperature": 1.4, "top_k": 4}),
        (4_000, {"temperature": 0.8, "top_p": 0.8}),
        (4_000, {"frequency_penalty": 1.5}),
    ],
    ids=str,
)
def test_three_tokens_have_exactly_the_targets_joint_distribution(
    num_samples: int, form: dict[str, Any], drafter: Drafter
) -> None:
    """Mistakes of the method are noticed without a form; a form's own ones are coarse."""
    assert deviation(decode(many(num_samples, **form), drafter), **form) < 4


def test_two_tokens_have_exactly_the_targets_joint_distribution() -> None:
    """The sample is large enough to notice one wrong recovery in fifty."""
    assert deviation(decode(many(50_000), lm_drafts, length=2)) < 4


def test_the_distribution_test_notices_a_draft_dropped_after_a_look_at_it() -> None:
    assert deviation(decode(many(5_000), peeking_drafts)) > 10


def test_the_distribution_test_notices_a_recovery_from_the_whole_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rejection, "_remains", lambda target, drawn_from: target)
    assert deviation(decode(many(5_000), lm_drafts)) > 10


def test_the_distribution_test_notices_drafts_drawn_with_the_verifiers_own_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rejection, "purpose_seed", lambda seed, purpose: seed)
    assert deviation(decode(many(20_000), lm_drafts)) > 10


# ---- acceptance --------------------------------------------------------------------------------


def first_probs(table: torch.Tensor, **form: Any) -> torch.Tensor:
    row = SampleRow(array("q", PROMPT), make_sampling(**form))
    return probabilities(table[PROMPT[-1]][None], [row])[0][0]


@pytest.mark.parametrize("form", [{}, {"temperature": 0.6}, {"top_k": 5}], ids=str)
@pytest.mark.parametrize("drafter", [lm_drafts, certain_drafts], ids=lambda d: d.__name__)
def test_drafts_are_accepted_as_often_as_theory_says(
    form: dict[str, Any], drafter: Drafter
) -> None:
    """sum_i min(p_i, q_i) (arXiv 2211.17192); of a draft that is certain, p of its token."""
    samplings = many(10_000, **form)
    outputs = [array("q", PROMPT)] * len(samplings)
    drafts, probs = drafter(outputs, samplings)
    rows = [VerifyRequest(*each) for each in zip(outputs, drafts, samplings, strict=True)]
    share = sum(r.num_accepted > 0 for r in step(rows, probs)) / len(rows)
    p, q = first_probs(TARGET, **form), first_probs(DRAFT, **form)
    rate = float(torch.minimum(p, q).sum() if probs[0] is not None else p[drafts[0][0]])
    assert 0.02 < rate < 0.98
    assert abs(share - rate) < 4 * math.sqrt(rate * (1 - rate) / len(rows))


def test_a_model_that_drafts_for_itself_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.DRAFT", TARGET)
    samplings = many(3_000, top_p=0.9)
    outputs = [array("q", PROMPT)] * len(samplings)
    drafts, probs = lm_drafts(outputs, samplings)
    rows = [VerifyRequest(*each) for each in zip(outputs, drafts, samplings, strict=True)]
    assert sum(result.num_accepted for result in step(rows, probs)) >= DEPTH * len(rows) - 1


# ---- by hand -----------------------------------------------------------------------------------

WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 3, "temperature": 0.7},
    {"logit_bias": {3: 2.0}, "min_p": 0.05},
    {"repetition_penalty": 1.4, "top_p": 0.9},
    {"allowed_token_ids": [1, 2, 5], "bad_words_ids": ((2,),)},
]


def random_rows(num_rows: int = 30) -> tuple[list[VerifyRequest], list[torch.Tensor | None]]:
    samplings = [make_sampling(seed, **WISHES[seed % len(WISHES)]) for seed in range(num_rows)]
    outputs = [array("q", (*PROMPT, seed % VOCAB)) for seed in range(num_rows)]
    drafts, probs = lm_drafts(outputs, samplings)
    for index in range(0, num_rows, 4):
        drafts[index], probs[index] = drafts[index][: index % 3], None
    return [VerifyRequest(*each) for each in zip(outputs, drafts, samplings, strict=True)], probs


def test_a_row_does_not_depend_on_what_rides_beside_it() -> None:
    rows, probs = random_rows()
    together = step(rows, probs)
    alone = [step([row], [p])[0] for row, p in zip(rows, probs, strict=True)]
    assert together == alone == step(rows, probs)
    assert {result.num_accepted for result in together} == {0, 1, 2}


def test_a_guess_is_accepted_by_its_probability_and_never_recovered_when_refused() -> None:
    rows = [VerifyRequest(array("q", PROMPT), (2,), make_sampling(seed)) for seed in range(1000)]
    logits = torch.tensor([0.2, 0.3, 0.3, 0.2]).log().expand(2 * len(rows), -1)
    results = verify_by_rejection(logits, rows, [None] * len(rows))
    refused = [result for result in results if not result.num_accepted]
    assert 0.26 < 1 - len(refused) / len(rows) < 0.34
    assert {result.token_ids for result in refused} == {(0,), (1,), (3,)}


def test_the_block_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, probs = random_rows()
    at_once = step(rows, probs)
    monkeypatch.setattr(rejection, "_BLOCK", 3 * VOCAB)
    assert step(rows, probs) == at_once


@pytest.mark.parametrize("drafter", [lm_drafts, certain_drafts], ids=lambda d: d.__name__)
def test_greedy_tokens_are_those_of_the_coupled_verifier(drafter: Drafter) -> None:
    samplings = [make_sampling(seed, temperature=0.0) for seed in range(VOCAB)]
    outputs = [array("q", (*PROMPT, token)) for token in range(VOCAB)]
    drafts, probs = drafter(outputs, samplings)
    rows = [VerifyRequest(*each) for each in zip(outputs, drafts, samplings, strict=True)]
    last = [token for row in rows for token in (row.tokens[-1], *row.draft)]
    results = step(rows, probs)
    assert results == verify(TARGET[last], rows)
    assert {result.num_accepted for result in results} >= {0, 1}


def test_without_drafts_the_tokens_are_those_of_the_coupled_verifier() -> None:
    samplings = [make_sampling(seed, **WISHES[seed % len(WISHES)]) for seed in range(60)]
    rows = [VerifyRequest(array("q", (*PROMPT, s.seed % VOCAB)), (), s) for s in samplings]
    logits = TARGET[[row.tokens[-1] for row in rows]]
    assert verify_by_rejection(logits, rows, [None] * 60) == verify(logits, rows)


def test_a_drafters_draws_are_not_the_verifiers() -> None:
    """Else a draft would tell what is recovered when it is refused."""
    rows = [SampleRow(array("q", PROMPT), s) for s in many(4_000)]
    logits = DRAFT[PROMPT[-1]].expand(len(rows), -1)
    pairs = zip(draw(logits, rows)[0], sample(logits, rows), strict=True)
    same = sum(a == b for a, b in pairs) / len(rows)
    rate = float(first_probs(DRAFT).square().sum())
    assert abs(same - rate) < 4 * math.sqrt(rate * (1 - rate) / len(rows))


def test_the_processed_distribution_is_what_the_sampler_draws_from() -> None:
    form = {"temperature": 0.8, "top_p": 0.8, "logit_bias": {3: 1.0}}
    rows = [SampleRow(array("q", PROMPT), s) for s in many(20_000, **form)]
    logits = TARGET[PROMPT[-1]].expand(len(rows), -1)
    drawn = torch.tensor([choice.token_id for choice in sample(logits, rows)])
    share = torch.bincount(drawn, minlength=VOCAB) / len(rows)
    (probs,), (error,) = probabilities(logits[:1], rows[:1])
    assert error is None
    assert torch.equal(share == 0, probs == 0)
    assert torch.allclose(share.double(), probs, atol=4 * 0.5 / math.sqrt(len(rows)))


@pytest.mark.parametrize("bad", [VOCAB, -1, -VOCAB, 2**40])
def test_a_draft_token_outside_the_vocabulary_is_never_accepted(bad: int) -> None:
    logits = TARGET[[0, 0, 0]]
    row = VerifyRequest(array("q", PROMPT), (bad, 1), make_sampling())
    for probs in (None, torch.full((2, VOCAB), 1 / VOCAB)):
        (result,) = verify_by_rejection(logits, [row], [probs])
        assert (len(result.token_ids), result.num_accepted) == (1, 0)
        assert 0 <= result.token_ids[0] < VOCAB


def test_draft_probabilities_that_are_no_numbers_are_never_accepted() -> None:
    rows = [VerifyRequest(array("q", PROMPT), (1,), s) for s in many(200)]
    probs = [torch.full((1, VOCAB), math.nan)] * len(rows)
    results = verify_by_rejection(TARGET[[0, 1] * len(rows)], rows, probs)
    assert all(0 <= token_id < VOCAB for result in results for token_id in result.token_ids)


def test_where_rounding_leaves_nothing_to_recover_the_target_is_drawn_from() -> None:
    probs = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    drafted = torch.tensor([[0.25, 0.75 + 1e-9], [0.25, 0.75]], dtype=torch.float64)
    assert torch.equal(
        rejection._remains(probs, drafted), torch.tensor([[0.25, 0.75], [0.25, 0.0]]).double()
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    row = VerifyRequest(array("q", PROMPT), (1,), make_sampling())
    with pytest.raises(ValueError, match="draft probabilities of shape"):
        verify_by_rejection(TARGET[[0, 0]], [row], [torch.zeros(2, VOCAB)])
    with pytest.raises(ValueError, match="draft probabilities of shape"):
        verify_by_rejection(TARGET[[0, 0]], [row], [torch.zeros(1, VOCAB - 1)])
    with pytest.raises(ValueError, match="1 rows of logits for 1 drafts"):
        verify_by_rejection(TARGET[[0]], [row], [None])
    with pytest.raises(ValueError, match="zip"):
        verify_by_rejection(TARGET[[0, 0]], [row], [])


@pytest.mark.parametrize("at", range(DEPTH + 1))
def test_logits_that_are_not_finite_end_their_own_request_where_they_decide(at: int) -> None:
    rows, probs = random_rows(6)
    last = [token for row in rows for token in (row.tokens[-1], *row.draft)]
    logits = TARGET[last]
    healthy = verify_by_rejection(logits, rows, probs)
    index = next(i for i, result in enumerate(healthy) if result.num_accepted == DEPTH)
    start = sum(len(row.draft) + 1 for row in rows[:index])
    logits[start + at, 2] = math.nan
    results = verify_by_rejection(logits, rows, probs)
    run = healthy[index].token_ids[:at]
    assert results[index] == Verified(run, tuple(range(at)), error=NOT_FINITE)
    assert results[:index] + results[index + 1 :] == healthy[:index] + healthy[index + 1 :]


def test_a_request_that_bans_every_token_fails_alone() -> None:
    banned = make_sampling(allowed_token_ids=[0], bad_words_ids=((0,),))
    rows = [VerifyRequest(array("q", PROMPT), (1,), s) for s in (banned, make_sampling())]
    results = verify_by_rejection(TARGET[[0, 1, 0, 1]], rows, [None, None])
    assert results[0] == Verified((), (), error=ALL_BANNED)
    assert results[1].error is None


def test_a_draft_model_that_breaks_down_draws_nothing() -> None:
    logits = TARGET[:2].clone()
    logits[0, 0] = math.nan
    choices, probs = draw(logits, [SampleRow(array("q", PROMPT), make_sampling())] * 2)
    assert choices[0] == (-1, NOT_FINITE)
    assert choices[1].error is None
    assert float(probs[1].sum()) == pytest.approx(1.0)


def test_logprobs_are_those_of_the_unprocessed_logits() -> None:
    draft = (int(TARGET[7].argmax()), 3)
    sampling = make_sampling(logprobs=2, temperature=0.0)
    logits = TARGET[[7, draft[0], 3]]
    row = VerifyRequest(array("q", PROMPT), draft, sampling)
    assert (
        verify_by_rejection(logits, [row], [None])[0].logprobs == verify(logits, [row])[0].logprobs
    )


def test_the_logits_are_only_read() -> None:
    rows, probs = random_rows()
    logits = TARGET[[token for row in rows for token in (row.tokens[-1], *row.draft)]]
    before = logits.clone()
    verify_by_rejection(logits, rows, probs)
    assert torch.equal(logits, before)


def test_a_sampled_draft_equals_itself_alone() -> None:
    one, other = (SampledDraft((1,), ("lm",), probs=torch.rand(1, VOCAB)) for _ in range(2))
    assert one != other
    assert SampledDraft.of((1,), "lm").probs is None


def test_rejection_goes_with_a_fixed_depth_alone() -> None:
    for depth in (0, 3, "off"):
        assert EngineConfig(verify="rejection", speculation=depth).verify == "rejection"  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"--speculation K.*biases the output") as caught:
        EngineConfig(verify="rejection")
    assert caught.value.param == "verify"
