"""LLM: the synchronous counterpart of AsyncLLM."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from typing_extensions import override

from ...core.errors import EngineDead, ForetokenError
from ..build.built import Built
from ..runtime.preprocess import Conversation, Prompt
from ..runtime.serving_engine import ServingEngine
from ..types.results import Choice, Completion, Decisions, Embedding, RankedDocument, TextDelta
from ..types.sampling_params import SamplingParams
from ..types.verdict import Verdict
from .async_llm import AsyncLLM
from .options import (
    EmbedCall,
    ManyCalls,
    ManyChats,
    OneCall,
    OneChat,
    Params,
    PooledCall,
    RerankCall,
    VerifyCall,
)
from .rollout_calls import RolloutCalls

T = TypeVar("T")
OURS = "foretoken-"  # prefix of the names of all our threads


class _LoopThread:
    """An event loop in a thread. A call that `end` interrupts raises an error."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()  # threads do not survive a fork
        self._closed = False
        # Guards _closed: nothing is submitted after it is set. Reentrant, since the garbage
        # collector may close a stream during a submission, on the same thread.
        self._lock = threading.RLock()
        self._left: set[Future[Any]] = set()  # futures without a waiting caller
        self._thread = threading.Thread(target=self._serve, name=f"{OURS}loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. Ctrl-C cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise ForetokenError("an LLM cannot be called on its own event loop; use AsyncLLM")
        future = self._hand_over(work)
        try:
            return future.result()
        except CancelledError:
            raise EngineDead("this LLM was closed") from None
        except BaseException:
            future.cancel()
            raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop, if the loop runs.

        Wait for its end unless the calling thread must not wait.
        """
        with suppress(EngineDead):
            if _may_wait():
                self.run(work)
            else:
                self._left.add(future := self._hand_over(work))
                future.add_done_callback(self._left.discard)

    def soon(self, call: Callable[[str], None], argument: str) -> None:
        """Schedule a call on the loop without waiting for it. Do nothing after `end`."""
        if os.getpid() == self._pid:
            with self._lock:
                if not self._closed:
                    self.loop.call_soon_threadsafe(call, argument)

    def _hand_over(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if os.getpid() != self._pid:
            work.close()
            raise EngineDead(
                "this LLM was created before a fork: create another one in this process"
            )
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise EngineDead("this LLM is closed")

    def end(self, llm: AsyncLLM, *, waits: bool = True) -> None:
        """Close the LLM and stop the thread, once. Does nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        closing = asyncio.run_coroutine_threadsafe(_close(llm), self.loop)
        closing.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        if waits and _may_wait():
            self._thread.join()
            closing.result()


def _may_wait() -> bool:
    """Whether the calling thread may wait. Waiting on one of our own threads would deadlock."""
    return not threading.current_thread().name.startswith(OURS)


_Call = Callable[..., Coroutine[Any, Any, T | list[T]]]
"""A method of `AsyncLLM` for one input or several."""


class _Reader:
    """Reads the deltas of one answer on the event loop, on behalf of another thread."""

    def __init__(self, deltas: AsyncGenerator[TextDelta]) -> None:
        self._deltas = deltas
        self._reading: asyncio.Task[Any] | None = None

    async def next(self) -> TextDelta | None:
        """Return the next delta; None at the end of the answer."""
        self._reading = asyncio.current_task()
        return await anext(self._deltas, None)

    async def close(self) -> None:
        """Cancel a read that Ctrl-C interrupted, then close the answer."""
        if self._reading is not None:
            if not self._reading.cancelling():
                self._reading.cancel()
            await asyncio.wait({self._reading})
        await self._deltas.aclose()


class LLM(RolloutCalls):
    """A model and its engine, on an event loop in a thread of its own. Thread-safe.

    The engine is closed by `close`, by leaving the ``with`` block, by garbage collection, or at
    exit.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        offline: bool = False,
        **options: Any,  # noqa: ANN401 - EngineConfig checks them
    ) -> None:
        self._boot(AsyncLLM(model, revision=revision, offline=offline, **options))

    @classmethod
    def from_built(cls, built: Built[ServingEngine]) -> Self:
        """Return an LLM for an existing engine."""
        llm = cls.__new__(cls)
        llm._boot(AsyncLLM.from_built(built))
        return llm

    def _boot(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._thread = _LoopThread()
        self._end = weakref.finalize(self, self._thread.end, llm)
        try:
            self._run(llm.start())
        except KeyboardInterrupt:  # the loop's thread closes the model once it is loaded
            self._end.detach()
            self._thread.end(llm, waits=False)
            raise
        except BaseException:
            self.close()
            raise

    @override
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)

    def close(self) -> None:
        """Abort running requests and stop the thread. Idempotent."""
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
        **options: Unpack[OneCall],
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: Params = None, **options: Unpack[ManyCalls]
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: Params = None, **options: Any
    ) -> Completion | list[Completion]:
        """Return the completion of one prompt, or of each in a list, like `AsyncLLM.generate`."""
        generate: _Call[Completion] = self._llm.generate
        return self._run(generate(prompt, params, **options))

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **options: Unpack[OneChat],
    ) -> Completion: ...

    @overload
    def chat(
        self, messages: Sequence[Conversation], params: Params = None, **options: Unpack[ManyChats]
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Return the next message of a conversation, or of each in a list, like `AsyncLLM.chat`."""
        chat: _Call[Completion] = self._llm.chat
        return self._run(chat(messages, params, **options))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[OneCall]
    ) -> Iterator[TextDelta]:
        """Yield one delta per step, with all its tokens.

        Closing the iterator aborts the request.
        """
        return self._read(self._llm.stream(prompt, params, **options))

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **options: Unpack[OneChat],
    ) -> Iterator[TextDelta]:
        """Yield the deltas of the next message, split into the fields of `Choice`.

        Closing the iterator aborts the request.
        """
        return self._read(self._llm.stream_chat(messages, params, **options))

    @overload
    def embed(  # type: ignore[overload-overlap]
        self, inputs: str | list[int], **options: Unpack[EmbedCall]
    ) -> Embedding: ...

    @overload
    def embed(self, inputs: Sequence[Prompt], **options: Unpack[EmbedCall]) -> list[Embedding]: ...

    def embed(
        self, inputs: Prompt | Sequence[Prompt], **options: Any
    ) -> Embedding | list[Embedding]:
        """Return the embedding of one input, or of each in a list, like `AsyncLLM.embed`."""
        embed: _Call[Embedding] = self._llm.embed
        return self._run(embed(inputs, **options))

    def rerank(
        self, query: str, documents: Sequence[str], **options: Unpack[RerankCall]
    ) -> list[RankedDocument]:
        """Return the documents with scores for a query, best first, like `AsyncLLM.rerank`."""
        return self._run(self._llm.rerank(query, documents, **options))

    def decide(
        self,
        input: str | Conversation,
        questions: Sequence[Mapping[str, Any]],
        **options: Unpack[PooledCall],
    ) -> Decisions:
        """Return the answers to questions about one input, like `AsyncLLM.decide`."""
        return self._run(self._llm.decide(input, questions, **options))

    def verify(
        self,
        prompt: Prompt | Conversation,
        answer: Choice | str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[VerifyCall],
    ) -> Verdict:
        """Return whether the model gives a recorded answer, like `AsyncLLM.verify`."""
        return self._run(self._llm.verify(prompt, answer, params, **options))

    def _read(self, deltas: AsyncGenerator[TextDelta]) -> Iterator[TextDelta]:
        reader = _Reader(deltas)
        try:
            while (delta := self._run(reader.next())) is not None:
                yield delta
        finally:
            self._thread.finish(reader.close())

    def abort(self, request_id: str) -> None:
        """Abort a request. Unknown ids are ignored."""
        self._thread.soon(self._llm.abort, request_id)


async def _close(llm: AsyncLLM) -> None:
    """Close the LLM, then cancel calls that other threads wait for, so that they raise an error."""
    try:
        await llm.close()
    finally:
        await _end_tasks()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
