from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.encoded import CUT, GREEDY, MIN_P, SAMPLED
from foretoken.core.sampling.logits_processors import (
    apply_processors,
    argmax,
    best_ids,
    scaled,
    truncate,
)
from foretoken.core.sampling.top_k_top_p import masses

INF = float("inf")


def make_row(
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (),
    tail: Sequence[int] = (),
    *,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    **params: Any,
) -> DraftedRow:
    sampling = SamplingMetadata(
        params=TokenSamplingParams(**params),
        seed=1,
        prompt_len=len(prompt),
        stop_ids=frozenset(stop_ids),
        bad_words_ids=tuple(tuple(word) for word in bad_words),
    )
    return DraftedRow(array("q", [*prompt, *output]), sampling, tuple(tail))


def processed(logits: torch.Tensor, rows: Sequence[DraftedRow]) -> torch.Tensor:
    """The whole pipeline before the draw, dense [num_rows, vocab], -inf where cut."""
    values = logits.clone()
    assert apply_processors(values, rows) == [None] * len(rows)
    values = scaled(values, rows)
    kept, ids = truncate(values, rows)
    return torch.full_like(values, -INF).scatter_(-1, ids, kept)


def edited(logits: Sequence[float], row: DraftedRow) -> list[float]:
    values = torch.tensor([logits], dtype=torch.float32)
    assert apply_processors(values, [row]) == [None]
    return values[0].tolist()


def kept(logits: Sequence[float], row: DraftedRow) -> list[int]:
    values = scaled(torch.tensor([logits], dtype=torch.float32), [row])
    _, ids = truncate(values, [row])
    return ids[0].tolist()


def reference(logits: np.ndarray, row: DraftedRow) -> np.ndarray:
    """The same rules, written once more in numpy, one scalar at a time."""
    p, z = row.sampling.params, logits.astype(np.float64).copy()
    path = [*row.tokens, *row.draft]
    output = path[row.sampling.prompt_len :]
    for token_id, bias in (p.logit_bias or {}).items():
        z[token_id] += bias
    for token_id in set(path):
        z[token_id] = (
            z[token_id] / p.repetition_penalty
            if z[token_id] > 0
            else z[token_id] * p.repetition_penalty
        )
    for token_id in set(output):
        z[token_id] -= p.frequency_penalty * output.count(token_id) + p.presence_penalty
    for token_id in range(len(z)):
        if p.allowed_token_ids is not None and token_id not in p.allowed_token_ids:
            z[token_id] = -INF
    for *before, last in row.sampling.bad_words_ids:
        if path[len(path) - len(before) :] == before:
            z[last] = -INF
    if len(output) < p.min_tokens:
        z[list(row.sampling.stop_ids)] = -INF
    z = (z - z.max()) / p.temperature
    order = np.argsort(-z, kind="stable")
    if p.top_k > 0:
        order = order[: p.top_k]
    order = np.array([i for i in order if z[i] > -INF and np.exp(z[i]) >= p.min_p])
    probs = np.exp(z[order]) / np.exp(z[order]).sum()
    if p.top_p < 1:
        order = order[np.cumsum(probs) - probs < p.top_p]
    cut = np.full(len(z), -INF)
    cut[order] = z[order]
    return cut


def random_row(rng: np.random.Generator, vocab: int) -> DraftedRow:
    """Any mixture of every parameter."""

    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.5 else default

    ids = [int(i) for i in rng.integers(0, vocab, 30)]
    return make_row(
        ids[:6],
        ids[6:14],
        ids[14 : 14 + int(rng.integers(0, 4))],
        stop_ids=ids[18:20],
        bad_words=maybe([[ids[20]], [ids[13], ids[21]], [ids[12], ids[13], ids[22]]], []),
        logit_bias=maybe({ids[23]: 3.5, ids[3]: -2.0, ids[24]: -100.0}, None),
        repetition_penalty=maybe(float(rng.uniform(0.7, 1.6)), 1.0),
        frequency_penalty=maybe(float(rng.uniform(-1, 2)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-1, 2)), 0.0),
        allowed_token_ids=maybe(sorted({*ids[:4], *ids[25:], *range(0, vocab, 3)}), None),
        min_tokens=maybe(10, 0),
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.7])),
        top_k=maybe(int(rng.integers(1, vocab)), 0),
        min_p=maybe(float(rng.uniform(0.001, 0.4)), 0.0),
        top_p=maybe(float(rng.uniform(0.05, 0.99)), 1.0),
    )


