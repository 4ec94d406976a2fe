"""``foretoken replica``: a process that serves a front, leaves it on a signal, or is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.api.cluster.wire.messages import Audit, Leaving, body_of
from foretoken.api.cluster.wire.transport import CLUSTER_KEY, FrontSocket
from support.forked import Forked, code, command, run_forked
from support.hand_front import HandFront, submit

SMALL = ["--kv-tokens", "4096", "--max-model-len", "1024", "--threads", "1"]
OPTIONS = {"kv_tokens": 4096, "max_model_len": 1024, "threads": 1}
PROMPT = "def fibonacci(n):\n"
PARAMS = SamplingParams(max_tokens=24, seed=7, temperature=0.8, stop=["return"])
ENDLESS = SamplingParams(max_tokens=900, seed=7, ignore_eos=True)
SECONDS = 90.0


class Process:
    """A replica in a process of its own, and a front by hand."""

    def __init__(self, process: Forked, front: HandFront, log: Callable[[], str]) -> None:
        self.process, self.front, self.log = process, front, log

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)


@contextlib.asynccontextmanager
async def replica(key: str | None = None, *, beats: bool = True) -> AsyncIterator[Process]:
    socket = FrontSocket("tcp://127.0.0.1:0", key)
    env = {**os.environ, **({} if key is None else {CLUSTER_KEY: key})}
    peers: list[bytes] = []
    front = HandFront(lambda message: socket.send(peers[-1], message))

    async def hear() -> None:
        while True:
            peer, message = await socket.receive()
            if peer not in peers:
                peers.append(peer)
                if beats:
                    front.beat()
            await front.take(message)  # type: ignore[arg-type]

    async def beat() -> None:
        while beats:
            await asyncio.sleep(0.5)
            if peers:
                front.beat()

    with tempfile.TemporaryFile() as out, open(os.devnull) as nothing:  # noqa: ASYNC230 - it never blocks
        words = ("replica", "builtin", "--front", socket.address, *SMALL)
        process = Forked(command, *words, env=env, stdin=nothing, stdout=out, stderr=out)
        tasks = [asyncio.create_task(each) for each in (hear(), beat())]

        def log() -> str:
            out.seek(0)
            return out.read().decode()

        try:
            await front.until(lambda: front.hello)
            yield Process(process, front, log)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait, 60)
            for each in tasks:
                each.cancel()
            socket.close()


def within_time(work: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(SECONDS):
            await work

    asyncio.run(main())


def test_a_replica_answers_as_the_sdk_and_moves_its_streams_on_a_signal() -> None:
    with LLM("builtin", **OPTIONS) as llm:
        [wanted] = [each.choices[0] for each in llm.generate([PROMPT], PARAMS)]
        prompt = llm.generate(PROMPT, SamplingParams(max_tokens=1)).prompt_token_ids
        endless = llm.generate(PROMPT, ENDLESS).token_ids

    async def work() -> None:
        async with replica(key="a secret of the cluster") as one:
            front = one.front
            heard = await front.serve(submit("a", prompt, PARAMS))
            assert heard.token_ids == wanted.token_ids
            assert (heard.last.finish_reason, heard.last.stop_reason) == (
                wanted.finish_reason, wanted.stop_reason,
            )  # fmt: skip
            audit = (await front.ask(Audit())).result
            assert isinstance(audit, bytes)
            assert body_of(audit)["ok"]
            stream = front.begin(submit("b", prompt, ENDLESS))
            await front.until(lambda: len(stream.token_ids) > 8)
            one.process.send_signal(signal.SIGTERM)
            await front.until(lambda: front.left)
            assert not stream.has_ended
            assert stream.token_ids == endless[: len(stream.token_ids)]
            assert front.pages  # of the prompt and of the answers
            assert await one.exit_code() == 0
            assert "accepted this replica" in one.log()

    within_time(work())


def test_a_front_sees_at_once_that_a_replica_was_killed() -> None:
    async def work() -> None:
        async with replica() as one:
            stream = one.front.begin(submit("a", [5, 6, 7], ENDLESS))
            await one.front.until(lambda: stream.token_ids)
            one.process.kill()
            await one.front.until(lambda: one.front.is_closed)
            assert one.front.left is None

    within_time(work())


def test_a_refused_replica_exits_1_with_the_reason() -> None:
    async def work() -> None:
        async with replica(beats=False) as one:
            one.front.say(Leaving(reason="it has another model"))
            assert await one.exit_code() == 1
            assert one.log().splitlines()[-1].endswith("refused this replica: it has another model")

    within_time(work())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "--front tcp://HOST:PORT"),
        (["--front", "ipc://here"], "front must be tcp://HOST:PORT"),
        (["--front", "tcp://10.0.0.1:5000"], CLUSTER_KEY),
        (["--front", "tcp://127.0.0.1:5000", "--port", "1"], "unknown flag --port"),
    ],
)
def test_a_front_that_cannot_be_exits_2_before_the_model_is_loaded(
    flags: list[str], problem: str
) -> None:
    done = run_forked(command, "replica", "no/model", *flags)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert problem in line


def test_the_missing_extra_is_named() -> None:
    done: subprocess.CompletedProcess[str] = run_forked(
        code,
        "import sys; sys.modules['zmq'] = None\n"
        "from foretoken.api.cli.commands import main\n"
        "sys.exit(main(['replica', 'no/model', '--front', 'tcp://127.0.0.1:5000']))",
    )
    assert done.returncode == 2
    assert "foretoken[events]" in done.stderr
    assert len(done.stderr.splitlines()) == 1
