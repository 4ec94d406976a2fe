"""Inspect with a seed for each sample: its answers do not depend on concurrency or drafts.

    pip install inspect-ai openai
    foretoken serve --exact batch
    foretoken serve --exact batch --draft none --port 8001
    python examples/inspect_seeds.py http://127.0.0.1:8000 http://127.0.0.1:8001

`seeded` is the part to copy: a solver that gives each sample its own seed. Each server answers with
1 and with 8 connections, and every run is compared with the first.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import zlib
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

WORDS = ("amber", "basket", "candle", "desert", "engine", "forest", "garden", "hammer", "island",
         "jacket", "kettle", "lemon")  # fmt: skip


@solver
def seeded(base: int = 0) -> Solver:
    """Return a solver that asks for an answer with a seed from the sample's id and epoch."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        name = f"{base}/{state.sample_id}/{state.epoch}"
        return await generate(state, seed=zlib.crc32(name.encode()) >> 1)

    return solve


def answers(url: str, connections: int) -> dict[Any, str]:
    """Return the answers of a server, by sample and epoch."""
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        name = json.load(response)["data"][0]["id"]
    model = get_model(f"openai-api/local/{name}", base_url=f"{url}/v1", api_key="none")
    samples = [Sample(f"Describe the word {word}.", id=word) for word in WORDS]
    (log,) = eval(
        Task(dataset=samples, solver=seeded()), model=model, max_connections=connections,
        temperature=1.0, max_tokens=24, epochs=2, display="none", log_dir="inspect-logs",
    )  # fmt: skip
    if log.status != "success" or log.samples is None:
        raise SystemExit(f"the run on {url} failed: {log.error}")
    return {(each.id, each.epoch): each.output.completion for each in log.samples}


def main(urls: list[str]) -> None:
    """Compare the runs."""
    first = answers(urls[0], 1)
    for url, connections in [(url, num) for url in urls for num in (1, 8)]:
        again = answers(url, connections)
        differing = sum(first[each] != again[each] for each in first)
        print(f"{url}, {connections} connections: {differing} of {len(first)} answers differ")


if __name__ == "__main__":
    main(sys.argv[1:] or ["http://127.0.0.1:8000"])
