"""The two commands from their flags to their tables and JSON."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter

import pytest

from foretoken.bench import offline, serve
from foretoken.bench.common.roofline import Roofline
from foretoken.bench.load import short_beside_long
from foretoken.bench.load.noisy_neighbour import LONG_OUTPUT
from foretoken.bench.load.report import busy_note, latency_rows, progress_line, stall_note, stalls

pytestmark = pytest.mark.slow


def bench(server, tmp_path, *flags: str) -> tuple[int, dict]:
    """``bench serve`` on the fake server; its exit code and JSON."""
    out = tmp_path / "out.json"
    workload, *rest = flags
    code = serve.main([workload, "--url", server.url, "--out", str(out), *rest])
    return code, json.loads(out.read_text(encoding="utf-8"))


SMALL = {
    "shared-prefix": ("--requests", "6", "--output-len", "3"),
    "agents": ("--agents", "2", "--turns", "2", "--output-len", "3"),
    "mixed": ("--requests", "4", "--output-len", "3", "--request-rate", "inf"),
    "noisy-neighbour": ("--rounds", "1", "--streams", "2", "--steady", "2", "--before", "9"),
    "short-beside-long": ("--num-long", "1,2", "--long-len", "90", "--shorts", "2"),
    "trace": ("--requests", "5", "--speedup", "1e6", "--scale", "0.01"),
}


@pytest.mark.parametrize("workload", SMALL)
def test_every_workload_runs_against_a_server_that_knows_nothing_of_us(server, tmp_path, workload):
    server.has_tokenize, server.refused = False, {"continuous_usage_stats", "ignore_eos"}
    server.hold_for = LONG_OUTPUT  # the streams still run when the long prompt joins
    code, report = bench(server, tmp_path, workload, *SMALL[workload])
    assert code == 0
    assert report["errors"] == {}
    assert report["served"] == report["requests"] > 0
    assert any("ignore_eos was rejected" in note for note in report["notes"])
    assert report["prefix_hit_rate"] is report["acceptance_rate"] is report["kv_usage"] is None


def test_the_tables_show_what_was_measured(server, tmp_path, capsys):
    server.kv_usage = "foretoken:kv_cache_usage_perc 0.5"
    server.extra_usage = {"prompt_tokens_details": {"cached_tokens": 5}}
    flags = ("--requests", "3", "--output-len", "4", "--slo", "ttft=60000,itl=60000")
    _, report = bench(server, tmp_path, "shared-prefix", *flags)
    printed = capsys.readouterr().out
    for title in ("TTFT ms", "ITL ms, per token", "TPOT ms", "E2E ms", "| p50", "p99"):
        assert title in printed
    assert "0.5 (15 of 30 tokens)" in printed
    assert "goodput (ttft 60000 ms, itl 60000 ms) | 1 of the requests" in printed
    assert "0.5 / 0.5" in printed  # KV occupancy
    assert report["output_tokens"] == 12
    assert report["goodput"]["share"] == 1


def test_errors_are_counted_by_kind_and_the_rest_goes_on(server, tmp_path, capsys):
    server.statuses, server.breaks = {6: 429, 7: 429}, {8: "error", 9: "cut"}
    flags = ("--requests", "8", "--output-len", "5", "--warmup", "4", "--concurrency", "1")
    code, report = bench(server, tmp_path, "mixed", *flags)
    assert code == 0
    assert report["errors"] == {"HTTP 429": 2, "error in the stream": 1, "connection cut": 1}
    assert (report["served"], report["requests"]) == (4, 8)
    assert "2 x HTTP 429, 1 x error in the stream, 1 x connection cut" in capsys.readouterr().out


def test_nothing_served_is_exit_code_1(server, tmp_path):
    server.statuses = dict.fromkeys(range(1, 50), 503)
    code, report = bench(server, tmp_path, "mixed", "--requests", "2", "--request-rate", "inf")
    assert code == 1
    assert report["errors"] == {"HTTP 503": 2}


def test_prompts_are_cut_to_the_context_that_the_server_tells(server, tmp_path):
    server.max_model_len = 100
    flags = ("--requests", "3", "--input-len", "300", "--output-len", "4", "--warmup", "0")
    _, report = bench(server, tmp_path, "mixed", *flags, "--concurrency", "2")
    assert "3 prompts were cut to fit 100 tokens" in report["notes"]
    assert [len(body["prompt"]) for body in server.bodies[1:]] == [80] * 3


def test_an_open_loop_is_said_to_measure_from_the_schedule(server, tmp_path):
    flags = ("--requests", "3", "--request-rate", "1000", "--burstiness", "0.5")
    _, report = bench(server, tmp_path, "mixed", *flags, "--output-len", "2", "--save-requests")
    assert report["loop"] == (
        "open loop, 1000 sessions/s, gamma, burstiness 0.5; times start at the scheduled arrival"
    )
    assert all(record["due"] <= record["sent"] for record in report["records"])


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("nothing",),
        ("mixed", "--groups", "3"),
        ("mixed", "--slo", "speed=1"),
        ("mixed", "--request-rate", "0"),
        ("all", "--out", "x.json"),
    ],
)
def test_bad_flags_exit_2(flags):
    with pytest.raises(SystemExit) as raised:
        serve.main([*flags, "--url", "http://127.0.0.1:1"] if flags else [])
    assert raised.value.code == 2


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match=r"127\.0\.0\.1:1: no connection"):
        serve.main(["mixed", "--url", "http://127.0.0.1:1"])


# -- pieces -------------------------------------------------------------------------------------


def test_the_roofline_is_compared_with_steps_not_with_tokens():
    found = Roofline(10_000_000, 10e9).describe(
        {"tokens_per_s_user": {"p50": 1000.0}, "tokens_per_step": 2.0}
    )
    assert found == "1000 steps/s (10 MB of weights at 10 GB/s); the median user reaches 0.5 of it"


def test_a_busy_client_warns():
    assert busy_note(0.5) == []
    assert "WARNING" in busy_note(0.51)[0]


def test_a_client_that_stood_still_warns():
    assert stall_note(0.1) == []
    assert stall_note(0.25) == ["WARNING: the client stalled for 250 ms, which latencies include"]

    async def work() -> float:
        async with stalls() as worst:
            await asyncio.sleep(0)  # the watch begins
            time.sleep(0.2)  # noqa: ASYNC251 - that is what it is to find
            await asyncio.sleep(0.06)
        return worst[0]

    assert 0.1 < asyncio.run(work()) < 5


def test_progress_is_one_short_line():
    assert progress_line([], 0, 0, 0.0).startswith("[....................] 0/0")
    assert len(progress_line([], 0, 10_000, 1e4)) < 78


def test_what_was_not_measured_is_a_dash():
    assert {row["p99"] for row in latency_rows({"ttft_ms": None})} == {"-"}


# -- offline ------------------------------------------------------------------------------------


def test_the_engine_computes_short_prompts_beside_long_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(offline, "measured_roofline", lambda *_: Roofline(10**7, 1e10))
    out = tmp_path / "out.json"
    monkeypatch.setattr(short_beside_long, "PAUSE_SECONDS", 0)  # one is sent on the fastest machine
    small = ["--long-len", "400", "--num-long", "2", "--shorts", "2", "--warmup", "1"]
    engine = ["--model", "builtin", "--threads", "1", "--kv-tokens", "8192"]
    offline.main(["short-beside-long", *small, *engine, "--save-requests", "--out", str(out)])
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["errors"] == {}
    assert report["cached_tokens"] == 0
    phases = Counter(record["name"] for record in report["records"])
    [row] = report["short_beside_long"]
    assert phases == {"short-alone/0": 2, "long-alone/0": 2, "long-beside/0": 2,
                      "short-beside/0": row["num_short"]}  # fmt: skip
    assert row["num_long"] == 2
    printed = capsys.readouterr().out
    assert "| short beside long |" in printed
    assert f"| {row['num_short']} beside 2" in printed


def test_the_engine_itself_runs_a_workload_and_compares_speculation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(offline, "measured_roofline", lambda *_: Roofline(10**7, 1e10))
    out = tmp_path / "out.json"
    small = ["--agents", "1", "--turns", "2", "--branches", "1", "--output-len", "6",
             "--system-len", "64", "--tools-len", "32", "--warmup", "1"]  # fmt: skip
    engine = ["--threads", "1", "--kv-tokens", "8192"]
    offline.main(["agents", *small, *engine, "--compare", "--repeats", "1", "--out", str(out)])
    report = json.loads(out.read_text(encoding="utf-8"))
    off, on = report["rows"]
    assert (off["speculation"], on["speculation"]) == ("off", "auto")
    assert off["errors"] == on["errors"] == 0
    pair = report["runs"][1]
    assert pair["off"]["output_tokens"] == pair["auto"]["output_tokens"] == 18
    assert pair["off"]["tokens_per_step"] == 1
    assert pair["off"]["prefix_hit_rate"] > 0.3
    assert pair["auto"]["kv_usage"]["max"] >= 0
    assert math.isfinite(report["on / off, tok/s"]["median"])
    assert "on / off" in capsys.readouterr().out
