from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.sampling import verifier as verify_module
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.gumbel import gumbel_rows
from foretoken.core.sampling.logits_processors import apply_processors, scaled, truncate
from foretoken.core.sampling.verifier import (
    ALL_BANNED,
    NOT_FINITE,
    Best,
    SampledToken,
    Verified,
    best,
    sample,
    verify,
)

INF, NAN = float("inf"), float("nan")
VOCAB = 12
GENERATOR = torch.Generator().manual_seed(0)
# The toy models look their logits up by the last two tokens; the draft is a blurred target.
TARGET = torch.randn(VOCAB, VOCAB, VOCAB, generator=GENERATOR) * 1.6
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, VOCAB, generator=GENERATOR) * 1.5
PROMPT = (4, 7)
NUM_OUT = 10  # tokens per stream


def make_sampling(seed: int = 1, **form: Any) -> SamplingMetadata:
    params = {k: v for k, v in form.items() if k not in ("stop_ids", "bad_words_ids")}
    return SamplingMetadata(
        params=TokenSamplingParams(**params),
        seed=seed,
        prompt_len=len(PROMPT),
        stop_ids=frozenset(form.get("stop_ids", ())),
        bad_words_ids=form.get("bad_words_ids", ()),
    )


def greedy_row(draft: Sequence[int], **form: Any) -> DraftedRow:
    return DraftedRow(array("q", PROMPT), make_sampling(temperature=0.0, **form), draft)


def one_hot(*winners: int, vocab: int = 5) -> torch.Tensor:
    """Logits [len(winners), vocab] whose greedy tokens are ``winners``."""
    logits = torch.zeros(len(winners), vocab)
    logits[range(len(winners)), list(winners)] = 3.0
    return logits


@dataclass
class Stream:
    """A request that decodes on the toy model."""

    sampling: SamplingMetadata
    tokens: array[int] = field(default_factory=lambda: array("q", PROMPT))
    expected: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(PROMPT) :].tolist()


def target_logits(rows: Sequence[DraftedRow], table: torch.Tensor = TARGET) -> torch.Tensor:
    paths = [[*row.tokens[-2:], *row.draft[:j]] for row in rows for j in range(len(row.draft) + 1)]
    last = torch.tensor([path[-2:] for path in paths]).remainder(VOCAB)
    return table[last[:, 0], last[:, 1]]


def step(streams: Sequence[Stream], drafts: Sequence[Sequence[int]]) -> list[Verified]:
    rows = [DraftedRow(s.tokens, s.sampling, d) for s, d in zip(streams, drafts, strict=True)]
    results = verify(target_logits(rows), rows)
    for stream, result in zip(streams, results, strict=True):
        assert result.error is None
        stream.tokens.extend(result.token_ids)
    return results


def plain(sampling: SamplingMetadata, num_tokens: int = NUM_OUT) -> list[int]:
    stream = Stream(sampling)
    for _ in range(num_tokens):
        step([stream], [()])
    return stream.output


Drafter = Callable[[Stream, random.Random], Sequence[int]]


def no_draft(stream: Stream, rng: random.Random) -> Sequence[int]:
    return ()


def random_draft(stream: Stream, rng: random.Random) -> Sequence[int]:
    """Nonsense, some of it outside the vocabulary."""
    return [rng.choice([*range(VOCAB), VOCAB, -1, 2**40]) for _ in range(rng.randrange(6))]


def chain(stream: Stream, rng: random.Random, table: torch.Tensor = DRAFT) -> list[int]:
    """The coupled drafter: another model, the same processors, the same noise."""
    tail: list[int] = []
    for _ in range(4):
        last = [*stream.tokens[-2:], *tail][-2:]
        row = DraftedRow(stream.tokens, stream.sampling, tuple(tail))
        tail.append(sample(table[last[0], last[1]][None], [row])[0].token_id)
    return tail


def perfect(stream: Stream, rng: random.Random) -> Sequence[int]:
    num_out = len(stream.output)
    return stream.expected[num_out : num_out + 3]


def always_wrong(stream: Stream, rng: random.Random) -> Sequence[int]:
    return [(token_id + 1) % VOCAB for token_id in perfect(stream, rng)]


