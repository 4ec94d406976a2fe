"""ModelThread: one thread, one call at a time, and nobody leaves while a call runs."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading

import pytest

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.model_thread import ModelThread
from foretoken.core.errors import EngineDead
from support.fake_model import FakeRunner, make_scheduler


@pytest.fixture
def thread():
    thread = ModelThread("test-model", lambda: None)
    yield thread
    thread.close()


async def test_calls_run_in_one_thread_in_order(thread) -> None:
    jobs = [thread.start(lambda i=i: (i, threading.current_thread().name)) for i in range(5)]
    results = [await job.result() for job in jobs]
    assert results == [(i, "test-model") for i in range(5)]


async def test_what_a_call_raises_is_raised_where_it_is_waited_for(thread) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await thread.start(fail).result()
    assert await thread.start(lambda: 7).result() == 7


async def test_a_start_that_fails_fails_every_call() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    broken = ModelThread("test-broken", fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await broken.start(lambda: 7).result()
    broken.close()


async def test_who_is_cancelled_waits_for_the_call_to_end(thread) -> None:
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait()
        ended.set()

    async def wait() -> None:
        try:
            await thread.start(work).result()
        finally:
            assert ended.is_set()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_that_ends_as_its_caller_is_cancelled_is_not_waited_for_again(thread) -> None:
    job = thread.start(lambda: None)
    task = asyncio.create_task(job.result())
    await asyncio.sleep(0)
    task.cancel()  # the future is cancelled now, the task told later:
    job.end(None, None)  # between the two the call ends
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)


def test_a_call_may_outlive_its_event_loop(thread) -> None:
    gate = threading.Event()

    async def begin() -> None:
        thread.start(gate.wait)

    async def scenario() -> int:
        return await thread.start(lambda: 7).result()

    asyncio.run(begin())
    gate.set()
    assert asyncio.run(scenario()) == 7


async def test_a_closed_thread_ends_after_the_calls_it_was_given() -> None:
    thread = ModelThread("test-closed", lambda: None)
    job = thread.start(threading.current_thread)
    thread.close()
    (await job.result()).join(10)


def test_an_exit_waits_for_the_call_under_way_and_for_nothing_else() -> None:
    script = """
import asyncio, os, threading
from foretoken.core.errors import EngineDead
from foretoken.core.engine.model_thread import ModelThread
begun = threading.Event()
def work():
    begun.set()
    threading.main_thread().join()  # the interpreter is on its way out
    os.write(1, b"ended")
async def main():
    ModelThread("idle", lambda: None)
    ModelThread("busy", lambda: None).start(work)
    begun.wait()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ended", b"")


async def test_a_call_after_the_end_is_refused_and_not_forgotten(thread) -> None:
    thread.close()
    with pytest.raises(EngineDead):
        thread.start(lambda: 7)


async def test_who_is_cancelled_twice_waits_all_the_same(thread) -> None:
    gate = threading.Event()
    job = thread.start(gate.wait)
    task = asyncio.create_task(job.result())
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_thread_of_an_engine_that_nobody_has_any_more_ends() -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        Engine(make_scheduler(), FakeRunner(4))
    threads = set(threading.enumerate()) - before
    gc.collect()
    for each in threads:
        each.join(10)
        assert not each.is_alive()


def test_an_interpreter_exits_while_an_engine_goes_on_in_another_thread() -> None:
    script = """
import asyncio, threading
from foretoken.core.errors import EngineDead
from foretoken.core.engine.model_thread import ModelThread
from foretoken.core.errors import EngineDead
begun = threading.Event()
async def turns(thread):
    try:
        while True:
            await thread.start(lambda: 7).result()
            begun.set()
    except EngineDead:
        pass
def serve():
    asyncio.run(turns(ModelThread("model", lambda: None)))
threading.Thread(target=serve, daemon=True).start()
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_exit_does_not_wait_for_a_call_that_was_given_up() -> None:
    script = """
import asyncio, threading
from foretoken.core.engine.model_thread import ModelThread
begun = threading.Event()
def work():
    begun.set()
    threading.Event().wait()
async def main():
    thread = ModelThread("stuck", lambda: None)
    job = thread.start(work)
    begun.wait()
    job.end(None, TimeoutError())
    try:
        await job.result()
    except TimeoutError:
        print("given up", flush=True)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=8)
    assert (done.returncode, done.stdout) == (0, b"given up\n")


async def test_what_a_call_brings_after_it_was_given_up_is_ignored(thread) -> None:
    gate = threading.Event()
    job = thread.start(gate.wait)
    job.end(None, TimeoutError())
    gate.set()
    assert await thread.start(lambda: 7).result() == 7, "the one before has come back"
    with pytest.raises(TimeoutError):
        await job.result()
