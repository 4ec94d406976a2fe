import math

import numpy as np
import pytest
import torch

from foretoken.core.sampling.gumbel import (
    _gumbel_of_words,
    gumbel,
    gumbel_rows,
    id_hashes,
    stream_keys,
    stream_start,
    vocabulary_hashes,
)
from foretoken.core.sampling.seeds import sibling_seed

MASK = 2**64 - 1
IDS = torch.arange(1000)


def splitmix(word: int) -> int:
    word &= MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def reference(seed: int, position: int, token_id: int) -> float:
    """The same noise in plain integers and doubles."""
    golden = 0x9E3779B97F4A7C15
    key = splitmix(splitmix(seed + golden) + golden * (position + 1))
    word = ((splitmix((token_id + 1) * golden) ^ key) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 32)) * 0x94D049BB133111EB) & MASK
    signed = word - 2**64 if word >> 63 else word
    return -math.log(-math.log1p(-abs(signed) * 2.0**-63))


def uniform(noise: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-noise.double()))


def deviation(cells: torch.Tensor, num_cells: int) -> float:
    """Sigmas by which the counts of ``cells`` exceed a fair chi-square (Wilson-Hilferty)."""
    counts = torch.bincount(cells, minlength=num_cells).double()
    expected = len(cells) / num_cells
    chi, df = float(((counts - expected) ** 2 / expected).sum()), num_cells - 1
    return ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def pair_deviation(first: torch.Tensor, second: torch.Tensor) -> float:
    cells = (uniform(first) * 16).long().clamp(max=15) * 16 + (uniform(second) * 16).long().clamp(
        max=15
    )
    return deviation(cells, 256)


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, 0x1234_5678_9ABC_DEF0])
def test_noise_equals_the_hash_written_in_plain_integers(seed: int) -> None:
    for position in (0, 1, 77, 2**31):
        noise = gumbel(seed, position, torch.tensor([0, 1, 5, 151_935])).tolist()
        expected = [reference(seed, position, i) for i in (0, 1, 5, 151_935)]
        assert noise == pytest.approx(expected, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_keys_of_many_positions_are_those_written_in_plain_integers(seed: int) -> None:
    golden, positions = 0x9E3779B97F4A7C15, [-1, 0, 1, 77, 2**31]
    starts = np.full(5, stream_start(seed), np.uint64)
    expected = [splitmix(splitmix(seed + golden) + golden * (p + 1)) for p in positions]
    keys = stream_keys(starts, np.array(positions))
    assert keys.view(np.uint64).tolist() == expected


def test_noise_of_an_id_does_not_depend_on_the_other_ids_or_rows() -> None:
    hashes = vocabulary_hashes(5003, torch.device("cpu"))
    places = [(seed, position) for seed in (3, 2**63 + 9) for position in range(20)]
    together = gumbel_rows(places, hashes)
    for index, (seed, position) in enumerate(places):
        assert torch.equal(gumbel_rows([(seed, position)], hashes)[0], together[index])
        some = torch.tensor([5002, 0, 17, 17, 4096])
        assert torch.equal(gumbel(seed, position, some), together[index, some])


def test_rows_may_have_ids_of_their_own() -> None:
    ids = torch.tensor([[1, 2, 3], [3, 1, 900]])
    noise = gumbel_rows([(5, 0), (6, 1)], id_hashes(ids))
    assert torch.equal(noise[0], gumbel(5, 0, ids[0]))
    assert torch.equal(noise[1], gumbel(6, 1, ids[1]))


def test_every_bit_of_the_seed_and_of_the_position_matters() -> None:
    base = gumbel(0, 0, IDS)
    others = [gumbel(1 << bit, 0, IDS) for bit in range(64)]
    others += [gumbel(0, 1 << bit, IDS) for bit in range(40)]
    assert all(int((other == base).sum()) == 0 for other in others)
    assert len({float(other[0]) for other in others}) == len(others)


def test_seed_and_position_are_not_interchangeable() -> None:
    assert not torch.equal(gumbel(1, 2, IDS), gumbel(2, 1, IDS))
    assert not torch.equal(gumbel(1, 2, IDS), gumbel(0, 3, IDS))


def test_noise_is_uniform_over_ids_over_positions_and_over_seeds() -> None:
    over_ids = gumbel(7, 3, torch.arange(200_000))
    hashes = vocabulary_hashes(4, torch.device("cpu"))
    over_positions = gumbel_rows([(7, i) for i in range(50_000)], hashes).flatten()
    over_seeds = gumbel_rows([(i, 3) for i in range(50_000)], hashes).flatten()
    for noise in (over_ids, over_positions, over_seeds):
        assert deviation((uniform(noise) * 256).long().clamp(max=255), 256) < 4


def test_noise_has_the_moments_of_a_standard_gumbel() -> None:
    noise = gumbel(11, 0, torch.arange(400_000)).double()
    assert float(noise.mean()) == pytest.approx(0.57722, abs=4 * 1.2825 / math.sqrt(400_000))
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.015)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((9, 4), (9, 5)),
        ((9, 4), (10, 4)),
        ((9, 4), (10, 3)),
        ((9, 4), (9 + 2**32, 4)),
        ((9, 4), (sibling_seed(9, 1), 4)),
        ((sibling_seed(9, 1), 4), (sibling_seed(9, 2), 4)),
        ((sibling_seed(9, 1), 4), (sibling_seed(10, 1), 4)),
    ],
)
def test_two_streams_are_independent(first: tuple[int, int], second: tuple[int, int]) -> None:
    ids = torch.arange(200_000)
    assert pair_deviation(gumbel(*first, ids), gumbel(*second, ids)) < 4


def test_neighbouring_ids_are_independent() -> None:
    noise = gumbel(13, 2, torch.arange(200_001))
    assert pair_deviation(noise[:-1], noise[1:]) < 4


def test_the_independence_test_notices_a_weak_dependence() -> None:
    ids = torch.arange(200_000)
    first, second = gumbel(1, 0, ids), gumbel(2, 0, ids)
    leaky = torch.where(ids % 20 == 0, first, second)
    assert pair_deviation(first, leaky) > 8


def test_the_first_sibling_keeps_the_seed_and_the_others_differ() -> None:
    seeds = [sibling_seed(seed, i) for seed in (0, 1, 2, 2**64 - 1) for i in range(16)]
    assert [sibling_seed(seed, 0) for seed in (0, 5, 2**64 - 1)] == [0, 5, 2**64 - 1]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_extreme_words_give_finite_noise_and_an_exact_upper_tail() -> None:
    """float32 u would round to 1 beyond 2**-24 and make the best tokens tie at infinity."""
    words = torch.tensor([0, 1, -1, 2**62, 2**63 - 1, -(2**63)])
    noise = _gumbel_of_words(words)
    assert bool(torch.isfinite(noise).all())
    assert float(noise[1]) == pytest.approx(63 * math.log(2), rel=1e-6)
    assert float(noise[3]) == pytest.approx(-math.log(math.log(2)), rel=1e-6)