@pytest.mark.parametrize(("vocab", "num_rows"), [(13, 200), (300, 200), (5000, 30)])
def test_any_mixture_of_parameters_equals_the_reference(vocab: int, num_rows: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = [random_row(rng, vocab) for _ in range(num_rows)]
    logits = (rng.standard_normal((num_rows, vocab)) * 3).astype(np.float32)
    expected = np.stack([reference(z, row) for z, row in zip(logits, rows, strict=True)])
    actual = processed(torch.from_numpy(logits), rows).numpy()
    assert ((actual > -INF) == (expected > -INF)).all()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab", [300, 5000])
def test_a_row_is_processed_alike_alone_and_in_any_company(vocab: int) -> None:
    """Bit for bit: the narrowed path of a lone row must equal the sorted path of many."""
    rng = np.random.default_rng(1)
    rows = [random_row(rng, vocab) for _ in range(40)]
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(2)) * 4
    together = processed(logits, rows)
    order = rng.permutation(40).tolist()
    assert torch.equal(processed(logits[order], [rows[i] for i in order]), together[order])
    for i, row in enumerate(rows):
        assert torch.equal(processed(logits[i : i + 1], [row])[0], together[i])


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 4.0])
def test_top_p_over_a_flat_row_of_many_tokens_is_the_same_alone(spread: float) -> None:
    """A lone row is narrowed by bisection before it is sorted, several rows are not."""
    top_ps = [1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9, 1 - 2**-53]
    rows = [make_row(top_p=top_p) for top_p in top_ps]
    logits = torch.randn(7, 20_000, generator=torch.Generator().manual_seed(4)) * spread
    together = processed(logits, rows)
    for i, row in enumerate(rows):
        assert torch.equal(processed(logits[i : i + 1], [row])[0], together[i])
    counts = (together > -INF).sum(-1).tolist()
    assert counts == sorted(counts)
    assert counts[0] == 1


def test_a_lone_row_keeps_the_same_ids_as_in_company_when_values_tie() -> None:
    """bf16 logits tie often; which of the tied tokens stay must not depend on the batch."""
    rng = np.random.default_rng(3)
    rows = [random_row(rng, 300) for _ in range(60)]
    logits = torch.randn(60, 300, generator=torch.Generator().manual_seed(3)).mul(2).round()
    together = processed(logits, rows)
    for i, row in enumerate(rows):
        assert torch.equal(processed(logits[i : i + 1], [row])[0], together[i])


def test_logit_bias_is_added() -> None:
    row = make_row(logit_bias={0: 1.5, 3: -100.0})
    assert edited([0, 1, 2, 3], row) == [1.5, 1.0, 2.0, -97.0]


def test_repetition_penalty_counts_prompt_output_and_tail_once() -> None:
    row = make_row([0, 0], [1], [2, 2], repetition_penalty=2.0)
    assert edited([4, -4, 4, 4], row) == [2.0, -8.0, 2.0, 4.0]


def test_presence_and_frequency_count_output_and_tail_but_not_the_prompt() -> None:
    row = make_row([0, 0], [1], [2, 2], frequency_penalty=0.5, presence_penalty=0.25)
    assert edited([4, 4, 4, 4], row) == [4.0, 3.25, 2.75, 4.0]


def test_penalties_before_the_first_output_token_change_nothing() -> None:
    row = make_row([0, 1], frequency_penalty=2.0, presence_penalty=2.0)
    assert edited([1, 2, 3], row) == [1.0, 2.0, 3.0]
    empty = DraftedRow(array("q"), make_row([], repetition_penalty=2.0).sampling)
    assert edited([1, 2, 3], empty) == [1.0, 2.0, 3.0]


def test_bias_comes_before_the_repetition_penalty() -> None:
    row = make_row([0], logit_bias={0: 4.0}, repetition_penalty=2.0)
    assert edited([-2, 0], row) == [1.0, 0.0]


def test_bias_does_not_bring_back_a_token_that_is_not_allowed() -> None:
    row = make_row(logit_bias={2: 100.0}, allowed_token_ids=[0, 1])
    assert edited([0, 1, 2], row) == [0.0, 1.0, -INF]


def test_all_tokens_but_one_may_be_banned() -> None:
    assert edited([5, 1, 9], make_row(allowed_token_ids=[1])) == [-INF, 1.0, -INF]
    assert kept([-INF, 1, -INF], make_row(top_p=0.01, top_k=2, min_p=0.5)) == [1]


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    row = make_row(bad_words=[[1], [3]])
    assert edited([0, 1, 2, 3], row) == [0.0, -INF, 2.0, -INF]


