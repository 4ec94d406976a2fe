"""The rising load on a server that refuses when it is told to."""

from __future__ import annotations

import asyncio
import json

from foretoken.bench.lab import overload
from foretoken.bench.lab.overload import held


def measured(server, *flags: str) -> tuple[list[dict], list[str]]:
    args = overload._parsed(["--rate", "200", "--seconds", "0.05", *flags])
    return asyncio.run(overload._measured(server.url, args))


def test_the_rate_rises_until_the_second_one_that_is_refused(server):
    server.statuses = {20: 429, 40: 429}  # the first is the probe, then 10, 15, 22 requests
    rows, _ = measured(server)
    assert [row["offered /s"] for row in rows] == [200, 300, 450]
    assert [row["requests"] for row in rows] == [10, 15, 22]
    assert [round(row["requests"] * row["refused"]) for row in rows] == [0, 1, 1]
    assert held(rows) == rows[0]
    assert rows[1]["refusal p99 ms"] > 0


def test_what_fails_is_not_what_was_refused(server):
    server.statuses, server.breaks = {3: 500}, {5: "error"}
    rows, _ = measured(server, "--max-steps", "1")
    assert (rows[0]["failed"], rows[0]["refused"]) == (2, 0)
    assert held(rows) is None


def test_the_steps_are_bounded_and_the_same_for_the_same_seed(server):
    rows, _ = measured(server, "--max-steps", "2")
    assert len(rows) == 2
    prompts = sorted(str(body["prompt"]) for body in server.bodies)
    server.reset()
    measured(server, "--max-steps", "2")
    assert sorted(str(body["prompt"]) for body in server.bodies) == prompts


def test_the_report_is_written_and_failures_are_told_by_the_status(
    server, tmp_path, monkeypatch, capsys
):
    class Started:
        def __init__(self, args):
            assert args == ["--log-level", "error", "--max-queued", "4"]

        def __enter__(self):
            return server.url

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(overload, "own_server", Started)
    server.statuses = {2: 500}
    out = tmp_path / "out.json"
    flags = ["--rate", "100", "--seconds", "0.05", "--max-steps", "1", "--out", str(out)]
    assert overload.main([*flags, "--", "--max-queued", "4"]) == 1
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["held"] is None
    assert report["rows"][0]["failed"] == 1
    assert "| offered /s" in capsys.readouterr().out
