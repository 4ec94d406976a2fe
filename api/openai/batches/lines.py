"""Answer the requests of a batch, as their routes would, in the engine's spare time."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from ....core.errors import EngineDead, QueueFull
from ...serving.errors import to_api_error
from ...serving.serve import Dialect
from ...serving.serving_context import Service
from ...types.request_context import CONTEXT, RequestContext, random_id
from .protocol import InputLine, LineError, LineResponse, OutputLine

logger = logging.getLogger(__name__)
MAX_LINES = 50_000  # as OpenAI has it
MAX_ERRORS = 100  # of an input that are told
Dialects = Mapping[str, Dialect[Any]]
_decode = msgspec.json.Decoder(InputLine).decode


def read_lines(file: Path) -> Iterator[bytes]:
    """The lines of a file that are not empty."""
    return (line for _, line in numbered_lines(file))


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their places in it, from 1."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            if line.strip():
                yield number, line


def write_line(descriptor: int, line: OutputLine) -> None:
    """Append all of an answer. A disk that is nearly full takes a part, and only then fails."""
    data = msgspec.json.encode(line) + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def is_answered(line: OutputLine) -> bool:
    """Whether its request has an answer, and no error."""
    return line.response is not None and line.response.status_code == HTTPStatus.OK


def check_lines(
    lines: Iterable[tuple[int, bytes]], endpoint: str | None, paths: Collection[str]
) -> tuple[int, list[LineError]]:
    """Number of requests, and what is wrong; ``endpoint``: the path of all, None: any of these."""
    known: set[str] = set()
    errors: list[LineError] = []
    count = 0
    for count, (number, line) in enumerate(lines, 1):
        problem = _problem(line, endpoint, paths, known)
        if count > MAX_LINES:
            problem = LineError(code="too_many_requests", message=f"more than {MAX_LINES:,} lines")
        if problem is not None:
            problem.line = number
            errors.append(problem)
        if len(errors) >= MAX_ERRORS or count > MAX_LINES:
            break
    if count == 0:
        errors.append(LineError(code="empty_file", message="the input has no requests"))
    return count, errors


def _problem(
    line: bytes, endpoint: str | None, paths: Collection[str], known: set[str]
) -> LineError | None:
    try:
        request = _decode(line)
        line.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineError(code="invalid_json_line", message=str(error))
    if request.custom_id in known:
        message = f"custom_id {request.custom_id} is there twice"
        return LineError(code="duplicate_custom_id", message=message, param="custom_id")
    known.add(request.custom_id)
    if request.url not in paths or endpoint not in (None, request.url):
        wanted = endpoint or ", ".join(paths)
        message = f"url {request.url} must be {wanted}"
        return LineError(code="invalid_url", message=message, param="url")
    return None


class LineRunner:
    """Answers lines, as many at a time as the engine runs.

    ``caller``: on whose behalf. ``put`` gets each answer as it comes, in any order. Requests
    without a priority get the lowest, so that those of people go first.
    """

    def __init__(
        self,
        service: Service,
        dialects: Dialects,
        put: Callable[[OutputLine], None],
        *,
        caller: bytes = b"",
    ) -> None:
        self._service, self._dialects, self._put = service, dialects, put
        self._caller = caller

    async def run(self, lines: Iterable[bytes]) -> None:
        """Answer all. Raises `EngineDead` when the server ends; what is not put is then left."""
        rest = iter(lines)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._service.llm.engine.limits.max_running):
                    group.create_task(self._work(rest))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _work(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            request = _decode(line)
            CONTEXT.set(_context(request.url, self._caller, len(line)))
            status, body = await self._answer(self._dialects[request.url], bytes(request.body))
            response = LineResponse(status_code=status, request_id=random_id(), body=body)
            self._put(
                OutputLine(
                    id=f"batch_req_{random_id()}", custom_id=request.custom_id, response=response
                )
            )

    async def _answer(self, dialect: Dialect[Any], data: bytes) -> tuple[int, Any]:
        """Status and body of the answer."""
        while True:
            try:
                return 200, await self._whole(dialect, data)
            except QueueFull as full:
                await self._service.llm.wait_for_room(full.retry_after)
            except EngineDead:
                raise
            except Exception as error:
                if self._service.outage is not None:
                    raise EngineDead(self._service.outage) from error
                answer = to_api_error(error)
                if answer.status == 500:
                    logger.error("a request of a batch failed", exc_info=error)
                return answer.status, dialect.error_body(answer)

    async def _whole(self, dialect: Dialect[Any], data: bytes) -> object:
        await self._service.check_json(data)
        body = dialect.decode(data)
        self._service.settings.limits.check_body(body)
        most = self._service.llm.config.max_priority
        if most and getattr(body, "priority", most) is None:
            body.priority = most
        reply = await dialect.submit(body)
        try:
            return await reply.whole()
        finally:
            reply.close()


def _context(path: str, caller: bytes, num_bytes: int) -> RequestContext:
    """A request of its own: its deadline counts from here, not from the batch's."""
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    return RequestContext(scope, caller=caller, num_bytes=num_bytes)