@pytest.mark.parametrize(
    ("prompt", "output", "tail", "banned"),
    [
        ([5, 6], [7], [], True),
        ([5, 6], [], [7], True),
        ([5], [], [6, 7], True),
        ([5, 6, 7], [], [], True),
        ([9, 9], [6], [7], True),
        ([9, 9], [7], [6], False),
        ([9, 6], [7], [9], False),
        ([7], [], [], False),
    ],
)
def test_the_end_of_a_bad_word_is_banned_behind_its_beginning(
    prompt: list[int], output: list[int], tail: list[int], banned: bool
) -> None:
    row = make_row(prompt, output, tail, bad_words=[[6, 7, 2]])
    assert (edited([0.0] * 10, row)[2] == -INF) is banned


def test_stop_ids_are_banned_until_min_tokens_are_out() -> None:
    def is_banned(output: list[int], tail: list[int]) -> bool:
        row = make_row([1, 2], output, tail, stop_ids=[0], min_tokens=2)
        return edited([1.0, 1.0, 1.0], row)[0] == -INF

    assert is_banned([], [])
    assert is_banned([1], [])
    assert is_banned([], [1])
    assert not is_banned([1], [1])
    assert not is_banned([1, 1], [])


def test_the_stop_ids_of_a_model_may_lie_outside_the_vocabulary() -> None:
    row = make_row(stop_ids=[1, 99], min_tokens=1)
    assert edited([1.0, 2.0], row) == [1.0, -INF]


@pytest.mark.parametrize(
    ("field", "form"),
    [
        ("logit_bias", {"logit_bias": {4: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [0, 4]}),
        ("bad_words", {"bad_words": [[0, 1], [4, 1]]}),
        ("bad_words", {"bad_words": [[-1]]}),
        ("stop_token_ids", {"stop_token_ids": [4], "min_tokens": 1}),
    ],
)
def test_token_ids_outside_the_vocabulary_name_their_field(
    field: str, form: dict[str, Any]
) -> None:
    good, bad = make_row(logit_bias={0: 1.0}), make_row(**form)
    values = torch.zeros(2, 4)
    errors = apply_processors(values, [good, bad])
    assert errors[0] is None
    assert str(errors[1]).startswith(f"{field} must have token ids")
    assert values.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert bad.encoded(4).error == errors[1]
    assert good.encoded(4).error is None


def test_what_is_known_of_a_request_is_known_of_one_width_of_logits() -> None:
    """A draft model's may have another width than the target's."""
    row = make_row(logit_bias={5: 1.0})
    for width in (8, 4, 8):
        [error] = apply_processors(torch.zeros(1, width), [row])
        assert (error is None) == (width == 8)


def test_history_outside_the_vocabulary_is_ignored_by_penalties() -> None:
    row = make_row([900, 0], [901, 1], repetition_penalty=2.0, frequency_penalty=1.0)
    assert edited([2, 2, 2], row) == [1.0, 0.0, 2.0]


def test_temperature_divides_and_leaves_the_best_at_zero() -> None:
    values = scaled(
        torch.tensor([[1.0, 3.0], [1.0, 3.0]]),
        [make_row(temperature=0.5), make_row()],
    )
    assert values.tolist() == [[-4.0, 0.0], [-2.0, 0.0]]


def test_a_tiny_temperature_does_not_overflow() -> None:
    values = scaled(torch.tensor([[1.0, 3e38, 3e38]]), [make_row(temperature=1e-300)])
    assert values.tolist() == [[-INF, 0.0, 0.0]]


@pytest.mark.parametrize("top_k", [0, -1, 4, 5, 2**31 - 1])
def test_top_k_off_or_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    assert kept([1, 4, 2, 3], make_row(top_k=top_k)) == [1, 3, 2, 0]
    assert make_row(top_k=top_k).encoded(4).kind == SAMPLED


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie() -> None:
    assert kept([1, 2, 2, 2, 3], make_row(top_k=3)) == [4, 1, 2]
    assert kept([7, 7, 7], make_row(top_k=1)) == [0]


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert kept(logits, make_row(top_p=0.49)) == [0]
    assert kept(logits, make_row(top_p=0.51)) == [0, 1]
    assert kept(logits, make_row(top_p=0.79)) == [0, 1]
    assert kept(logits, make_row(top_p=0.81)) == [0, 1, 2]
    assert kept(logits, make_row(top_p=0.96)) == [0, 1, 2, 3]


def test_top_p_stops_when_the_mass_is_exactly_reached() -> None:
    assert kept([0, 0, 0, 0], make_row(top_p=0.5)) == [0, 1]


def test_a_tiny_top_p_keeps_one_token() -> None:
    assert kept([1, 1, 1], make_row(top_p=1e-12)) == [0]
    assert kept([1, 2, 1], make_row(top_p=1e-300)) == [1]


def test_min_p_is_relative_to_the_best_after_temperature() -> None:
    logits = np.log([0.6, 0.25, 0.1, 0.05]).tolist()
    assert kept(logits, make_row(min_p=0.2)) == [0, 1]
    assert kept(logits, make_row(min_p=0.15)) == [0, 1, 2]
    assert kept(logits, make_row(min_p=0.15, temperature=0.5)) == [0, 1]
    assert kept(logits, make_row(min_p=1.0)) == [0]


def test_top_p_counts_only_what_top_k_and_min_p_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept(logits, make_row(top_p=0.55)) == [0, 1]
    assert kept(logits, make_row(top_p=0.55, top_k=2)) == [0]
    assert kept(logits, make_row(top_p=0.55, min_p=0.6)) == [0]


def test_temperature_comes_before_top_p() -> None:
    logits = np.log([0.5, 0.3, 0.2]).tolist()
    assert kept(logits, make_row(top_p=0.6)) == [0, 1]
    assert kept(logits, make_row(top_p=0.6, temperature=0.5)) == [0]


def test_only_rows_with_a_wish_count_as_edited() -> None:
    assert not make_row(temperature=0.7, stop_ids=[1]).is_edited(10)
    form: list[dict[str, Any]] = [
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"allowed_token_ids": [1]},
        {"bad_words": [[1]]},
        {"min_tokens": 1},
    ]
    assert all(make_row(**wish).is_edited(10) for wish in form)
    assert not make_row([1], [2], min_tokens=1).is_edited(10)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (GREEDY, {"temperature": 0.0, "top_p": 0.9}),
        (SAMPLED, {"temperature": 0.7}),
        (MIN_P, {"min_p": 0.1}),
        (CUT, {"top_k": 3}),
        (CUT, {"top_p": 0.9, "min_p": 0.1}),
    ],
)
def test_the_kind_of_a_request_says_what_cuts_its_rows(kind: int, form: dict[str, Any]) -> None:
    assert make_row(**form).encoded(10).kind == kind