def peeking_pruner(stream: Stream, rng: random.Random) -> Sequence[int]:
    """Chooses what to verify by looking at the drafted token and at what the target will say."""
    draft = chain(stream, rng)
    keep = next((i for i, token_id in enumerate(draft) if token_id % 3 == 0), len(draft))
    return draft[:keep] if stream.expected[len(stream.output)] % 2 else draft[: keep // 2]


DRAFTERS: list[Drafter] = [no_draft, random_draft, chain, perfect, always_wrong, peeking_pruner]
WISHES: list[dict[str, Any]] = [
    {},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 6, "min_p": 0.05, "top_p": 0.9},
    {"logit_bias": {3: -9.0, 5: 2.0}},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"allowed_token_ids": [1, 2, 3, 5, 8]},
    {"bad_words_ids": ((2,), (7, 3), (4, 7, 1))},
    {"min_tokens": 6, "stop_ids": (0, 1, 2, 3, 4, 5)},
    {"top_p": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {1: 1.0}},
]
SAMPLINGS = [
    make_sampling(seed, temperature=temperature, **form)
    for seed, (temperature, form) in enumerate((t, w) for t in (0.0, 0.7, 1.0) for w in WISHES)
]


@pytest.fixture(scope="module")
def plain_outputs() -> list[list[int]]:
    return [plain(sampling, NUM_OUT + 4) for sampling in SAMPLINGS]


def decode_all(streams: list[Stream], drafter: Drafter, batch: int, rng: random.Random) -> None:
    """Run ``batch`` streams at a time, admitted and ordered at random."""
    waiting, running = rng.sample(streams, len(streams)), list[Stream]()
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        rng.shuffle(running)
        step(running, [drafter(stream, rng) for stream in running])
        running = [stream for stream in running if len(stream.output) < NUM_OUT]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.__name__)
def test_streams_equal_plain_decoding(
    drafter: Drafter, batch: int, plain_outputs: list[list[int]]
) -> None:
    pairs = zip(SAMPLINGS, plain_outputs, strict=True)
    streams = [Stream(sampling, expected=expected) for sampling, expected in pairs]
    decode_all(streams, drafter, batch, random.Random(batch))
    for stream in streams:
        assert stream.output == stream.expected[: len(stream.output)], stream.sampling.params


def test_the_streams_of_the_toy_model_differ_between_parameters(
    plain_outputs: list[list[int]],
) -> None:
    """Else the equality above would not show that a parameter was applied at all."""
    for temperature in range(3):
        outputs = plain_outputs[temperature * len(WISHES) : (temperature + 1) * len(WISHES)]
        changed = sum(output != outputs[0] for output in outputs)
        assert changed >= (7 if temperature == 0 else 11)


@pytest.mark.parametrize("sampling", SAMPLINGS[::4], ids=str)
def test_a_perfect_draft_yields_depth_plus_one_tokens_and_a_wrong_one_exactly_one(
    sampling: SamplingMetadata,
) -> None:
    expected = plain(sampling, 20)
    stream, rng = Stream(sampling, expected=expected), random.Random(0)
    while len(stream.output) <= 16:
        (result,) = step([stream], [perfect(stream, rng)])
        assert (len(result.token_ids), result.num_accepted) == (4, 3)
    stream = Stream(sampling, expected=expected)
    while len(stream.output) <= 16:
        (result,) = step([stream], [always_wrong(stream, rng)])
        assert (len(result.token_ids), result.num_accepted) == (1, 0)


# ---- distribution ------------------------------------------------------------------------------


def exact_logprobs(tail: Sequence[int], **form: Any) -> torch.Tensor:
    """Log-probabilities [vocab] of the token behind PROMPT and ``tail``, in float64."""
    last = [*PROMPT, *tail][-2:]
    row = DraftedRow(array("q", PROMPT), make_sampling(**form), tuple(tail))
    values = TARGET[last[0], last[1]][None].clone()
    apply_processors(values, [row])
    kept, ids = truncate(scaled(values, [row]), [row])
    dense = torch.full((VOCAB,), -INF, dtype=torch.float64)
    dense[ids[0]] = kept[0].double()
    return dense.log_softmax(0)


