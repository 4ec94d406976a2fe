"""A replica process whose engine hangs, or whose event loop stands still, ends as a server does.

Its requests go on in another process with the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.cluster.front.replicas import Replicas
from foretoken.api.runtime.preprocess import Prepared, PromptTokens, make_request
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.interface.request import Request
from support.fake_model import EOS, answer
from support.forked import Talking, script
from support.scripted_replica import front_of, read

SCRIPT = Path(__file__).parents[2] / "support" / "serve_engine.py"
PROMPT, NUM_TOKENS, SECONDS = [1, 2, 3], 24, 60.0


class Process:
    """A replica of the model of hashes."""

    def __init__(self, folder: Path, front: str, dump_dir: Path, **options: Any) -> None:
        settings = json.dumps({"front": front, "dump_dir": str(dump_dir), **options})
        self._dump_dir = dump_dir
        self._process = Talking(script, str(SCRIPT), str(folder), settings)
        self._said = {word: threading.Semaphore(0) for word in ("obeyed", "submitted", "entered")}
        threading.Thread(target=self._listen, daemon=True).start()
        self.pid = self._process.pid

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._said[line.strip()].release()

    async def wait(self, word: str) -> None:
        """Until it has said this once more than was waited for."""
        assert await asyncio.to_thread(self._said[word].acquire, timeout=SECONDS)

    def order(self, word: str) -> None:
        self._process.stdin.write(word + "\n")

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self._process.wait, SECONDS)

    def dump(self) -> dict[str, Any]:
        (path,) = self._dump_dir.iterdir()
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def close(self) -> None:
        self._process.close()


@contextlib.asynccontextmanager
async def two(
    folder: Path, dumps: Path, **options: Any
) -> AsyncIterator[tuple[Replicas, list[Process]]]:
    """A front with two replicas, in the order in which it asks them."""
    tokenizer = Tokenizer.load(folder, max_model_len=256)
    fingerprint = tokenizer.fingerprint()
    tokenizer.close()
    processes: list[Process] = []
    async with front_of(2, tokenizer=fingerprint, beat_seconds=1.0) as front:
        try:
            for number in range(2):
                own = dumps / str(number)
                processes.append(Process(folder, front.address, own, **options))
            await asyncio.wait_for(front.complete(), SECONDS)
            pids = [each["pid"] for each in front.describe()]
            yield front, sorted(processes, key=lambda each: pids.index(each.pid))
        finally:
            for each in processes:
                each.close()


def asked() -> Request:
    """A request that the first replica gets: both owe nothing."""
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=3, temperature=0.0)
    prepared = Prepared(prompt=PromptTokens(PROMPT), params=params)
    return make_request("r", prepared, seed=3, eos_token_ids=frozenset({EOS}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "cause"), [("hang", "died"), ("stall", "silent")], ids=["engine", "event loop"]
)
def test_a_replica_that_hangs_costs_no_token_and_exits_with_70(
    byte_level_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    order: str,
    cause: str,
) -> None:
    async def main() -> None:
        async with two(byte_level_folder, tmp_path, step_timeout=1.0) as (front, (first, second)):
            first.order("hang" if order == "hang" else "hold")
            await first.wait("obeyed")
            stream = front.submit(asked())
            await first.wait("entered")
            if order == "stall":
                first.order("stall")
            assert (await read(stream)).token_ids == answer(PROMPT, NUM_TOKENS)
            assert await first.exit_code() == 70
            assert first.dump()
            assert [each["pid"] for each in front.describe()] == [second.pid]
            lost = f'replicas_lost_total{{cause="{cause}"}} 1.0'
            assert lost.encode() in front.metrics.render()[0]
            # Before the end, which the other one's connection may not outlive.
            assert sum("is lost" in each.getMessage() for each in caplog.records) == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(main(), 2 * SECONDS))


def test_a_signal_dumps_a_replica_that_goes_on(byte_level_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with two(byte_level_folder, tmp_path) as (front, (first, _)):
            first.order("hold")
            await first.wait("obeyed")
            stream = front.submit(asked())
            await first.wait("entered")
            first._process.send_signal(signal.SIGUSR1)
            first.order("go")
            assert (await read(stream)).token_ids == answer(PROMPT, NUM_TOKENS)
            assert len(front.describe()) == 2
            dump = first.dump()
            assert dump["reason"] == "SIGUSR1"
            assert [each["prompt_tokens"] for each in dump["requests"]] == [len(PROMPT)]

    asyncio.run(asyncio.wait_for(main(), 2 * SECONDS))
