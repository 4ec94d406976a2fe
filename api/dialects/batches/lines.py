"""Answer the requests of batches through their routes, with spare capacity of the engine."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import Raw

from ....core.errors import DeadlineExceeded, EngineDead, QueueFull, Unavailable
from ...serving.dialect import Dialect
from ...serving.errors import to_api_error
from ...serving.serving_context import SHUTTING_DOWN, Service
from ...types.request_context import CONTEXT, NOBODY, RequestContext, random_id
from .bodies import InputLine, LineError, LineResponse, OutputLine

logger = logging.getLogger(__name__)
MAX_LINES = 50_000  # OpenAI's limit
MAX_ERRORS = 100  # maximum number of errors reported for an input
POLL_SECONDS = 0.2  # interval between checks for interactive requests
IDLE_SECONDS = 5.0  # after this time without interactive requests, batches use their full share
INTERACTIVE_DIVISOR = 4  # while interactive requests run, batches use 1/4 of their share
Dialects = Mapping[str, Dialect[Any]]
Put = Callable[[OutputLine], Awaitable[None]]
NumberedLine = tuple[int, bytes]
decode_line = msgspec.json.Decoder(InputLine).decode


def numbered_lines(file: Path) -> Iterator[NumberedLine]:
    """Yield the non-empty lines of a file with their line numbers, from 1."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            if line.strip():
                yield number, line


async def split_lines(content: AsyncIterable[bytes]) -> AsyncIterator[list[NumberedLine]]:
    """Yield the non-empty lines of content that arrives in parts, with their numbers from 1.

    The lines that end in the same part are yielded together.
    """
    number, begun = 0, bytearray()
    async for part in content:
        *lines, rest = part.split(b"\n")
        if lines:
            lines[0] = bytes(begun) + lines[0]
            begun.clear()
        begun += rest
        yield [each for each in enumerate(lines, number + 1) if each[1].strip()]
        number += len(lines)
    if begun.strip():
        yield [(number + 1, bytes(begun))]


def write_line(descriptor: int, line: OutputLine) -> None:
    """Append an answer to a file. If it raises OSError, a part may have been written."""
    data = msgspec.json.encode(line) + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


class LineCheck:
    """Validates the lines of an input. ``endpoint``: the path of all requests; None: any path."""

    def __init__(self, endpoint: str | None, paths: Collection[str]) -> None:
        self.count = 0  # number of requests
        self.errors: list[LineError] = []
        self._endpoint, self._paths = endpoint, paths
        self._known: set[str] = set()

    def add(self, lines: Iterable[NumberedLine]) -> bool:
        """Check more lines. Return whether to continue."""
        for number, line in lines:
            self.count += 1
            problem = self._problem(line)
            if self.count > MAX_LINES:
                message = f"more than {MAX_LINES:,} lines"
                problem = LineError(code="too_many_requests", message=message)
            if problem is not None:
                problem.line = number
                self.errors.append(problem)
            if len(self.errors) >= MAX_ERRORS or self.count > MAX_LINES:
                return False
        return True

    def end(self) -> None:
        """Report an input without requests."""
        if self.count == 0:
            message = "the input has no requests"
            self.errors.append(LineError(code="empty_file", message=message))

    def _problem(self, line: bytes) -> LineError | None:
        try:
            request = decode_line(line)
            line.decode()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return LineError(code="invalid_json_line", message=str(error))
        if request.custom_id in self._known:
            message = f"duplicate custom_id {request.custom_id}"
            return LineError(code="duplicate_custom_id", message=message, param="custom_id")
        self._known.add(request.custom_id)
        if request.url not in self._paths or self._endpoint not in (None, request.url):
            wanted = self._endpoint or ", ".join(self._paths)
            message = f"url {request.url} must be {wanted}"
            return LineError(code="invalid_url", message=message, param="url")
        return None


