"""Seeds of the whole engine over a model with recurrent states, with few slots for them."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from .world import live

pytestmark = pytest.mark.slow

NUM_SEEDS = 40


@pytest.fixture(autouse=True)
def _quiet():
    """The engine logs each fault with its traceback, which costs more than the fault."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("num_slots", [3, 5, 10])
def test_whatever_a_seed_brings_no_token_comes_from_another_state(num_slots: int) -> None:
    """``python -m simulation --slots 3 --seeds 1 --from SEED`` in tests/ shows one again."""
    sums: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        found = live(seed, num_slots=num_slots, has_tiers=seed % 4 == 0)
        sums.update(found.ends)
        sums.update(
            resumed=found.num_resumed,
            accepted=found.num_accepted,
            ahead=found.num_ahead,
            failed_between_layers=found.faults["layer raises"],
            loaded=found.num_loaded,
        )
    seen = (
        "resumed",
        "loaded",
        "accepted",
        "ahead",
        "failed_between_layers",
        "length",
        "abort",
        "error",
    )
    assert all(sums[name] for name in seen), sums
