"""LLM on threads of its own: garbage collection, forks and Ctrl-C at bad moments."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import warnings

import pytest

from foretoken import LLM, AsyncLLM, EngineDead, ForetokenError, SamplingParams

SECONDS = 10.0


def begin(llm, engine, **options):
    """A stream that was read once and whose next token never comes."""
    engine.by_hand = True

    def step_once():
        engine.submitted.acquire(timeout=SECONDS)
        llm._thread.loop.call_soon_threadsafe(engine.step)

    threading.Thread(target=step_once, daemon=True).start()
    stream = llm.stream([5, 6], **options)
    next(stream)
    return stream


def test_a_stream_dropped_on_the_loop_thread_is_closed_without_waiting_for_it(llm, engine):
    streams = [begin(llm, engine, request_id="me")]
    llm._thread.loop.call_soon_threadsafe(streams.clear)  # as the garbage collector does
    assert engine.was_aborted.acquire(timeout=SECONDS)
    assert engine.aborted == ["me"]


def test_an_llm_dropped_on_the_loop_thread_is_closed_and_its_thread_ends(built, engine):
    llms = [LLM.from_built(built)]
    thread = llms[0]._thread
    thread.loop.call_soon_threadsafe(llms.clear)
    thread._thread.join(SECONDS)
    assert not thread._thread.is_alive()
    assert thread.loop.is_closed()
    assert engine.draining, "closed"


def test_a_call_on_the_loop_thread_is_an_error_and_not_a_deadlock(llm):
    async def call():
        return llm.generate([5])

    future = asyncio.run_coroutine_threadsafe(call(), llm._thread.loop)
    with pytest.raises(ForetokenError, match="own event loop"):
        future.result(SECONDS)


def in_a_fork(action):
    """The exit status of a forked child that does this; a hang is ended by a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, on purpose
        child = os.fork()
    if child == 0:
        signal.alarm(int(SECONDS))
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def test_in_a_forked_child_an_llm_refuses_and_does_not_keep_it_from_ending(llm, engine):
    stream = begin(llm, engine)

    def child():
        with pytest.raises(EngineDead, match="before a fork"):
            llm.generate([5])
        stream.close()
        llm.abort("nobody")
        llm.close()

    assert in_a_fork(child) == 0
    engine.by_hand = False
    llm._thread.loop.call_soon_threadsafe(engine._work.set)
    assert next(stream).token_ids, "the parent goes on"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_load_waits_for_no_model_which_is_closed_when_it_comes(
    built, engine, monkeypatch
):
    """Once, the engine was lost, and kept its memory and its folders."""
    loaded, found = threading.Event(), []

    async def load(_llm):
        found.append(threading.current_thread())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert await asyncio.to_thread(loaded.wait, SECONDS)
        return built

    monkeypatch.setattr(AsyncLLM, "_load", load)
    with pytest.raises(KeyboardInterrupt):
        LLM()
    assert not engine.draining
    loaded.set()
    found[0].join(SECONDS)
    assert not found[0].is_alive()
    assert engine.draining, "closed"


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("n", [1, 2])
def test_ctrl_c_in_a_stream_is_a_keyboard_interrupt_and_aborts(llm, engine, n):
    engine.by_hand = True

    def interrupt():
        for _ in range(n):
            engine.submitted.acquire(timeout=SECONDS)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream([5, 6], SamplingParams(n=n)))
    thread.join()
    for _ in range(n):
        assert engine.was_aborted.acquire(timeout=SECONDS)
    assert len(engine.aborted) == n
