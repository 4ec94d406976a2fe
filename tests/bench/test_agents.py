"""Public benchmarks of agents: their cut inputs, their result files, and the table."""

from __future__ import annotations

import json
import sys

import pytest

from foretoken.bench.lab.peers import agents
from foretoken.bench.lab.peers.agents import Inputs, Measured, Tool, ToolError, Turn
from foretoken.bench.lab.servers import Server

TASK = "django__django-15851"


def turn_row(prompt: int, output: int, num_calls: int) -> dict[str, object]:
    return {
        "recorded_prompt_tokens": prompt,
        "target_output_tokens": output,
        "recorded_model_duration_ms": 500.0,
        "simulated_tool_delay_ms_after": 1500.0,
        "recorded_tool_calls_after": [{}] * num_calls,
    }


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A replay of two tasks, of which two turns of one are to be measured."""
    monkeypatch.setattr(agents, "TASKS", {TASK: 2})
    folder = tmp_path / "package"
    (folder / "traces").mkdir(parents=True)
    turns = [turn_row(130, 10, 2), turn_row(200, 20, 1), turn_row(300, 30, 1)]
    tasks = []
    for name in (TASK, "other"):
        text = "\n".join(map(json.dumps, turns)) + "\n"
        (folder / f"traces/{name}.jsonl").write_text(text, encoding="utf-8")
        tasks.append({"task_id": name, "trace": f"traces/{name}.jsonl", "model_calls": 3})
    manifest = json.dumps({"name": "replay", "tasks": tasks})
    (folder / "manifest-x86_64.json").write_text(manifest, encoding="utf-8")
    return folder


def test_a_cut_replay_has_the_first_turns_of_the_chosen_tasks(package, tmp_path):
    agents.cut_replay(package, tmp_path / "cut")
    manifest = json.loads((tmp_path / "cut/manifest.json").read_text(encoding="utf-8"))
    (task,) = manifest["tasks"]
    assert (task["task_id"], task["model_calls"], task["tool_calls"]) == (TASK, 2, 3)
    lines = (tmp_path / "cut" / task["trace"]).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["target_output_tokens"] for line in lines] == [10, 20]


def test_a_weka_trace_shares_the_whole_blocks_of_the_preceding_prompt(package, tmp_path):
    agents.cut_replay(package, tmp_path / "cut")
    trace = json.loads((tmp_path / f"cut/weka/{TASK}.json").read_text(encoding="utf-8"))
    first, second = trace["requests"]
    assert first["hash_ids"] == [0, 1, 2]  # 130 tokens: two whole blocks and a partial one.
    assert second["hash_ids"] == [0, 1, 3, 4]
    assert (first["t"], second["t"], second["in"], second["out"]) == (0.0, 2.0, 200, 20)


def write_lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def test_turns_of_agentperf_are_read_and_failed_ones_counted(tmp_path):
    timing = {"e2e_latency_ms": 2000.0, "time_to_first_token_ms": 500.0}
    tokens = {"server_prompt_tokens": 100, "server_output_tokens": 40}
    good = {"success": True, "timing": timing}
    rows = [
        good | {"tokens": tokens | {"server_cached_prompt_tokens": 60}},
        good | {"tokens": tokens | {"server_cached_prompt_tokens": None}},
        {"success": False, "timing": None, "tokens": None},
    ]
    write_lines(tmp_path / "turns.jsonl", rows)
    (tmp_path / "summary.json").write_text('{"measured_duration_ms": 5000}', encoding="utf-8")
    figures = agents.read_agentperf(tmp_path).figures()
    assert figures["output tokens/s"] == 16.0
    assert (figures["turn p50, s"], figures["first token p95, s"]) == (2.0, 0.5)
    assert (figures["cached share"], figures["turns"], figures["failed"]) == (0.3, 2, 1)


def aiperf_row(phase: str, begin: float, end: float, **more: object) -> dict[str, object]:
    names = {"request_latency": 1500.0, "time_to_first_token": 300.0}
    names |= {"usage_prompt_tokens": 50, "usage_completion_tokens": 12}
    meta = {"benchmark_phase": phase, "was_cancelled": False}
    meta |= {"request_start_ns": begin * 1e9, "request_end_ns": end * 1e9}
    metrics = {name: {"value": value} for name, value in names.items()}
    return {"metadata": meta, "metrics": metrics} | more


def test_aiperf_counts_neither_the_warm_up_nor_cancelled_requests(tmp_path):
    cancelled = aiperf_row("profiling", 4, 90)
    cancelled["metadata"]["was_cancelled"] = True
    rows = [
        aiperf_row("warmup", 0, 60),
        aiperf_row("profiling", 2, 4),
        aiperf_row("profiling", 3, 6, error={"code": 500}),
        cancelled,
    ]
    write_lines(tmp_path / "profile_export.jsonl", rows)
    measured = agents.read_aiperf(tmp_path)
    assert measured == Measured([Turn(1.5, 0.3, 50, 0, 12)], 1, 4.0)
    write_lines(tmp_path / "profile_export.jsonl", rows[:1])
    with pytest.raises(ToolError, match="no request ended in time"):
        agents.read_aiperf(tmp_path)


def test_requests_of_guidellm_are_read(tmp_path):
    row = {"request_latency": 3.0, "time_to_first_token_ms": 800.0, "prompt_tokens": 90}
    row |= {"cached_tokens": 30, "output_tokens": 9}
    requests = {"successful": [row], "errored": [{}], "incomplete": []}
    report = {"benchmarks": [{"requests": requests, "duration": 4.5}]}
    (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
    assert agents.read_guidellm(tmp_path) == Measured([Turn(3.0, 0.8, 90, 30, 9)], 1, 4.5)


def test_a_table_has_the_spread_of_the_runs_and_the_reason_of_a_failure(tmp_path, monkeypatch):
    """The other server's tool always fails, but writes no results in the second round alone."""

    def command(inputs: Inputs, server: Server, out):
        return [sys.executable, "-c", f"raise SystemExit({int(server.name == 'other')})"]

    def read(out):
        if out.parent.name == "tool-other-1":
            raise FileNotFoundError(out)
        seconds = 1.0 if out.parent.name.endswith("-0") else 2.0
        return Measured([Turn(seconds, 0.5, 10, 5, 4)], 0, seconds)

    monkeypatch.setattr(agents, "TOOLS", {"tool": Tool(command, read)})
    servers = [Server("foretoken", "http://a"), Server("other", "http://b")]
    runs = agents.measure(servers, ["tool"], Inputs(tmp_path, tmp_path), 2, tmp_path / "out")
    own, other = agents.rows(runs)
    assert str(own["output tokens/s"]) == "3 [2 .. 4]"
    assert (own["cached share"], own["turns"]) == (0.5, 1)
    assert (own["runs"], other["runs"]) == (2, 1)
    assert "error" not in own
    assert other["output tokens/s"] == 4.0
    assert "FileNotFoundError" in str(other["error"])
    saved = json.loads((tmp_path / "out/runs.json").read_text(encoding="utf-8"))["runs"]
    assert saved["tool"]["foretoken"][0]["turn p50, s"] == 1.0


def test_no_run_begins_after_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "TOOLS", {"tool": None})
    servers = [Server("foretoken", "http://a")]
    runs = agents.measure(servers, ["tool"], Inputs(tmp_path, tmp_path), 2, tmp_path, seconds=-1)
    assert runs == {"tool": {"foretoken": []}}


def test_each_round_has_prompts_of_its_own(tmp_path):
    server = Server("foretoken", "http://a", model="m")
    for command in (agents.aiperf_command, agents.guidellm_command):
        first, second = (
            command(Inputs(tmp_path, tmp_path, seed), server, tmp_path) for seed in (0, 1)
        )
        assert first != second
