"""LLM: the same as AsyncLLM for programs without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from ..core.errors import EngineDead
from ..core.params import SamplingParams
from .intake import Conversation, Prompt
from .results import Completion, TextDelta
from .sdk import AsyncLLM, Params, RequestIds

if TYPE_CHECKING:
    from .build import Built

T = TypeVar("T")


class _LoopThread:
    """An event loop in a thread; what is handed to it before `end` is done or fails, never lost."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._closed = False
        self._lock = threading.Lock()  # guards _closed: nothing is handed over after it is set
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="foretoken-loop", daemon=True
        )
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `end` was called."""
        return self._closed

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the loop and wait; leaving the wait, by Ctrl-C say, cancels it."""
        with self._lock:
            if self._closed:
                work.close()
                raise EngineDead("this LLM is closed")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except CancelledError:
            raise EngineDead("this LLM was closed") from None
        except BaseException:
            future.cancel()
            raise

    def end(self, llm: AsyncLLM) -> None:
        """Close the LLM and stop the thread; only the first call does."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if threading.current_thread() is self._thread:
            return  # the garbage collector came by on the very thread that would have to wait
        asyncio.run_coroutine_threadsafe(_close(llm), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class LLM:
    """A model and its engine, on an event loop in a thread of its own. Any thread may call it.

    Closed by `close`, by leaving its ``with`` block, or at last when it is collected or the
    interpreter ends.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:  # noqa: ANN401 - EngineConfig checks them
        self._boot(AsyncLLM(model, **options))

    @classmethod
    def from_built(cls, built: Built) -> Self:
        """Over an engine that is there already."""
        llm = cls.__new__(cls)
        llm._boot(AsyncLLM.from_built(built))
        return llm

    def _boot(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._thread = _LoopThread()
        self._end = weakref.finalize(self, self._thread.end, llm)
        try:
            self._run(llm.start())
        except BaseException:
            self.close()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)

    def close(self) -> None:
        """End what runs and stop the thread; idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: Params = None,
        *,
        request_id: Sequence[str] | None = None,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        request_id: RequestIds = None,
    ) -> Completion | list[Completion]:
        """Complete one prompt (text or token ids) or a list of them, in order."""
        return self._run(self._llm.generate(prompt, params, request_id=request_id))  # type: ignore[arg-type]

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: Params = None,
        *,
        request_id: Sequence[str] | None = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        request_id: RequestIds = None,
    ) -> Completion | list[Completion]:
        """The next message of one conversation or of a list of them."""
        return self._run(self._llm.chat(messages, params, request_id=request_id))  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Iterator[TextDelta]:
        """One delta per step, with all its tokens. Leaving early aborts the request."""
        deltas = self._llm.stream(prompt, params, request_id=request_id)
        try:
            while (delta := self._run(_next(deltas))) is not None:
                yield delta
        finally:
            if not self._thread.closed:
                self._run(deltas.aclose())

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        if not self._thread.closed:
            self._thread.loop.call_soon_threadsafe(self._llm.abort, request_id)


async def _next(deltas: Any) -> TextDelta | None:  # noqa: ANN401 - anext's own type
    return await anext(deltas, None)


async def _close(llm: AsyncLLM) -> None:
    """Close, then cancel what other threads still wait for, so that they get an error."""
    try:
        await llm.close()
    finally:
        await _end_tasks()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
