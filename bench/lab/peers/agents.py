"""Public benchmarks of agents on servers: `python -m foretoken.bench.lab.peers.agents FILE`.

agentperf-local, AIPerf and GuideLLM run unmodified on foretoken's and llama.cpp's servers with one
GGUF file, and on vLLM with the same weights in bfloat16. All servers stay up. Each tool measures
one after another, in rotating order, while the others are stopped by a signal. The figures come
from the records of requests in the tools' result files. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...common.report import Spread, heading, table, write_json
from ...load.figures import percentile
from ..gguf import foretoken, llama_cpp
from ..servers import Server, StartError, started
from .checkpoints import HOME, widen
from .environments import python

CONTEXT = 32_768  # Tokens of a request: the context length of Qwen2.5.
SLOTS = 4  # Concurrent requests of llama.cpp and vLLM; foretoken needs no such limit.
KV_GIB = 2
STREAMS = 2  # Concurrent sessions of AIPerf and GuideLLM.
AIPERF_SECONDS = 45
BLOCK = 64  # Tokens of a cache block in Weka's trace format.
TASKS = {"django__django-14500": 7, "django__django-15851": 5}
"""Tasks of agentperf-local's default replay, with the number of first turns that are measured."""
GUIDELLM_DATA = {
    "kind": "synthetic_text",
    "prompt_tokens": 200,
    "output_tokens": 60,
    "turns": 4,
    "prefix_tokens": 800,
    "branches": [{"at_turn": 1, "turns": 2}],
}
"""Sessions of four turns that share a system prompt; a sub-agent takes two turns of its own."""
GUIDELLM_REQUESTS = 18
TOOL_SECONDS = 600.0
REPLAY = "agentperf_local/data/replays/agentperf-default-v1"


class ToolError(Exception):
    """A tool failed. The message is one line."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An answered request: seconds until it ended and until its first token, and its tokens."""

    seconds: float
    first: float
    prompt: int
    cached: int
    output: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one run, from a tool's result files."""

    turns: Sequence[Turn]
    num_failed: int
    seconds: float

    def figures(self) -> dict[str, float]:
        """Return rates, percentiles in seconds, the cached share of prompts, and counts."""
        ends = sorted(turn.seconds for turn in self.turns)
        firsts = sorted(turn.first for turn in self.turns)
        prompt = sum(turn.prompt for turn in self.turns)
        return {
            "output tokens/s": sum(turn.output for turn in self.turns) / self.seconds,
            "turn p50, s": percentile(ends, 0.5),
            "turn p95, s": percentile(ends, 0.95),
            "first token p50, s": percentile(firsts, 0.5),
            "first token p95, s": percentile(firsts, 0.95),
            "cached share": sum(turn.cached for turn in self.turns) / prompt if prompt else 0.0,
            "turns": len(self.turns),
            "failed": self.num_failed,
        }


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of the tools: folders of the cut traces and of the tokenizer, and a round's seed."""

    traces: Path
    tokenizer: Path
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Tool:
    """A benchmark: its command for a server and a result folder, and the reader of that folder."""

    command: Callable[[Inputs, Server, Path], list[str]]
    read: Callable[[Path], Measured]


# -- agentperf-local ------------------------------------------------------------------------------


