"""Worker: one thread for work that may take long, and that no one waits for at the end."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
STACK_BYTES = 64 * 2**20  # address space: what is nested within all limits is walked by recursion


class Interrupted(BaseException):
    """Raised inside a job that nobody waits for any more; no ``except Exception`` keeps it."""


class Worker:
    """Runs jobs in order. It begins with the first one; ``stack_bytes`` is its address space.

    A pool of `concurrent.futures` would be joined when the interpreter ends, however long its job
    takes, and gives no say over the stack.
    """

    def __init__(self, name: str, *, stack_bytes: int = STACK_BYTES) -> None:
        self._name = name
        self._stack_bytes = stack_bytes
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._is_started = False
        self._lock = threading.Lock()
        self._current: Future[Any] | None = None  # the job that may be interrupted

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its future can be cancelled until it begins."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        if not self._is_started:
            self._is_started = True
            self._start()
        return future

    async def run(self, job: Callable[[], T], *, seconds: float) -> T:
        """Await a job, for so long from when it begins; then, or when cancelled, it is interrupted.

        Raises `TimeoutError`. Python code ends at its next instruction, a call into C when it
        returns: those behind it wait for that.
        """
        loop = asyncio.get_running_loop()
        is_awaited = True

        def begin() -> None:
            if is_awaited:
                limit.reschedule(loop.time() + seconds)

        def timed() -> T:
            loop.call_soon_threadsafe(begin)
            return job()

        future = self.submit(timed)
        try:
            async with asyncio.timeout(None) as limit:
                return await asyncio.wrap_future(future)
        except BaseException:
            self.interrupt(future)
            raise
        finally:
            is_awaited = False

    def interrupt(self, future: Future[Any]) -> None:
        """Raise `Interrupted` in the thread if it is at this job."""
        with self._lock:
            if self._current is future:
                self._current = None  # no second one: the handler of the first is not in a job
                _raise_in(self._ident, Interrupted)

    def close(self) -> None:
        """Cancel what waits; what runs goes on."""
        with suppress(Empty):
            while True:
                waiting = self._jobs.get_nowait()
                if waiting is not None:
                    waiting[0].cancel()
        self._jobs.put(None)

    def _start(self) -> None:
        """The stack of a thread is fixed when it begins; others begin as they always did."""
        before = threading.stack_size(self._stack_bytes)
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        finally:
            threading.stack_size(before)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        self._ident = threading.get_ident()
        while (next_one := self._jobs.get()) is not None:
            future, job = next_one
            if not future.set_running_or_notify_cancel():
                continue
            result, error = self._outcome(future, job)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del next_one, future, job, result, error  # may be big, and the next long in coming

    def _outcome(
        self, future: Future[T], job: Callable[[], T]
    ) -> tuple[T | None, BaseException | None]:
        """What came of a job; an interrupt may come at any instruction up to `_end`."""
        result: T | None = None
        error: BaseException | None = None
        try:
            self._current = future
            try:
                result = job()
            except BaseException as raised:
                error = raised
            self._end()
        except Interrupted as late:
            error = late
        return result, error

    def _end(self) -> None:
        """From here on the job cannot be interrupted; an interrupt that was on its way is lost."""
        with self._lock:
            self._current = None
        _raise_in(self._ident, None)


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    """Let a thread raise this at its next instruction; None takes it back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), None if error is None else ctypes.py_object(error)
    )