def test_best_ids_take_the_lowest_id_of_a_tie_and_never_more_than_there_are() -> None:
    values = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0])
    assert best_ids(values, 2).tolist() == [1, 2]
    assert best_ids(values, 4).tolist() == [1, 2, 4, 3]
    assert best_ids(values, 9).tolist() == [1, 2, 4, 3, 0]
    assert best_ids(values, 0).tolist() == []


def test_argmax_takes_the_lowest_id_of_a_tie() -> None:
    assert argmax(torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 1.0]])).tolist() == [1, 0]


def test_the_masses_of_a_flat_row_of_a_big_vocabulary_do_not_overflow() -> None:
    total = int(masses(torch.zeros(262_144), 262_144).sum())
    assert 2**60 <= total < 2**62


def test_the_end_of_the_path_reaches_across_tail_and_tokens() -> None:
    row = make_row([1, 2], [3], [4, 5])
    assert [row.ending(n) for n in range(4)] == [(), (5,), (4, 5), (3, 4, 5)]
    assert row.ending(99) == (1, 2, 3, 4, 5)
    assert row.position == 3


EDITS = {
    "logit_bias": {1: 2.0},
    "allowed_token_ids": [1, 2],
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
}
READS_HISTORY = {"repetition_penalty", "frequency_penalty", "presence_penalty"}


@pytest.mark.parametrize("name", EDITS)
def test_a_parameter_that_reads_the_text_is_one_that_edits(name: str) -> None:
    sampling = make_row(**{name: EDITS[name]}).sampling
    assert sampling.has_processors
    assert sampling.needs_history == (name in READS_HISTORY)
    assert make_row(logprobs=1).sampling.needs_history
    assert not make_row(logprobs=1).sampling.has_processors


def test_a_form_is_made_once_for_each_vocabulary_and_device() -> None:
    sampling, made = make_row().sampling, list[tuple[int, str]]()

    def make(_: SamplingMetadata, vocab_size: int, device: str) -> int:
        made.append((vocab_size, device))
        return len(made)

    found = [sampling.cached(make, *key) for key in ((8, "cpu"), (9, "cpu"), (8, "x"), (8, "cpu"))]
    assert found == [1, 2, 3, 1]
    assert made == [(8, "cpu"), (9, "cpu"), (8, "x")]