def cut_replay(package: Path, out: Path) -> None:
    """Write the first turns of `TASKS` as a replay of agentperf-local, and as Weka traces.

    The folder has ``manifest.json``, ``traces/*.jsonl`` and ``weka/*.json``.
    """
    manifest = json.loads((package / "manifest-x86_64.json").read_text(encoding="utf-8"))
    tasks = []
    for folder in ("traces", "weka"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for task in manifest["tasks"]:
        if (count := TASKS.get(task["task_id"])) is None:
            continue
        lines = (package / task["trace"]).read_text(encoding="utf-8").splitlines()[:count]
        rows = [json.loads(line) for line in lines]
        calls = sum(len(row["recorded_tool_calls_after"]) for row in rows)
        tasks.append(task | {"model_calls": count, "tool_calls": calls})
        (out / task["trace"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
        trace = json.dumps(weka(task["task_id"], rows))
        (out / "weka" / f"{task['task_id']}.json").write_text(trace, encoding="utf-8")
    cut = json.dumps(manifest | {"tasks": tasks})
    (out / "manifest.json").write_text(cut, encoding="utf-8")


def weka(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return turns of agentperf-local as a Weka trace: lengths, times, and shared cache blocks.

    A turn shares with the next one the whole blocks of its prompt.
    """
    requests: list[dict[str, object]] = []
    blocks: list[int] = []
    shared = num_blocks = 0
    began = 0.0
    for row in rows:
        tokens = row["recorded_prompt_tokens"]
        new = math.ceil(tokens / BLOCK) - shared
        blocks = [*blocks[:shared], *range(num_blocks, num_blocks + new)]
        num_blocks += new
        seconds = row["recorded_model_duration_ms"] / 1000
        requests.append(
            {"t": began, "type": "s", "model": "recorded", "in": tokens, "hash_ids": blocks}
            | {"out": row["target_output_tokens"], "api_time": seconds, "stop": "tool_use"}
        )
        began += seconds + row["simulated_tool_delay_ms_after"] / 1000
        shared = tokens // BLOCK
    head = {"id": name, "models": ["recorded"], "block_size": BLOCK, "hash_id_scope": "local"}
    return head | {"requests": requests}


def agentperf_command(inputs: Inputs, server: Server, out: Path) -> list[str]:
    """Return the command that replays the cut tasks, one turn after another."""
    command = [_program("agentperf-local"), "run", str(inputs.traces / "manifest.json")]
    command += ["--base-url", f"{server.url}/v1", "--model", server.model]
    # Other servers end an answer after a call, whatever length was asked for, unless calls are off.
    command += ["--tool-choice", "none", "--no-power", "--no-progress"]
    return [*command, "--output-dir", str(out)]


def read_agentperf(out: Path) -> Measured:
    """Read ``turns.jsonl`` and ``summary.json``."""
    rows = _lines(out / "turns.jsonl")
    good = [row for row in rows if row["success"]]
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    turns = [
        Turn(
            row["timing"]["e2e_latency_ms"] / 1000,
            row["timing"]["time_to_first_token_ms"] / 1000,
            row["tokens"]["server_prompt_tokens"],
            row["tokens"]["server_cached_prompt_tokens"] or 0,
            row["tokens"]["server_output_tokens"],
        )
        for row in good
    ]
    return Measured(turns, len(rows) - len(good), summary["measured_duration_ms"] / 1000)


# -- AIPerf ---------------------------------------------------------------------------------------


def aiperf_command(inputs: Inputs, server: Server, out: Path) -> list[str]:
    """Return the command of AIPerf's agent scenario on the Weka traces.

    ``--unsafe-override`` allows less than the 900 seconds that the scenario asks for.
    """
    command = [_program("aiperf"), "profile", "--scenario", "inferencex-agentx-mvp"]
    command += ["--unsafe-override", "--custom-dataset-type", "weka_trace"]
    command += ["--input-file", str(inputs.traces / "weka"), "--url", server.url]
    command += ["--model", server.model, "--tokenizer", str(inputs.tokenizer)]
    command += ["--endpoint-type", "chat", "--concurrency", str(STREAMS)]
    command += ["--benchmark-duration", str(AIPERF_SECONDS), "--random-seed", str(inputs.seed)]
    command += ["--use-server-token-count", "--ui", "none"]
    return [*command, "--trajectory-start-max-ratio", "0.5", "--artifact-dir", str(out)]


def read_aiperf(out: Path) -> Measured:
    """Read the requests of the measured phase in ``profile_export.jsonl``."""
    rows = [
        row
        for row in _lines(out / "profile_export.jsonl")
        if row["metadata"]["benchmark_phase"] == "profiling"
    ]
    turns = []
    ends: list[tuple[int, int]] = []
    num_failed = 0
    for row in rows:
        meta = row["metadata"]
        if meta["was_cancelled"]:
            continue  # The time was over.
        ends.append((meta["request_start_ns"], meta["request_end_ns"]))
        if row.get("error") is not None:
            num_failed += 1
            continue
        value = {name: each["value"] for name, each in row["metrics"].items()}
        turns.append(
            Turn(
                value["request_latency"] / 1000,
                value["time_to_first_token"] / 1000,
                value["usage_prompt_tokens"],
                value.get("usage_prompt_cache_read_tokens", 0),
                value["usage_completion_tokens"],
            )
        )
    if not turns:
        raise ToolError("no request ended in time")
    span = max(end for _, end in ends) - min(begin for begin, _ in ends)
    return Measured(turns, num_failed, span / 1e9)


# -- GuideLLM -------------------------------------------------------------------------------------


def guidellm_command(inputs: Inputs, server: Server, out: Path) -> list[str]:
    """Return the command of GuideLLM's sessions with a sub-agent."""
    command = [_program("guidellm"), "run", "--data", json.dumps(GUIDELLM_DATA)]
    target = f"target={server.url},model={server.model},request_format=/v1/chat/completions"
    command += ["--backend", f"kind=openai_http,{target}"]
    command += ["--profile", f"kind=concurrent,streams={STREAMS}"]
    command += ["--constraint", f"kind=max_requests,count={GUIDELLM_REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={inputs.tokenizer}"]
    command += ["--seed", f"kind=static,value={inputs.seed}"]
    command += ["--output", f"kind=json,path={out / 'report.json'}"]
    return [*command, "--disable-console-interactive"]


def read_guidellm(out: Path) -> Measured:
    """Read the requests of ``report.json``."""
    (found,) = json.loads((out / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    requests = found["requests"]
    turns = [
        Turn(
            row["request_latency"],
            row["time_to_first_token_ms"] / 1000,
            row["prompt_tokens"],
            row["cached_tokens"] or 0,
            row["output_tokens"],
        )
        for row in requests["successful"] or []
    ]
    return Measured(turns, len(requests["errored"] or []), found["duration"])


TOOLS = {
    "agentperf-local": Tool(agentperf_command, read_agentperf),
    "aiperf": Tool(aiperf_command, read_aiperf),
    "guidellm": Tool(guidellm_command, read_guidellm),
}
"""Tools by the name of their package, program and environment."""


def _program(name: str) -> str:
    """Return the path of a tool's program."""
    return str(HOME / name / "bin" / name)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# -- servers and runs -----------------------------------------------------------------------------


def commands(args: argparse.Namespace, weights: Path) -> dict[str, list[str]]:
    """Return the command lines of the installed servers, by the name of their column."""
    own = [*foretoken(str(args.file), CONTEXT, args.threads), "--no-ollama"]
    made = {"foretoken": [*own, "--kv-memory", f"{KV_GIB}GiB"]}
    if (server := HOME / "llama_cpp" / "bin" / "llama-server").is_file():
        peer = llama_cpp(server, args.file, CONTEXT, args.threads)
        peer += ["-fa", "on", "--alias", args.file.stem]
        made["llama.cpp"] = peer
        made["llama.cpp, n-gram"] = [*peer, "--spec-type", "ngram-simple"]
    if python("vllm").is_file():
        made["vllm, bf16"] = _vllm(weights, args.file.stem, args.threads)
    return {name: made[name] for name in args.only or made}


def _vllm(weights: Path, name: str, threads: int) -> list[str]:
    """Return the command of vLLM's server with its defaults: compiled, prefix caching on."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    command = ["env", f"VLLM_CPU_KVCACHE_SPACE={KV_GIB}", f"VLLM_CPU_OMP_THREADS_BIND={cores}"]
    command += ["VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1", str(python("vllm")), "-m"]
    command += ["vllm.entrypoints.openai.api_server", "--model", str(weights), "--seed", "0"]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--dtype", "bfloat16"]
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)]
    return [*command, "--enable-prompt-tokens-details"]


def run_tool(name: str, inputs: Inputs, server: Server, out: Path) -> Measured:
    """Run a tool on a server. Raises `ToolError`."""
    tool = TOOLS[name]
    out.mkdir(parents=True)
    log, result = out / "tool.log", out.resolve() / "results"
    with server.awake(), log.open("wb") as lines:
        try:
            subprocess.run(
                tool.command(inputs, server, result),
                stdout=lines,
                stderr=lines,
                check=False,  # A tool that reports failed turns fails, too; its results are read.
                timeout=TOOL_SECONDS,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ToolError(f"{type(error).__name__}; see {log}") from None
    try:
        return tool.read(result)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ToolError(f"no results, see {log}: {error!r}") from None


Runs = dict[str, dict[str, list[dict[str, float] | str]]]
"""Figures, or the reason of a failure, of each run by tool and server."""


def measure(
    servers: Sequence[Server],
    names: Sequence[str],
    inputs: Inputs,
    rounds: int,
    out: Path,
    seconds: float = math.inf,
) -> Runs:
    """Run each tool ``rounds`` times on each server, in rotating order; write ``runs.json``.

    No run begins later than ``seconds`` after the first. Each round has a seed of its own, so that
    its prompts are not in the caches yet.
    """
    runs: Runs = {name: {server.name: [] for server in servers} for name in names}
    last = time.monotonic() + seconds
    for index, name in itertools.product(range(rounds), names):
        first = index % len(servers)
        for server in (*servers[first:], *servers[:first]):
            if time.monotonic() > last:
                return runs
            folder = out / f"{name}-{server.name.replace(', ', '-')}-{index}"
            found: dict[str, float] | str
            try:
                found = run_tool(name, replace(inputs, seed=index), server, folder).figures()
            except ToolError as error:
                found = f"failed: {error}"
            runs[name][server.name].append(found)
            print(name, server.name, found, file=sys.stderr, flush=True)
            write_json(out / "runs.json", heading() | {"runs": runs})
    return runs


def rows(runs: Runs) -> list[dict[str, object]]:
    """Return a table row for each tool and server, with the spread of its runs."""
    made: list[dict[str, object]] = []
    for tool, by_server in runs.items():
        for server, found in by_server.items():
            good = [each for each in found if not isinstance(each, str)]
            row: dict[str, object] = {"tool": tool, "server": server, "runs": len(good)}
            for figure in good[0] if good else ():
                spread = Spread.of([each[figure] for each in good])
                row[figure] = spread if spread.low != spread.high else spread.median
            failures = [each for each in found if isinstance(each, str)]
            made.append(row | ({"error": failures[0]} if failures else {}))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the runs. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.peers.agents", description=__doc__
    )
    add = parser.add_argument
    add("file", type=Path, help="GGUF file that foretoken and llama.cpp load")
    add("--out", type=Path, required=True, help="new folder for traces, logs and results")
    add("--tool", action="append", choices=list(TOOLS), help="tool to run; may be repeated (all)")
    add("--only", action="append", metavar="COLUMN", help="server to measure; may be repeated")
    add("--threads", type=int, default=2, help="threads of each server (%(default)s)")
    add("--rounds", type=int, default=2, help="runs of each tool on each server (%(default)s)")
    add(
        "--seconds",
        type=float,
        default=math.inf,
        help="time after which no run begins (%(default)s)",
    )
    args = parser.parse_args(argv)
    weights = HOME / "checkpoints" / args.file.stem / "target"
    widen(args.file, weights)
    inputs = Inputs((args.out / "traces").resolve(), weights)
    (package,) = HOME.glob(f"agentperf-local/lib/python*/site-packages/{REPLAY}")
    cut_replay(package, inputs.traces)
    with contextlib.ExitStack() as stack:
        servers = []
        for name, command in commands(args, weights).items():
            try:
                servers.append(stack.enter_context(started(name, command)))
            except StartError as error:
                print(f"{name}: {error}", file=sys.stderr)
        runs = measure(
            servers, args.tool or list(TOOLS), inputs, args.rounds, args.out, args.seconds
        )
    print(json.dumps(heading()))
    print(f"\nmedian [lowest .. highest] of the runs\n\n{table(rows(runs))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
