"""The arithmetic of a load, on times written by hand."""

from __future__ import annotations

import math
import random

import pytest

from foretoken.bench.load.figures import (
    Record,
    apportion,
    chunk_gaps,
    distribution,
    gaps_between,
    meets,
    parse_slo,
    percentile,
    summary,
    token_gaps,
)


def record(due: float, times: list[float], counts: list[int] | None = None, **more) -> Record:
    return Record(
        "x",
        due,
        sent=more.pop("sent", due),
        times=times,
        counts=counts or [1] * len(times),
        ended=more.pop("ended", times[-1] if times else due),
        **more,
    )


# -- percentiles --------------------------------------------------------------------------------


def test_a_percentile_lies_between_its_neighbours_linearly():
    values = [float(v) for v in range(101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([1.0, 3.0], 0.5) == 2
    assert percentile([7.0], 0.99) == 7
    assert math.isnan(percentile([], 0.5))


def test_percentiles_agree_with_numpy():
    numpy = pytest.importorskip("numpy")
    rng = random.Random(1)
    for length in (2, 3, 10, 57):
        values = sorted(rng.random() for _ in range(length))
        for share in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
            assert percentile(values, share) == pytest.approx(numpy.quantile(values, share))


def test_of_a_rate_the_99th_percentile_is_what_nearly_all_reach():
    found = distribution(map(float, range(1, 101)), high_is_good=True)
    assert found is not None
    assert found["p99"] == pytest.approx(1.99)
    assert found["p50"] == pytest.approx(50.5)
    assert distribution([]) is None


# -- tokens and chunks --------------------------------------------------------------------------


def test_the_tokens_of_a_chunk_share_its_gap_and_the_first_chunk_has_none():
    one = record(0.0, [1.0, 1.4, 1.5], [2, 4, 1])
    assert chunk_gaps(one) == [(1.0, 1.4, 4), (1.4, 1.5, 1)]
    assert token_gaps(chunk_gaps(one)) == pytest.approx([0.1] * 5)


def test_tpot_leaves_out_the_first_token_and_a_single_chunk_has_none():
    assert record(0.0, [1.0, 3.0], [1, 4]).tpot == pytest.approx(0.5)
    assert record(0.0, [1.0], [5]).tpot is None


def test_a_gap_belongs_to_the_one_window_that_has_its_middle():
    one = record(0.0, [1.0, 2.0, 4.0, 5.0])
    early, late = gaps_between(one, 0.0, 3.0), gaps_between(one, 3.0, 9.0)
    assert early == [(1.0, 2.0, 1)]
    assert late == [(2.0, 4.0, 1), (4.0, 5.0, 1)]
    assert gaps_between(one, 0.0, 9.0, minimum=2) == [(4.0, 5.0, 1)]


def test_as_many_chunks_as_tokens_get_one_each_whatever_their_characters():
    assert apportion(4, [10, 1, 1, 30]) == [1, 1, 1, 1]


def test_tokens_are_shared_out_by_characters_without_loss():
    rng = random.Random(3)
    for _ in range(200):
        weights = [rng.randrange(0, 9) for _ in range(rng.randrange(1, 12))]
        total = rng.randrange(0, 40)
        shares = apportion(total, weights)
        assert sum(shares) == total
        assert min(shares) >= (1 if total >= len(weights) else 0)
    assert apportion(7, [1, 9]) == [1, 6]
    assert apportion(6, [4, 2]) == [4, 2]
    assert apportion(3, []) == []


# -- goodput ------------------------------------------------------------------------------------


def test_an_slo_is_read_in_milliseconds_and_a_bad_one_is_named():
    assert parse_slo("ttft=500,itl=50.5") == {"ttft": 500.0, "itl": 50.5}
    for bad in ("ttft", "speed=3", ""):
        with pytest.raises(ValueError, match="with a name of ttft, itl, tpot, e2e"):
            parse_slo(bad)
    for bad in ("ttft=0", "ttft=nan", "ttft=-1"):
        with pytest.raises(ValueError, match="ttft must be above 0"):
            parse_slo(bad)
    with pytest.raises(ValueError, match="fast"):
        parse_slo("ttft=fast")


def test_a_request_is_good_if_it_keeps_every_limit():
    one = record(0.0, [0.4, 0.5])
    assert meets(one, {"ttft": 401, "itl": 101})
    assert not meets(one, {"ttft": 399, "itl": 101})
    assert not meets(one, {"ttft": 401, "itl": 99})
    assert meets(record(0.0, [0.4]), {"itl": 1, "tpot": 1})  # what does not exist


def test_errors_count_against_goodput_and_in_no_latency():
    good = record(0.0, [0.1, 0.2])
    failed = record(0.0, [9.0], error="HTTP 500", ended=10.0)
    found = summary([good, failed], {"ttft": 500})
    assert found["errors"] == {"HTTP 500": 1}
    assert found["served"] == 1
    assert found["ttft_ms"]["p99"] == pytest.approx(100)
    assert found["goodput"]["share"] == 0.5
    assert found["goodput"]["requests_per_s"] == pytest.approx(0.1)


# -- the whole ----------------------------------------------------------------------------------


def test_latencies_are_from_the_moment_a_request_was_due_not_from_sending():
    late = record(0.0, [5.1, 5.2], sent=5.0)
    found = summary([late], {})
    assert found["ttft_ms"]["p50"] == pytest.approx(5100)
    assert found["e2e_ms"]["p50"] == pytest.approx(5200)
    assert found["sent_late_ms"]["p50"] == pytest.approx(5000)


def test_what_no_server_told_is_none_and_not_zero():
    found = summary([record(0.0, [0.1, 0.2])], {})
    for name in ("prefix_hit_rate", "acceptance_rate", "tokens_per_step", "prompt_tokens_per_s"):
        assert found[name] is None
    told = summary([record(0.0, [0.1, 0.2], [1, 3], prompt_tokens=8, cached_tokens=6,
                           proposed_tokens=4, accepted_tokens=3, verify_steps=2)], {})  # fmt: skip
    assert told["prefix_hit_rate"] == 0.75
    assert told["acceptance_rate"] == 0.75
    assert told["tokens_per_step"] == 2
    assert told["tokens_per_chunk"] == 2


def test_rates_are_over_the_whole_run_and_a_users_from_its_first_token():
    first, second = record(0.0, [1.0, 2.0], [1, 4]), record(1.0, [3.0, 5.0], [1, 4])
    found = summary([first, second], {})
    assert found["output_tokens_per_s"] == pytest.approx(10 / 5)
    assert found["tokens_per_s_user"]["mean"] == pytest.approx((4 + 2) / 2)


def test_a_run_without_requests_has_no_figures_and_does_not_fail():
    found = summary([], {"ttft": 1})
    assert found["requests"] == 0
    assert found["ttft_ms"] is None
    assert found["goodput"]["share"] is None