def joint_deviation(pairs: torch.Tensor, **form: Any) -> float:
    """Sigmas by which the chi-square of token ``pairs`` [num_samples, 2] is too large."""
    first = exact_logprobs((), **form)
    second = torch.stack([exact_logprobs((a,), **form) for a in range(VOCAB)])
    expected = (first[:, None] + second).exp().flatten() * len(pairs)
    counts = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).double()
    assert int(counts[expected == 0].sum()) == 0
    rare = expected < 5  # pooled into one cell
    cells = [(counts[~rare], expected[~rare]), (counts[rare].sum(), expected[rare].sum())]
    chi = sum(float(((c - e) ** 2 / e.clamp(min=1e-9)).sum()) for c, e in cells)
    df = int((~rare).sum())
    return ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def first_pairs(num_samples: int, **form: Any) -> torch.Tensor:
    """The first two output tokens of ``num_samples`` seeds, decoded with a coupled draft of one."""
    base, tokens = make_sampling(**form), array("q", PROMPT)
    samplings = [
        SamplingMetadata(params=base.params, seed=seed * 0x9E3779B1, prompt_len=len(PROMPT))
        for seed in range(num_samples)
    ]
    logits = DRAFT[PROMPT[0], PROMPT[1]].expand(num_samples, -1)
    drafts = [
        choice.token_id for choice in sample(logits, [DraftedRow(tokens, s) for s in samplings])
    ]
    rows = [DraftedRow(tokens, s, (d,)) for d, s in zip(drafts, samplings, strict=True)]
    outputs = [result.token_ids for result in verify(target_logits(rows), rows)]
    short = [i for i, output in enumerate(outputs) if len(output) == 1]
    rows = [DraftedRow(array("q", [*PROMPT, *outputs[i]]), samplings[i]) for i in short]
    for i, result in zip(short, verify(target_logits(rows), rows), strict=True):
        outputs[i] += result.token_ids
    assert 0.1 < len(short) / num_samples < 0.9  # both ways of decoding are in the sample
    return torch.tensor(outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_samples", "form"),
    [
        (50_000, {}),
        (20_000, {"temperature": 0.7, "top_p": 0.9, "top_k": 8, "min_p": 0.01}),
        (5_000, {"frequency_penalty": 1.0, "logit_bias": {3: 1.0}}),
    ],
    ids=str,
)
def test_two_tokens_have_exactly_the_targets_joint_distribution(
    num_samples: int, form: dict[str, Any]
) -> None:
    assert joint_deviation(first_pairs(num_samples, **form), **form) < 4


