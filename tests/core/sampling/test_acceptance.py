"""The rate at which the verifier accepts drafts drawn with its own noise (arXiv 2408.07978).

The formula is sum_i 1 / sum_j max(p_j / p_i, q_j / q_i); here it is met by `sample` and `verify`
together, for pairs from alike to foreign, each sharper and flatter.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest
import torch

from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.verifier import best, sample, verify

VOCAB, NUM_ROWS, PROMPT = 10, 5_000, array("q", [3])
GENERATOR = torch.Generator().manual_seed(2)
TARGET = torch.randn(VOCAB, generator=GENERATOR) * 1.5
NOISE = torch.randn(VOCAB, generator=GENERATOR)
PAIRS = {
    "alike": TARGET + 0.2 * NOISE,
    "blurred": TARGET + NOISE,
    "flat": 0.4 * TARGET + 0.3 * NOISE,
    "sharp": 2.5 * TARGET,
    "foreign": 2.0 * NOISE,
}
SCALES = (0.5, 0.8, 1.0, 1.2)


def samplings(temperature: float) -> list[SamplingMetadata]:
    params = TokenSamplingParams(temperature=temperature)
    return [
        SamplingMetadata(params=params, seed=seed * 7919, prompt_len=1) for seed in range(NUM_ROWS)
    ]


def accepted_share(draft: torch.Tensor, *, temperature: float) -> float:
    """Share of one-token drafts that the verifier accepts."""
    asked = samplings(temperature)
    rows = [DraftedRow(PROMPT, sampling) for sampling in asked]
    drawn = [choice.token_id for choice in sample(draft.expand(NUM_ROWS, -1), rows)]
    return sum(accepted(drawn, asked)) / NUM_ROWS


def accepted(drawn: Sequence[int], asked: Sequence[SamplingMetadata]) -> list[int]:
    rows = [DraftedRow(PROMPT, each, (token,)) for token, each in zip(drawn, asked, strict=True)]
    return [result.num_accepted for result in verify(TARGET.expand(2 * NUM_ROWS, -1), rows)]


def formula(p: torch.Tensor, q: torch.Tensor) -> float:
    ratios = torch.maximum(p / p[:, None], q / q[:, None])  # [i, j]
    return float((1 / ratios.sum(-1)).sum())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("pair", PAIRS)
def test_acceptance_is_that_of_the_formula(pair: str, scale: float) -> None:
    """Every pair with every sharpness; temperatures take turns."""
    draft = PAIRS[pair] / scale
    turn = [*PAIRS].index(pair) + SCALES.index(scale)
    temperature = (1.0, 0.6)[turn % 2]
    p = (TARGET.double() / temperature).softmax(0)
    q = (draft.double() / temperature).softmax(0)
    rate = formula(p, q)
    assert 0.02 < rate < 0.999
    share = accepted_share(draft, temperature=temperature)
    assert abs(share - rate) < 4 * math.sqrt(rate * (1 - rate) / NUM_ROWS)


NUM_BEST = 4


def rank_shares(draft: torch.Tensor, asked: Sequence[SamplingMetadata]) -> list[float]:
    """Rates at which the target's token is each of the draft's best ones, raced for ``asked``."""
    rows = [DraftedRow(PROMPT, sampling) for sampling in asked]
    races = best(draft.expand(NUM_ROWS, -1), rows, NUM_BEST)
    return [
        sum(accepted([race.token_ids[rank] for race in races], samplings(1.0))) / NUM_ROWS
        for rank in range(NUM_BEST)
    ]


def simulated_shares(target: torch.Tensor, draft: torch.Tensor, num: int) -> list[float]:
    """The same of two races for exponential clocks of their own, faster by the probabilities."""
    generator = torch.Generator().manual_seed(11)
    clocks = -torch.rand(num, VOCAB, generator=generator, dtype=torch.float64).log()
    winners = (clocks / target.double().softmax(0)).argmin(-1)
    ranked = (clocks / draft.double().softmax(0)).argsort(-1)[:, :NUM_BEST]
    shares: list[float] = (ranked == winners[:, None]).double().mean(0).tolist()
    return shares


@pytest.mark.parametrize("pair", ["alike", "blurred", "foreign"])
def test_acceptance_by_rank_is_that_of_two_races_for_the_same_clocks(pair: str) -> None:
    num = 20 * NUM_ROWS
    expected = simulated_shares(TARGET, PAIRS[pair], num)
    p, q = TARGET.double().softmax(0), PAIRS[pair].double().softmax(0)
    assert abs(expected[0] - formula(p, q)) < 4 * math.sqrt(0.25 / num)
    for share, rate in zip(rank_shares(PAIRS[pair], samplings(1.0)), expected, strict=True):
        spread = rate * (1 - rate) * (1 / NUM_ROWS + 1 / num)
        assert abs(share - rate) < 4 * math.sqrt(spread)


def test_the_bands_of_ranks_notice_the_noise_of_the_next_position() -> None:
    """Negative control: a race for another place."""
    asked = samplings(1.0)
    shares = rank_shares(PAIRS["alike"], [*asked[1:], asked[0]])
    expected = simulated_shares(TARGET, PAIRS["alike"], NUM_ROWS)
    assert abs(shares[0] - expected[0]) > 20 * math.sqrt(0.25 / NUM_ROWS)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_formula_lies_between_the_bounds_of_the_paper(pair: str) -> None:
    p, q = TARGET.double().softmax(0), PAIRS[pair].double().softmax(0)
    distance = float((p - q).abs().sum() / 2)
    assert (1 - distance) / (1 + distance) - 1e-9 <= formula(p, q) <= 1 - distance + 1e-9


def test_the_bands_are_narrow_enough_to_notice_independent_noise() -> None:
    """Negative control: a draft drawn with the noise of another seed."""
    asked = samplings(1.0)
    rows = [DraftedRow(PROMPT, sampling) for sampling in asked]
    strange = [DraftedRow(row.tokens, asked[i - 1]) for i, row in enumerate(rows)]
    drawn = [c.token_id for c in sample(PAIRS["alike"].expand(NUM_ROWS, -1), strange)]
    p, q = TARGET.double().softmax(0), PAIRS["alike"].double().softmax(0)
    rate, share = formula(p, q), sum(accepted(drawn, asked)) / NUM_ROWS
    assert abs(share - rate) > 20 * math.sqrt(rate * (1 - rate) / NUM_ROWS)
