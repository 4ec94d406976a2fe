"""BatchJobs: the running batches, each in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from ....core.errors import EngineDead, InvalidRequest
from ...serving.errors import ApiError
from ...types.request_context import caller, random_id
from .bodies import BatchBody, Counts, CreateBatch, LineError, OutputLine, Status
from .lines import Dialects, LineCheck, LineRunner, decode_line, split_lines
from .store import BatchStore, KeptBatch, now

logger = logging.getLogger(__name__)
WINDOW_SECONDS = 24 * 3600


@dataclass(slots=True, eq=False)
class _Job:
    """A running batch."""

    kept: KeptBatch
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None  # runs the batch to its end
    work: asyncio.Task[list[LineError]] | None = None  # answers the requests
    lines: list[OutputLine] = field(default_factory=list)  # answers that are not written yet
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class BatchJobs:
    """Starts, ends and cancels batches. All calls must be made in the same event loop."""

    def __init__(self, store: BatchStore, dialects: Dialects, runner: LineRunner) -> None:
        self._store, self._dialects, self._runner = store, dialects, runner
        self._jobs: dict[str, _Job] = {}
        self._resuming = asyncio.Lock()
        self._is_resumed = False

    async def resume(self) -> None:
        """Resume the batches that an earlier server left unfinished. Later calls do nothing.

        Raises `Unavailable` while the earlier server still uses the file.
        """
        async with self._resuming:
            if not self._is_resumed:
                for kept in await self._store.under_way():
                    self._begin(kept)
                self._is_resumed = True

    async def create(self, body: CreateBatch) -> BatchBody:
        """Start a batch. Raises `InvalidRequest`, and `ApiError` 404 for an unknown file."""
        if body.endpoint not in self._dialects:
            known = ", ".join(self._dialects)
            raise InvalidRequest(f"endpoint must be one of {known}", param="endpoint")
        after = body.output_expires_after
        batch = BatchBody(
            id=f"batch_{random_id()}", endpoint=body.endpoint, input_file_id=body.input_file_id,
            created_at=now(), expires_at=now() + WINDOW_SECONDS, request_counts=Counts(),
            metadata=body.metadata,
        )  # fmt: skip
        kept = KeptBatch(caller(), batch, None if after is None else after.seconds)
        await self._store.add_batch(kept)
        self._begin(kept)
        return batch

    async def cancel(self, batch_id: str) -> BatchBody:
        """Cancel a batch and keep its answers. Raises `ApiError` 404, and 400 if it has ended."""
        batch = await self._store.find(BatchBody, caller(), batch_id)
        if batch.is_ended:
            raise ApiError(400, f"batch {batch_id} is {batch.status}", param="batch_id")
        job = self._jobs.get(batch_id)
        for kept in [] if job else await self._store.under_way(batch_id):
            job = self._begin(kept)  # an earlier attempt to write the final status failed
        if job is not None:
            job.is_cancelled, batch = True, job.kept.batch
            if job.work is not None:
                job.work.cancel()
        with suppress(ApiError):  # if the disk is full, the final status can still be written
            await self._store.mark(batch, "cancelling")
        return batch

    async def close(self) -> None:
        """Stop all batches; the next server resumes them."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._store.close()

    def _begin(self, kept: KeptBatch) -> _Job:
        batch_id = kept.batch.id
        job = self._jobs[batch_id] = _Job(kept, is_cancelled=kept.batch.status == "cancelling")
        job.task = asyncio.create_task(self._run(job))
        job.task.add_done_callback(lambda _: self._jobs.pop(batch_id, None))
        return job

    async def _run(self, job: _Job) -> None:
        """Answer a batch and write its final status, unless the server shuts down."""
        batch_id = job.kept.batch.id
        try:
            status, errors = await self._outcome(job)
            await self._store.end(job.kept, status, errors)
        except EngineDead:
            logger.info("batch %s is paused: the server is shutting down", batch_id)
        except Exception:
            logger.exception("could not store the result of batch %s", batch_id)

    async def _outcome(self, job: _Job) -> tuple[Status, list[LineError]]:
        """Answer a batch. Return its final status and its errors. Raises `EngineDead`."""
        errors: list[LineError] = []
        window = asyncio.timeout(job.kept.batch.expires_at - now())
        try:
            async with window:
                if not job.is_cancelled:
                    job.work = asyncio.create_task(self._answer(job))
                    errors = await job.work
        except asyncio.CancelledError:
            if not job.is_cancelled:
                raise  # the server is shutting down
        except EngineDead:
            raise
        except Exception as error:
            if window.expired():
                return "expired", []
            errors = [_reason(error)]
        if job.is_cancelled:
            return "cancelled", []
        return ("failed", errors) if errors else ("completed", [])

    async def _answer(self, job: _Job) -> list[LineError]:
        """Answer the requests that have no answer yet. Return the errors of the input."""
        batch = job.kept.batch
        check = LineCheck(batch.endpoint, self._dialects)
        async with aclosing(self._store.content(batch.input_file_id)) as content:
            async for lines in split_lines(content):
                if not await asyncio.to_thread(check.add, lines):
                    break
        check.end()
        batch.request_counts.total = check.count
        if check.errors:
            return check.errors
        done = await self._store.answered(job.kept)
        await self._store.mark(batch, "in_progress")

        async def put(line: OutputLine) -> None:
            await self._put(job, line)

        async with aclosing(self._lines(batch, done)) as wanted:
            await self._runner.run(wanted, put, caller=job.kept.owner)
        await self._store.mark(batch, "finalizing")
        return []

    async def _lines(self, batch: BatchBody, done: set[str]) -> AsyncGenerator[bytes]:
        async with aclosing(self._store.content(batch.input_file_id)) as content:
            async for lines in split_lines(content):
                for _, line in lines:
                    if decode_line(line).custom_id not in done:
                        yield line

    async def _put(self, job: _Job, line: OutputLine) -> None:
        """Write an answer, together with others that arrived during the last write."""
        job.lines.append(line)
        async with job.writing:
            if lines := list(job.lines):
                await self._store.append(job.kept, lines)
                del job.lines[: len(lines)]


def _reason(error: Exception) -> LineError:
    """Return why a batch failed. An unexpected error is logged, and its text is not exposed."""
    if isinstance(error, ApiError):
        return LineError(code=error.code or "server_error", message=str(error))
    logger.error("a batch failed", exc_info=error)
    return LineError(code="server_error", message=type(error).__name__)