def test_the_distribution_test_notices_noise_that_is_used_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: the same noise at every position."""

    def stuck(rows: Sequence[DraftedRow], hashes: torch.Tensor) -> torch.Tensor:
        return gumbel_rows([(row.sampling.seed, 0) for row in rows], hashes)

    monkeypatch.setattr(verify_module, "_noise", stuck)
    assert joint_deviation(first_pairs(20_000)) > 10


def test_the_distribution_test_notices_a_lossy_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a draft passes when the target finds it likely (typical acceptance)."""
    take = verify_module._Walk.take

    def lenient(walk: verify_module._Walk, node: int, choice: SampledToken) -> None:
        drafted = walk._request.draft[node + 1 : node + 2]
        last = [*PROMPT, *walk._token_ids][-2:]
        if drafted and TARGET[last[0], last[1]].softmax(0)[drafted[0]] > 0.1:
            choice = SampledToken(drafted[0])
        take(walk, node, choice)

    monkeypatch.setattr(verify_module._Walk, "take", lenient)
    assert joint_deviation(first_pairs(20_000)) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [{}, {"temperature": 0.6}, {"top_k": 5, "temperature": 1.3}], ids=str
)
def test_coupled_drafts_are_accepted_as_often_as_theory_says(form: dict[str, Any]) -> None:
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) over the common support (arXiv 2408.07978)."""
    num_samples, base = 40_000, make_sampling(**form)
    rows = [
        DraftedRow(
            array("q", PROMPT), SamplingMetadata(params=base.params, seed=seed, prompt_len=2)
        )
        for seed in range(num_samples)
    ]
    drawn = []
    probs = []
    for table in (TARGET, DRAFT):
        logits = table[PROMPT[0], PROMPT[1]]
        drawn.append([choice.token_id for choice in sample(logits.repeat(num_samples, 1), rows)])
        kept, ids = truncate(scaled(logits[None], rows[:1]), rows[:1])
        dense = torch.full((VOCAB,), -INF, dtype=torch.float64)
        dense[ids[0]] = kept[0].double()
        probs.append(dense.softmax(0))
    p, q = probs
    common = [i for i in range(VOCAB) if p[i] > 0 and q[i] > 0]
    rate = sum(1 / float(torch.maximum(p / p[i], q / q[i]).sum()) for i in common)
    equal = sum(a == b for a, b in zip(*drawn, strict=True)) / num_samples
    assert 0.2 < rate < 0.95
    assert abs(equal - rate) < 4 * math.sqrt(rate * (1 - rate) / num_samples)


def test_siblings_of_one_prompt_do_not_repeat_each_other() -> None:
    outputs = [tuple(plain(make_sampling(seed), 8)) for seed in range(30)]
    assert len(set(outputs)) > 25


# ---- the verifier by hand ----------------------------------------------------------------------


def test_an_empty_draft_yields_one_bonus_token() -> None:
    (result,) = verify(one_hot(3), [greedy_row(())])
    assert result == Verified((3,), ())


def test_the_run_stops_at_the_first_mismatch_even_if_later_drafts_match() -> None:
    (result,) = verify(one_hot(1, 2, 3, 4), [greedy_row((1, 0, 3))])
    assert result == Verified((1, 2), (0,))


def test_a_wholly_accepted_draft_is_followed_by_the_bonus_token() -> None:
    (result,) = verify(one_hot(1, 2, 3), [greedy_row((1, 2))])
    assert result == Verified((1, 2, 3), (0, 1))


def test_rows_of_several_requests_are_told_apart() -> None:
    rows = [greedy_row((1,)), greedy_row(()), greedy_row((0, 0))]
    results = verify(one_hot(1, 2, 3, 4, 0, 1), rows)
    assert [r.token_ids for r in results] == [(1, 2), (3,), (4,)]


def test_no_rows_yield_nothing() -> None:
    assert verify(torch.zeros(0, 5), []) == []
    assert sample(torch.zeros(0, 5), []) == []


def test_a_wrong_number_of_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 drafts"):
        verify(torch.zeros(2, 5), [greedy_row(())])


@pytest.mark.parametrize("bad", [5, 6, -1, -5, 2**40, -(2**62)])
def test_a_draft_token_outside_the_vocabulary_is_never_accepted(bad: int) -> None:
    """An index of -1 would read the last token's logits and might be accepted."""
    form: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.01}]
    rows = [greedy_row((1, bad, 4), **w) for w in form]
    results = verify(one_hot(1, 4, 4, 4, 1, 4, 4, 4), rows)
    assert results == [Verified((1, 4), (0,))] * 2


def test_greedy_ties_go_to_the_lowest_id() -> None:
    (result,) = verify(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), [greedy_row(())])
    assert result.token_ids == (1,)


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(5)).mul(2).round()
    greedy = verify(logits, [greedy_row(())] * 200)
    sampling = make_sampling(temperature=5.0, top_k=1)
    drawn = verify(logits, [DraftedRow(array("q", PROMPT), sampling)] * 200)
    assert drawn == greedy


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(6)) * 10
    rows = [DraftedRow(array("q", PROMPT), make_sampling(s, temperature=1e-30)) for s in range(50)]
    assert verify(logits, rows) == verify(logits, [greedy_row(())] * 50)


@pytest.mark.parametrize("form", [{}, {"top_p": 0.9}, {"top_k": 9, "min_p": 0.01}], ids=str)
def test_a_low_temperature_sharpens_what_a_drafter_draws(form: dict[str, Any]) -> None:
    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(12))
    best = logits.argmax(-1).tolist()

    def num_best(temperature: float) -> int:
        samplings = [make_sampling(s, temperature=temperature, **form) for s in range(300)]
        rows = [DraftedRow(array("q", PROMPT), sampling) for sampling in samplings]
        drawn = [choice.token_id for choice in sample(logits, rows)]
        return sum(a == b for a, b in zip(drawn, best, strict=True))

    assert num_best(1.0) < num_best(0.5) < num_best(0.05) <= num_best(1e-6) == 300


BROKEN = [
    [0.0, NAN, 1.0, 0.0, 0.0],
    [NAN] * 5,
    [0.0, INF, 0.0, 0.0, 0.0],
    [-INF] * 5,
    [NAN, INF, -INF, 0.0, 0.0],
]
SOME_WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9},
    {"top_k": 3},
    {"min_p": 0.1},
    {"temperature": 0.0, "allowed_token_ids": [0, 3]},
    {"top_k": 2, "allowed_token_ids": [0, 3], "presence_penalty": 1.0},
]


