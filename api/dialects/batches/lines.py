"""Answer the requests of batches, as their routes would, in the engine's spare time."""

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

from ....core.errors import DeadlineExceeded, EngineDead, QueueFull, Unavailable
from ...serving.dialect import Dialect
from ...serving.errors import to_api_error
from ...serving.serving_context import SHUTTING_DOWN, Service
from ...types.request_context import CONTEXT, NOBODY, RequestContext, random_id
from .bodies import InputLine, LineError, LineResponse, OutputLine

logger = logging.getLogger(__name__)
MAX_LINES = 50_000  # as OpenAI has it
MAX_ERRORS = 100  # of an input that are told
LOOK_SECONDS = 0.2  # between looks whether requests of people have ended
ALONE_SECONDS = 5.0  # without a request of people: then batches have all of their places,
SHARE_BESIDE_PEOPLE = 4  # else one of so many
Dialects = Mapping[str, Dialect[Any]]
Put = Callable[[OutputLine], Awaitable[None]]
NumberedLine = tuple[int, bytes]
decode_line = msgspec.json.Decoder(InputLine).decode


def numbered_lines(file: Path) -> Iterator[NumberedLine]:
    """Yield the lines of a file that are not empty, with their places in it, from 1."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            if line.strip():
                yield number, line


async def split_lines(content: AsyncIterable[bytes]) -> AsyncIterator[list[NumberedLine]]:
    """Yield the same of a content that comes in parts, all lines that end in a part together."""
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
    """Append all of an answer. A disk that is nearly full takes a part, and only then fails."""
    data = msgspec.json.encode(line) + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


class LineCheck:
    """Finds what is wrong in an input. ``endpoint``: the path of all requests; None: any path."""

    def __init__(self, endpoint: str | None, paths: Collection[str]) -> None:
        self.count = 0  # requests
        self.errors: list[LineError] = []
        self._endpoint, self._paths = endpoint, paths
        self._known: set[str] = set()

    def add(self, lines: Iterable[NumberedLine]) -> bool:
        """Check further lines; whether more are to be checked."""
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
        """Note an input without requests."""
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
            message = f"custom_id {request.custom_id} is there twice"
            return LineError(code="duplicate_custom_id", message=message, param="custom_id")
        self._known.add(request.custom_id)
        if request.url not in self._paths or self._endpoint not in (None, request.url):
            wanted = self._endpoint or ", ".join(self._paths)
            message = f"url {request.url} must be {wanted}"
            return LineError(code="invalid_url", message=message, param="url")
        return None


class LineRunner:
    """Answers lines of any number of batches, at most ``num_places()`` at a time.

    Callers take turns, and so do the batches of one. While requests of people are open, or were
    lately, there are fewer places. Requests without a priority get the lowest.
    """

    def __init__(
        self, service: Service, dialects: Dialects, *, num_places: Callable[[], int]
    ) -> None:
        self._service, self._dialects = service, dialects
        self._all_places = num_places
        self._num_open = 0
        self._ended = asyncio.Event()  # of a line
        self._turn = asyncio.Lock()  # of the line that waits for a place
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()  # by caller

    async def run(self, lines: AsyncIterable[bytes], put: Put, *, caller: bytes = NOBODY) -> None:
        """Answer all on behalf of a caller. ``put`` gets each answer as it comes, in any order.

        Raises what ``put`` raises, and `EngineDead` when the server ends: what is not put is then
        left.
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
        """Wait for a place, and take it."""
        async with self._turn:
            while self._num_open >= self._num_places:
                self._ended.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
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
        is_alone = self._service.llm.seconds_alone >= ALONE_SECONDS
        return most if is_alone else max(1, most // SHARE_BESIDE_PEOPLE)

    async def _answer(self, line: bytes, caller: bytes) -> OutputLine | None:
        """Return the answer to a line; None if the server ends before that is complete."""
        request = decode_line(line)
        context = RequestContext(
            {"type": "http", "method": "POST", "path": request.url, "headers": []},
            caller=caller,
            num_bytes=len(line),
            in_batch=True,
        )
        CONTEXT.set(context)  # of this task
        status, body = await self._tried(self._dialects[request.url], bytes(request.body))
        is_cut = any("abort" in answer.finish_reasons for answer in context.answers)
        if self._service.outage is not None and (status != HTTPStatus.OK or is_cut):
            return None
        response = LineResponse(status_code=status, request_id=random_id(), body=body)
        return OutputLine(
            id=f"batch_req_{random_id()}", custom_id=request.custom_id, response=response
        )

    async def _tried(self, dialect: Dialect[Any], data: bytes) -> tuple[int, Any]:
        """Status and body of an answer, once there is room for its request.

        A request that waited for all of its time waits again, unless that was its own wish.
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
            return await reply.whole()
        finally:
            reply.close()


def _failed(dialect: Dialect[Any], error: Exception) -> tuple[int, Any]:
    """Status and body of an error; an unexpected one is logged."""
    answer = to_api_error(error)
    if answer.status == 500:
        logger.error("a request of a batch failed", exc_info=error)
    return answer.status, dialect.error_form.body(answer, None)