class LineRunner:
    """Answers the requests of all batches, at most ``num_places()`` at a time.

    Callers take turns, and so do the batches of one caller. Fewer requests run at a time while
    there are interactive requests and shortly after. A request without a priority gets the lowest
    one.
    """

    def __init__(
        self, service: Service, dialects: Dialects, *, num_places: Callable[[], int]
    ) -> None:
        self._service, self._dialects = service, dialects
        self._all_places = num_places
        self._num_open = 0
        self._ended = asyncio.Event()  # set when a line has been answered
        self._turn = asyncio.Lock()  # held by the line that may start next
        # lock per caller
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def run(self, lines: AsyncIterable[bytes], put: Put, *, caller: bytes = NOBODY) -> None:
        """Answer all lines on behalf of a caller. ``put`` receives each answer, in any order.

        Raises the errors of ``put``, and `EngineDead` if the server shuts down, which leaves the
        remaining lines unanswered.
        """
        turn = self._turns.setdefault(caller, asyncio.Lock())
        is_whole = True

        async def work(line: bytes) -> None:
            nonlocal is_whole
            answer = await self._answer(line, caller)
            if answer is None:
                is_whole = False
            else:
                await put(answer)

        try:
            async with asyncio.TaskGroup() as group:
                async for line in lines:
                    async with turn:
                        await self._enter()
                    group.create_task(work(line)).add_done_callback(self._leave)
                    if not is_whole:
                        break
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if not is_whole:
            raise EngineDead(self._service.outage or SHUTTING_DOWN)

    async def _enter(self) -> None:
        """Wait until one more request may run, and count it as running."""
        async with self._turn:
            while self._num_open >= self._num_places:
                self._ended.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._ended.wait()
            self._num_open += 1

    def _leave(self, _task: asyncio.Task[None]) -> None:
        self._num_open -= 1
        self._ended.set()

    @property
    def _num_places(self) -> int:
        try:
            most = self._all_places()
        except Unavailable:
            return 0
        is_idle = self._service.llm.seconds_alone >= IDLE_SECONDS
        return most if is_idle else max(1, most // INTERACTIVE_DIVISOR)

    async def _answer(self, line: bytes, caller: bytes) -> OutputLine | None:
        """Return the answer to a line; None if the server shuts down before it is complete."""
        request = decode_line(line)
        scope = {"type": "http", "method": "POST", "path": request.url, "headers": []}
        while True:
            context = RequestContext(scope, caller=caller, num_bytes=len(line), in_batch=True)
            CONTEXT.set(context)  # affects only this task
            num_pauses = self._num_pauses()
            status, body = await self._tried(self._dialects[request.url], bytes(request.body))
            is_cut = any("abort" in answer.finish_reasons for answer in context.answers)
            if not is_cut or self._num_pauses() == num_pauses:
                break
            # A trainer's pause ended the answer. The next one waits until the pause is over.
        if self._service.outage is not None and (status != HTTPStatus.OK or is_cut):
            return None
        response = LineResponse(status_code=status, request_id=random_id(), body=body)
        return OutputLine(
            id=f"batch_req_{random_id()}", custom_id=request.custom_id, response=response
        )

    def _num_pauses(self) -> int:
        """Return how often a trainer has ended all requests."""
        rollouts = self._service.llm.built.rollouts
        return 0 if rollouts is None else rollouts.num_aborts

    async def _tried(self, dialect: Dialect[Any], data: bytes) -> tuple[int, Any]:
        """Return the status and the body of an answer. Retry while the engine has no room.

        A request that timed out while waiting is retried, unless it set a deadline itself.
        """
        has_deadline = True
        while True:
            try:
                await self._service.check_json(data)
                body = dialect.decode(data)
                has_deadline = getattr(body, "deadline_ms", None) is not None
                return 200, await self._whole(dialect, body)
            except (QueueFull, Unavailable, DeadlineExceeded) as error:
                if isinstance(error, DeadlineExceeded) and has_deadline:
                    return _failed(dialect, error)
                await self._service.llm.wait_for_room(error.retry_after)
            except Exception as error:
                return _failed(dialect, error)

    async def _whole(self, dialect: Dialect[Any], body: Any) -> object:  # noqa: ANN401 - its struct
        self._service.settings.limits.check_body(body)
        most = self._service.llm.config.max_priority
        if most and getattr(body, "priority", most) is None:
            body.priority = most
        reply = await dialect.submit(body)
        try:
            whole = await reply.whole()
            return Raw(whole) if isinstance(whole, bytes) else whole  # bytes are JSON already
        finally:
            reply.close()


def _failed(dialect: Dialect[Any], error: Exception) -> tuple[int, Any]:
    """Return the status and the body of an error. An unexpected error is logged."""
    answer = to_api_error(error)
    if answer.status == 500:
        logger.error("a request of a batch failed", exc_info=error)
    return answer.status, dialect.error_form.body(answer, None)