@pytest.mark.parametrize("form", SOME_WISHES, ids=str)
@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_logits_that_are_not_finite_fail_their_own_request_only(
    broken: list[float], form: dict[str, Any]
) -> None:
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(7))
    rows = [DraftedRow(array("q", PROMPT), make_sampling(s, **form)) for s in range(5)]
    healthy = verify(logits, rows)
    logits[2] = torch.tensor(broken)
    results = verify(logits, rows)
    assert results[2] == Verified((), (), error=NOT_FINITE)
    assert results[:2] + results[3:] == healthy[:2] + healthy[3:]
    assert verify(logits[2:3], rows[2:3]) == results[2:3]


def test_a_failure_inside_a_draft_keeps_the_run_before_it() -> None:
    logits = one_hot(1, 2, 3)
    logits[1, 0] = NAN
    results = verify(logits.repeat(2, 1), [greedy_row((1, 2)), greedy_row((1, 2), logprobs=0)])
    assert [(r.token_ids, r.num_accepted, r.error) for r in results] == [((1,), 1, NOT_FINITE)] * 2
    assert len(results[1].logprobs) == 1


def test_logits_behind_a_mismatch_may_be_anything() -> None:
    logits = one_hot(1, 2, 3)
    logits[1:] = NAN
    assert verify(logits, [greedy_row((0, 2))]) == [Verified((1,), ())]


def test_a_masked_but_finite_model_is_healthy() -> None:
    logits = torch.tensor([[-INF, -INF, 1.0, -INF]])
    for form in SOME_WISHES[:5]:
        row = DraftedRow(array("q", PROMPT), make_sampling(**form))
        assert verify(logits, [row]) == [Verified((2,), ())]


def test_a_request_that_bans_every_token_fails_alone() -> None:
    banned = greedy_row((), allowed_token_ids=[0], bad_words_ids=((0,),))
    results = verify(one_hot(0, 0), [banned, greedy_row(())])
    assert results == [Verified((), (), error=ALL_BANNED), Verified((0,), ())]


def test_token_ids_outside_the_vocabulary_fail_their_own_request_only() -> None:
    rows = [greedy_row((1,), logit_bias={5: 1.0}), greedy_row((1,), logit_bias={4: 9.0})]
    failed, served = verify(one_hot(1, 2, 1, 2), rows)
    assert failed.token_ids == ()
    assert failed.error == "logit_bias must have token ids from 0 to 4, not 5"
    assert served == Verified((4,), ())


def test_the_logits_are_only_read() -> None:
    logits = torch.randn(len(SAMPLINGS), VOCAB, generator=torch.Generator().manual_seed(8))
    before = logits.clone()
    verify(logits, [DraftedRow(array("q", PROMPT), s) for s in SAMPLINGS])
    assert torch.equal(logits, before)


def test_half_precision_logits_are_accepted() -> None:
    assert verify(one_hot(2).bfloat16(), [greedy_row((), logprobs=1)])[0].token_ids == (2,)


