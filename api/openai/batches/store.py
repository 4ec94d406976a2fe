"""BatchStore: files and batches of a server, in a folder, by owner."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
import weakref
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import msgspec
from msgspec import Struct

from ....core.errors import EngineDead, InvalidRequest
from ...serving.errors import ApiError
from ...serving.serving_context import Service
from ...types.request_context import caller, random_id
from .lines import (
    Dialects,
    LineRunner,
    check_lines,
    is_answered,
    numbered_lines,
    read_lines,
    write_line,
)
from .protocol import (
    BatchBody,
    Counts,
    CreateBatch,
    FileBody,
    LineError,
    LineErrors,
    OutputLine,
    Status,
)

logger = logging.getLogger(__name__)
WINDOW_SECONDS = 24 * 3600
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
T = TypeVar("T", bound=FileBody | BatchBody)


class _Kept(Struct, kw_only=True):
    """A file or a batch as it stands on disk, with the hash of its owner's key."""

    owner: str
    file: FileBody | None = None
    batch: BatchBody | None = None


class BatchStore:
    """Keeps what callers upload and what batches answer.

    ``folder``: survives the server; batches that it ended go on when they are next asked for. None:
    a temporary one. ``max_bytes`` bounds the files together: what would exceed it is refused.
    """

    def __init__(
        self, service: Service, dialects: Dialects, *, folder: str | None, max_bytes: int
    ) -> None:
        """Raises `InvalidRequest` for a folder that cannot be used."""
        self._service, self._dialects, self._max_bytes = service, dialects, max_bytes
        self._given, self._temporary = folder, None if folder else _Lazy()
        self._files: dict[str, tuple[bytes, FileBody]] = {}
        self._batches: dict[str, tuple[bytes, BatchBody]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_loaded = folder is None
        if folder is not None:
            try:
                Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                message = f"batch_dir: {folder}: {error.strerror}"
                raise InvalidRequest(message, param="batch_dir") from None

    # -- files ----------------------------------------------------------------------------------

    def add_file(self, data: bytes, filename: str, purpose: str, owner: bytes) -> FileBody:
        """Keep a file. Raises `ApiError` 413 where there is no room."""
        self._load()
        self._make_room(len(data))
        file = FileBody(
            id=f"file-{random_id()}", bytes=len(data), created_at=_now(), filename=filename[:256],
            purpose=purpose,
        )  # fmt: skip
        descriptor = os.open(self._folder / file.id, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(data)
        self._keep_file(owner, file)
        return file

    def files(self) -> list[FileBody]:
        """List those of the caller, the newest first."""
        self._load()
        return _own(self._files)

    def file(self, file_id: str) -> FileBody:
        """A file of the caller. Raises `ApiError` 404."""
        self._load()
        return _find(self._files, file_id, "file")

    def path(self, file_id: str) -> Path:
        """Return the path of its content. Raises `ApiError` 404."""
        return self._folder / self.file(file_id).id

    def delete_file(self, file_id: str) -> None:
        """Raise `ApiError` 404 where it is not, 400 while a batch reads it."""
        file = self.file(file_id)
        for _, batch in self._batches.values():
            if batch.input_file_id == file_id and batch.status in RUNNING:
                raise ApiError(400, f"batch {batch.id} reads the file {file_id}", param="file_id")
        del self._files[file_id]
        for name in (file.id, f"{file.id}.json"):
            (self._folder / name).unlink(missing_ok=True)

    # -- batches --------------------------------------------------------------------------------

    def create(self, body: CreateBatch) -> BatchBody:
        """Begin a batch. Raises `InvalidRequest`, and `ApiError` 404 for an unknown file."""
        self._load()
        if body.endpoint not in self._dialects:
            known = ", ".join(self._dialects)
            raise InvalidRequest(f"endpoint must be one of {known}", param="endpoint")
        _find(self._files, body.input_file_id, "file", param="input_file_id")
        batch = BatchBody(
            id=f"batch_{random_id()}", endpoint=body.endpoint, input_file_id=body.input_file_id,
            created_at=_now(), expires_at=_now() + WINDOW_SECONDS, request_counts=Counts(),
            metadata=body.metadata,
        )  # fmt: skip
        self._batches[batch.id] = caller(), batch
        self._save(batch)
        self._begin(batch.id)
        return batch

    def batches(self) -> list[BatchBody]:
        """List those of the caller, the newest first."""
        self._load()
        return _own(self._batches)

    def batch(self, batch_id: str) -> BatchBody:
        """A batch of the caller. Raises `ApiError` 404."""
        self._load()
        return _find(self._batches, batch_id, "batch")

    def cancel(self, batch_id: str) -> BatchBody:
        """Stop a batch; what is answered is kept. Raises `ApiError` 404, and 400 after its end."""
        batch = self.batch(batch_id)
        if batch.status not in RUNNING:
            raise ApiError(400, f"batch {batch_id} is {batch.status}")
        self._mark(batch, "cancelling")
        self._tasks[batch_id].cancel()
        return batch

    def _begin(self, batch_id: str) -> None:
        task = asyncio.create_task(self._run(batch_id))
        self._tasks[batch_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch_id, None))

    async def _run(self, batch_id: str) -> None:
        owner, batch = self._batches[batch_id]
        try:
            await self._answer(owner, batch)
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise  # the server ends
            self._finish(owner, batch, "cancelled")
        except TimeoutError:
            self._finish(owner, batch, "expired")
        except EngineDead:
            logger.info("batch %s stands still: the server ends", batch_id)
        except Exception as error:
            logger.exception("batch %s failed", batch_id)
            reason = LineError(code="server_error", message=type(error).__name__)
            self._fail(batch, [reason])

    async def _answer(self, owner: bytes, batch: BatchBody) -> None:
        source = self._folder / batch.input_file_id
        number, errors = await asyncio.to_thread(
            lambda: check_lines(numbered_lines(source), batch.endpoint, self._dialects)
        )
        batch.request_counts.total = number
        if errors:
            self._fail(batch, errors)
            return
        done = await asyncio.to_thread(self._answered, batch)
        self._mark(batch, "in_progress")
        outputs = _Outputs(self._part(batch, "output"), self._part(batch, "error"), batch)
        runner = LineRunner(self._service, self._dialects, outputs.put, caller=owner)
        try:
            async with asyncio.timeout(batch.expires_at - _now()):
                await runner.run(
                    line for line in read_lines(source) if _custom_id(line) not in done
                )
        finally:
            outputs.close()
        self._mark(batch, "finalizing")
        self._finish(owner, batch, "completed")

    def _answered(self, batch: BatchBody) -> set[str]:
        """Ids of requests that an earlier server answered; a last line that was cut is dropped."""
        done: set[str] = set()
        counts = batch.request_counts
        counts.completed = counts.failed = 0
        for kind in ("output", "error"):
            part = self._part(batch, kind)
            lines = read_lines(part) if part.exists() else ()
            whole = [each for each in lines if each.endswith(b"\n")]
            if whole:
                part.write_bytes(b"".join(whole))
            else:  # the next line would be written behind what was cut
                part.unlink(missing_ok=True)
            done |= {_custom_id(each) for each in whole}
            if kind == "output":
                counts.completed = len(whole)
            else:
                counts.failed = len(whole)
        return done

    def _fail(self, batch: BatchBody, errors: list[LineError]) -> None:
        batch.errors = LineErrors(data=errors)
        self._mark(batch, "failed")

    def _finish(self, owner: bytes, batch: BatchBody, status: Status) -> None:
        """Make files of the answers that there are."""
        for kind in ("output", "error"):
            part = self._part(batch, kind)
            if not part.exists():
                continue
            file = FileBody(
                id=f"file-{random_id()}", bytes=part.stat().st_size, created_at=_now(),
                filename=f"{batch.id}_{kind}.jsonl", purpose="batch_output",
            )  # fmt: skip
            part.rename(self._folder / file.id)
            self._keep_file(owner, file)
            setattr(batch, f"{kind}_file_id", file.id)
        self._mark(batch, status)

    def _part(self, batch: BatchBody, kind: str) -> Path:
        return self._folder / f"{batch.id}.{kind}"

    def _mark(self, batch: BatchBody, status: Status) -> None:
        batch.status = status
        setattr(batch, f"{status}_at", _now())
        self._save(batch)

    # -- the folder -----------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return Path(self._given) if self._temporary is None else self._temporary.folder  # type: ignore[arg-type]

    def _keep_file(self, owner: bytes, file: FileBody) -> None:
        self._files[file.id] = owner, file
        self._write(file.id, _Kept(owner=owner.hex(), file=file))

    def _save(self, batch: BatchBody) -> None:
        owner, _ = self._batches[batch.id]
        self._write(batch.id, _Kept(owner=owner.hex(), batch=batch))

    def _write(self, name: str, kept: _Kept) -> None:
        if self._temporary is not None:
            return
        file = self._folder / f"{name}.json"
        new = file.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(msgspec.json.encode(kept))
        new.replace(file)

    def _load(self) -> None:
        """Read, once, what an earlier server left, and go on with its batches."""
        if self._is_loaded:
            return
        self._is_loaded = True
        found = sorted(self._folder.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
        for path in found:
            try:
                kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
            except msgspec.DecodeError as error:
                logger.warning("%s is left out: %s", path, error)
                continue
            owner = bytes.fromhex(kept.owner)
            if kept.file is not None:
                self._files[kept.file.id] = owner, kept.file
            if kept.batch is not None:
                self._batches[kept.batch.id] = owner, kept.batch
        for batch_id, (owner, batch) in self._batches.items():
            if batch.status == "cancelling":
                self._finish(owner, batch, "cancelled")
            elif batch.status in RUNNING:
                self._begin(batch_id)

    def _make_room(self, num_bytes: int) -> None:
        taken = sum(file.bytes for _, file in self._files.values())
        if taken + num_bytes > self._max_bytes:
            most = self._service.settings.limits.named("max_files_bytes")
            raise ApiError(413, f"the files would exceed {most} bytes: delete some", param="file")


class _Lazy:
    """A temporary folder that is made when it is first used, and goes with its owner."""

    @cached_property
    def folder(self) -> Path:
        made = mkdtemp(prefix="foretoken-batches-")
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return Path(made)


class _Outputs:
    """The files that answers are appended to, each line at once."""

    def __init__(self, output: Path, error: Path, batch: BatchBody) -> None:
        self._paths, self._counts = (output, error), batch.request_counts
        self._opened: dict[Path, int] = {}

    def put(self, line: OutputLine) -> None:
        """Append a line to the output file, or to the error file if its status is not 200."""
        is_good = is_answered(line)
        path = self._paths[0 if is_good else 1]
        if path not in self._opened:
            self._opened[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        write_line(self._opened[path], line)
        if is_good:
            self._counts.completed += 1
        else:
            self._counts.failed += 1

    def close(self) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)


def _custom_id(line: bytes) -> str:
    return msgspec.json.decode(line, type=_Named).custom_id


class _Named(Struct):
    custom_id: str


def _own(kept: dict[str, tuple[bytes, T]]) -> list[T]:
    return [each for owner, each in reversed(kept.values()) if owner == caller()]


def _find(kept: dict[str, tuple[bytes, T]], name: str, kind: str, *, param: str = "id") -> T:
    owner, found = kept.get(name, (b"", None))
    if found is None or owner != caller():
        raise ApiError(404, f"No such {kind}: {name}", code=f"{kind}_not_found", param=param)
    return found


def _now() -> int:
    return int(time.time())
