"""The thread of long jobs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from foretoken import QueueFull
from foretoken.api.text.executor import Job, Waiting, Worker
from foretoken.api.types.request_context import Origin

STACK = 2**20


def test_jobs_run_in_order_in_one_thread() -> None:
    worker, seen = Worker("w", stack_bytes=STACK), []
    futures = [worker.submit(lambda i=i: seen.append(i) or threading.get_ident()) for i in range(5)]
    assert len({future.result(10) for future in futures}) == 1
    assert seen == [0, 1, 2, 3, 4]
    worker.close()


def test_an_error_is_the_job_s_own_and_the_next_one_runs() -> None:
    worker = Worker("w", stack_bytes=STACK)
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(10)
    assert worker.submit(lambda: 3).result(10) == 3
    worker.close()


def test_what_waits_can_be_cancelled_and_is_when_it_closes() -> None:
    worker, go, begun = Worker("w", stack_bytes=STACK), threading.Event(), threading.Event()
    running = worker.submit(lambda: begun.set() or go.wait(10))
    assert begun.wait(10)
    early, late = worker.submit(lambda: 1), worker.submit(lambda: 2)
    assert early.cancel()
    worker.close()
    assert late.cancelled()
    go.set()
    assert running.result(10)


def test_the_interpreter_does_not_wait_for_a_job() -> None:
    code = (
        "import threading\nfrom foretoken.api.text.executor import Worker\n"
        "begun = threading.Event()\n"
        "Worker('w', stack_bytes=2**20).submit(lambda: begun.set() or threading.Event().wait())\n"
        "begun.wait()\nprint('bye')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "bye\n")


# -- what waits ---------------------------------------------------------------------------------


def test_callers_are_served_in_turn() -> None:
    worker, go, begun = Worker("w", stack_bytes=STACK), threading.Event(), threading.Event()
    worker.submit(lambda: begun.set() or go.wait(10))
    assert begun.wait(10)
    seen: list[str] = []
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        origin = Origin(name[:1].encode())
        last = worker.submit(lambda name=name: seen.append(name), origin)
    go.set()
    last.result(10)
    worker.submit(lambda: 1).result(10)
    assert seen == ["a1", "b1", "c1", "a2", "b2", "a3"]
    worker.close()


def waiting_job(caller: bytes, num_bytes: int) -> Job[None]:
    return Job(Future(), lambda: None, Origin(caller, num_bytes))


def test_a_caller_fills_its_share_and_all_of_them_the_whole() -> None:
    waiting = Waiting(max_bytes=100)
    for caller in (b"a", b"b", b"c"):
        waiting.put(waiting_job(caller, 20))
    with pytest.raises(QueueFull):
        waiting.put(waiting_job(b"a", 6))  # beyond a quarter
    waiting.put(waiting_job(b"a", 5))
    with pytest.raises(QueueFull):
        waiting.put(waiting_job(b"d", 36))  # beyond the whole
    assert waiting.take().origin == (b"a", 20)
    waiting.put(waiting_job(b"d", 36))
    assert [waiting.take().origin.caller for _ in range(4)] == [b"b", b"c", b"a", b"d"]
    assert not waiting
    waiting.put(waiting_job(b"a", 1000))  # one job may always wait
    assert len(waiting) == 1


async def test_cancelled_jobs_leave_the_queue() -> None:
    worker, go, begun = Worker("w", stack_bytes=STACK), threading.Event(), threading.Event()
    worker.submit(lambda: begun.set() or go.wait(10))
    assert begun.wait(10)
    gone = asyncio.create_task(worker.run(lambda: 1, seconds=1000, origin=Origin(b"a", 9)))
    await asyncio.sleep(0)
    assert worker.num_waiting == 1
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert worker.num_waiting == 0
    go.set()
    worker.close()


# -- deadlines ----------------------------------------------------------------------------------


async def test_a_job_beyond_its_time_is_given_up_and_the_next_one_has_its_own_time() -> None:
    worker, go = Worker("w", stack_bytes=STACK), threading.Event()
    late = asyncio.create_task(worker.run(lambda: go.wait(10), seconds=0.05))
    behind = asyncio.create_task(worker.run(lambda: 3, seconds=0.05))
    with pytest.raises(TimeoutError):
        await late
    assert not behind.done()  # its wait is not its own
    go.set()
    assert await behind == 3
    worker.close()
