"""Worker: one thread for work that may take long, and that no one waits for at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """Runs jobs in order. It begins with the first one; ``stack_bytes`` is its address space.

    A pool of `concurrent.futures` would be joined when the interpreter ends, however long its job
    takes, and gives no say over the stack.
    """

    def __init__(self, name: str, *, stack_bytes: int) -> None:
        self._name = name
        self._stack_bytes = stack_bytes
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._is_started = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its future can be cancelled until it begins."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        if not self._is_started:
            self._is_started = True
            self._start()
        return future

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

    def _run(self) -> None:
        while (next_one := self._jobs.get()) is not None:
            future, job = next_one
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del next_one, future, job  # may be big, and the next may be long in coming