def test_sampling_all_rows_at_once_equals_sampling_depth_by_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accelerators take the first way, CPUs the second."""
    rng = random.Random(3)
    drafts = [random_draft(Stream(s), rng) for s in SAMPLINGS]
    rows = [DraftedRow(array("q", PROMPT), s, d) for d, s in zip(drafts, SAMPLINGS, strict=True)]
    logits = target_logits(rows)
    by_depth = verify(logits, rows)
    waves = verify_module._waves

    def at_once(walks: Any, device: torch.device) -> Iterator[Any]:
        return waves(walks, torch.device("meta"))

    monkeypatch.setattr(verify_module, "_waves", at_once)
    assert verify(logits, rows) == by_depth


@pytest.mark.parametrize("num_logits", [1, 3 * VOCAB, 10**6])
def test_the_block_size_changes_nothing(num_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [greedy_row([first, second]) for first in range(5) for second in range(5)]
    logits = one_hot(*(token for row in rows for token in (*row.draft, 3)))
    monkeypatch.setattr(verify_module, "_CPU_BLOCK", num_logits)
    for row, result in zip(rows, verify(logits, rows), strict=True):
        assert result.token_ids == (*row.draft, 3)


def test_every_output_position_has_noise_of_its_own() -> None:
    sampling = make_sampling(seed=5)
    outputs = [array("q", (*PROMPT, *[1] * length)) for length in range(20)]
    choices = sample(torch.zeros(20, 1000), [DraftedRow(each, sampling) for each in outputs])
    assert len({choice.token_id for choice in choices}) > 15


# ---- log-probabilities -------------------------------------------------------------------------


def test_logprobs_are_those_of_the_unprocessed_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.0]])
    sampling = make_sampling(logprobs=3, logit_bias={3: 50.0}, temperature=0.5, top_k=2)
    (result,) = verify(logits, [DraftedRow(array("q", PROMPT), sampling)])
    expected = logits[0].double().log_softmax(0).tolist()
    (entry,) = result.logprobs
    assert (entry.token_id, [token_id for token_id, _ in entry.top]) == (3, [2, 1, 3])
    assert entry.logprob == pytest.approx(expected[3], abs=1e-6)
    assert [value for _, value in entry.top] == pytest.approx(
        [expected[2], expected[1], expected[3]], abs=1e-6
    )


def test_there_is_one_logprob_per_token_served_and_none_unless_asked() -> None:
    logits = one_hot(1, 2, 3)
    rows = [greedy_row((1, 0), logprobs=0), greedy_row((1, 0))]
    asked, silent = verify(logits.repeat(2, 1), rows)
    assert [entry.token_id for entry in asked.logprobs] == [1, 2]
    assert all(entry.top == () for entry in asked.logprobs)
    assert silent.logprobs == ()


# ---- independence of the batch -----------------------------------------------------------------


def many_rows(num_rows: int, **extra: Any) -> list[DraftedRow]:
    tokens = array("q", [*PROMPT, 5, 6, 5])
    return [
        DraftedRow(tokens, make_sampling(i, temperature=(0.0, 0.7, 1.0)[i % 3], **w, **extra))
        for i, w in enumerate((WISHES * num_rows)[:num_rows])
    ]


@pytest.mark.parametrize("vocab", [300, 5000])
def test_tokens_and_logprobs_do_not_depend_on_the_batch(vocab: int) -> None:
    rows = many_rows(60, logprobs=3)
    logits = torch.randn(60, vocab, generator=torch.Generator().manual_seed(10)) * 3
    together = verify(logits, rows)
    order = random.Random(1).sample(range(60), 60)
    shuffled = verify(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]
    for i, row in enumerate(rows):
        assert verify(logits[i : i + 1], [row]) == [together[i]]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_of_a_big_vocabulary_is_the_same_alone(num_threads: int) -> None:
    """A reduction over one long row may be split across threads, over several rows it is not."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        rows = many_rows(6, logprobs=2)
        logits = torch.randn(6, 150_001, generator=torch.Generator().manual_seed(11)) * 3
        together = verify(logits, rows)
        for i, row in enumerate(rows):
            assert verify(logits[i : i + 1].clone(), [row]) == [together[i]]
    finally:
        torch.set_num_threads(before)


def test_the_best_of_a_place_begin_with_what_is_drawn_there() -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, 30)
    forms = [{"temperature": 0.0}, {}, {"temperature": 0.6, "top_k": 3}, {"logit_bias": {4: 9.0}}]
    rows = [
        DraftedRow(array("q", PROMPT), make_sampling(seed=i, **forms[i % 4])) for i in range(40)
    ]
    logits[8] = torch.nan
    drawn = sample(logits, rows)
    for row, choice, found in zip(rows, drawn, best(logits, rows, 4), strict=True):
        assert found.error == choice.error
        if choice.error is None:
            assert found.token_ids[0] == choice.token_id
            assert len(set(found.token_ids)) == (3 if row.sampling.params.top_k == 3 else 4)
            assert list(found.scores) == sorted(found.scores, reverse=True)


def test_of_equal_scores_the_lowest_ids_are_the_best() -> None:
    logits = torch.tensor([[0.0, 5.0, 2.0, 5.0, 2.0, 5.0, 2.0, -torch.inf]]).repeat(2, 40)
    logits[1, :5] = torch.arange(5.0) - 9.0
    rows = [DraftedRow(array("q", PROMPT), make_sampling(temperature=0.0))] * 2
    first, second = best(logits, rows, 4)
    assert first.token_ids == (1, 3, 5, 9)
    assert second.token_ids == (5, 9, 11, 13)
    (few,) = best(torch.tensor([[1.0, -torch.inf, 1.0]]), rows[:1], 4)
    assert few == Best((0, 2), (1.0, 1.0))
