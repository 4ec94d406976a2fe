"""BatchStore: files and batches of a server by owner, in a database."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from sqlite3 import Connection
from typing import IO, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from ....core.errors import InvalidRequest
from ...serving.errors import ApiError
from ...serving.limits import Limits
from .bodies import BatchBody, Counts, FileBody, LineError, LineErrors, OutputLine, Status
from .database import Database, Job

PIECE_BYTES = 2**16
READ_PIECES = 16  # number of pieces of a file that one query reads
NEVER = 2**62  # later than any Unix time
T = TypeVar("T", FileBody, BatchBody)


class Page(NamedTuple):
    """A page of a list: at most ``limit`` entries after the entry with the id ``after``."""

    limit: int
    after: str | None = None


class Outputs(NamedTuple):
    """Ids of the files to which a batch's answers are written."""

    good: str
    bad: str


class KeptBatch(NamedTuple):
    """A stored batch that has not ended."""

    owner: bytes
    batch: BatchBody
    output_seconds: int | None = None  # requested lifetime of its output files

    @property
    def outputs(self) -> Outputs:
        """The ids of the output files, which callers see after the batch has ended."""
        name = self.batch.id.removeprefix("batch_")
        return Outputs(f"file-{name}-output", f"file-{name}-error")


class BatchStore:
    """Stores uploads and batch outputs, within the limits of the server."""

    def __init__(self, database: Database, limits: Limits) -> None:
        self._database, self._limits = database, limits
        self._num_arriving = 0  # bytes of uploads in progress
        self.run, self.close = database.run, database.close

    # -- files ----------------------------------------------------------------------------------

    @contextmanager
    def arriving(self) -> Iterator[_Arrival]:
        """Yield a counter of an upload's bytes, which count toward the limit on all files."""
        arrival = _Arrival(self)
        try:
            yield arrival
        finally:
            self._num_arriving -= arrival.num_bytes

    async def check_room(self) -> int:
        """Return how many more bytes may be stored. Raises `ApiError` 413 for too many files."""
        return await self.run(self._room)

    def _room(self, connection: Connection) -> int:
        _sweep(connection, self._limits.file_seconds)
        count, num_bytes = _one(connection, "SELECT count(*), ifnull(sum(bytes), 0) FROM files")
        if count >= self._limits.max_files:
            most = self._limits.named("max_files")
            raise _too_many(f"the maximum of {most} files is reached: delete some")
        return self._limits.max_files_bytes - num_bytes

    async def add_file(self, file: FileBody, owner: bytes, content: IO[bytes]) -> FileBody:
        """Store a file. Raises `ApiError` 413 if the limit is exceeded, 507 if the disk is full."""

        def add(connection: Connection) -> None:
            if file.bytes > self._room(connection):
                raise self.too_large()
            pieces = iter(lambda: content.read(PIECE_BYTES), b"")
            rows = ((file.id, each) for each in pieces)
            connection.executemany("INSERT INTO pieces (file_id, data) VALUES (?, ?)", rows)
            _insert_file(connection, file, owner)

        await self.run(add)
        return file

    def too_large(self) -> ApiError:
        """Return a 413 error: the total size of all files would exceed the limit."""
        most = self._limits.named("max_files_bytes")
        return _too_many(f"the files would exceed {most} bytes in total: delete some")

    def expiry(self, since: int, seconds: int | None) -> int:
        """Return when a file expires: after ``seconds``, but not later than the server's limit."""
        most = self._limits.file_seconds
        return since + int(most if seconds is None else min(seconds, most))

    async def delete_file(self, owner: bytes, file_id: str) -> None:
        """Delete a file. Raises `ApiError` 404 if it is missing, 400 while a batch reads it."""

        def delete(connection: Connection) -> None:
            self._find(connection, FileBody, owner, file_id)
            reader = connection.execute(
                "SELECT id FROM batches WHERE input_file_id = ? AND ended_at IS NULL", (file_id,)
            ).fetchone()
            if reader is not None:
                message = f"batch {reader[0]} reads the file {file_id}"
                raise ApiError(400, message, param="file_id")
            connection.execute("DELETE FROM pieces WHERE file_id = ?", (file_id,))
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self._database.run_at_last(delete)

    async def content(self, file_id: str) -> AsyncGenerator[bytes]:
        """Yield the content of a file in parts."""
        number = -1
        while True:
            data, number = await self.run(_reading(file_id, number))
            if not data:
                return
            yield data

    # -- files and batches ----------------------------------------------------------------------

    async def find(self, kind: type[T], owner: bytes, name: str, *, param: str = "id") -> T:
        """Return a file or a batch of this owner. Raises `ApiError` 404."""
        return await self.run(lambda connection: self._find(connection, kind, owner, name, param))

    def _find(
        self, connection: Connection, kind: type[T], owner: bytes, name: str, param: str = "id"
    ) -> T:
        is_kept, since = self._is_kept(kind)
        row = connection.execute(
            f"SELECT body FROM {_table(kind)} WHERE id = ? AND owner = ? AND {is_kept}",
            (name, owner, since),
        ).fetchone()
        if row is None:
            what = "file" if kind is FileBody else "batch"
            raise ApiError(404, f"No such {what}: {name}", code=f"{what}_not_found", param=param)
        return msgspec.json.decode(row[0], type=kind)

    def _is_kept(self, kind: type[FileBody] | type[BatchBody]) -> tuple[str, float]:
        """Return an SQL condition for entries that have not expired, and its parameter."""
        if kind is FileBody:
            return "expires_at > ?", now()
        return f"ifnull(ended_at, {NEVER}) > ?", now() - self._limits.file_seconds

    async def listed(
        self, kind: type[T], owner: bytes, page: Page, *, purpose: str | None = None
    ) -> tuple[list[T], bool]:
        """Return a page of an owner's entries, newest first, and whether more entries follow."""
        table = _table(kind)

        def read(connection: Connection) -> tuple[list[T], bool]:
            is_kept, since = self._is_kept(kind)
            given: dict[str, object] = {"owner = ?": owner, is_kept: since}
            if page.after is not None:
                row = connection.execute(
                    f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
                ).fetchone()
                if row is None:
                    raise InvalidRequest(f"after: unknown id {page.after}", param="after")
                given["number < ?"] = row[0]
            if purpose is not None:
                given["purpose = ?"] = purpose
            rows = connection.execute(
                f"SELECT body FROM {table} WHERE {' AND '.join(given)}"
                " ORDER BY number DESC LIMIT ?",
                (*given.values(), page.limit + 1),
            ).fetchall()
            found = [msgspec.json.decode(body, type=kind) for (body,) in rows]
            return found[: page.limit], len(found) > page.limit

        return await self.run(read)

    # -- batches --------------------------------------------------------------------------------

    async def add_batch(self, kept: KeptBatch) -> None:
        """Store a batch. Raises `ApiError` 404 for an unknown file, 429 for too many batches."""
        batch = kept.batch

        def add(connection: Connection) -> None:
            _sweep(connection, self._limits.file_seconds)
            self._find(connection, FileBody, kept.owner, batch.input_file_id, "input_file_id")
            if _one(connection, "SELECT count(*) FROM batches")[0] >= self._limits.max_batches:
                self._drop_batch(connection)
            connection.execute(
                "INSERT INTO batches (id, owner, input_file_id, output_seconds, body)"
                " VALUES (?, ?, ?, ?, ?)",
                (
                    batch.id,
                    kept.owner,
                    batch.input_file_id,
                    kept.output_seconds,
                    msgspec.json.encode(batch),
                ),
            )

        await self.run(add)

    def _drop_batch(self, connection: Connection) -> None:
        """Delete the oldest ended batch of the owner with the most ended batches."""
        owner = connection.execute(
            "SELECT owner FROM batches WHERE ended_at IS NOT NULL GROUP BY owner"
            " ORDER BY count(*) DESC LIMIT 1"
        ).fetchone()
        if owner is None:
            most = self._limits.named("max_batches")
            message = f"the maximum of {most} running batches is reached"
            headers = {"retry-after": "60"}
            raise ApiError(429, message, kind="rate_limit_error", headers=headers)
        connection.execute(
            "DELETE FROM batches WHERE number = (SELECT min(number) FROM batches"
            " WHERE owner = ? AND ended_at IS NOT NULL)",
            owner,
        )

    async def under_way(self, batch_id: str | None = None) -> list[KeptBatch]:
        """Return the batches that have not ended, oldest first, or the one with this id."""

        def read(connection: Connection) -> list[KeptBatch]:
            rows = connection.execute(
                "SELECT owner, body, output_seconds FROM batches WHERE ended_at IS NULL"
                " AND id = ifnull(?, id) ORDER BY number",
                (batch_id,),
            )
            decode = msgspec.json.Decoder(BatchBody).decode
            return [KeptBatch(owner, decode(body), seconds) for owner, body, seconds in rows]

        return await self.run(read)

    async def mark(self, batch: BatchBody, status: Status) -> None:
        """Store the status of a running batch."""
        _set_status(batch, status, now())
        data = msgspec.json.encode(batch)
        await self.run(lambda connection: _save(connection, batch.id, data))

    async def answered(self, kept: KeptBatch) -> set[str]:
        """Return the ids of the answered requests, and update the batch's counts."""

        def read(connection: Connection) -> set[str]:
            kept.batch.request_counts = _counted(connection, kept)
            rows = connection.execute(
                "SELECT custom_id FROM pieces WHERE file_id IN (?, ?)", kept.outputs
            )
            return {custom_id for (custom_id,) in rows}

        return await self.run(read)

    async def append(self, kept: KeptBatch, lines: Sequence[OutputLine]) -> None:
        """Append answers to the output file, or to the error file if their status is not 200."""
        batch, counts = kept.batch, kept.batch.request_counts
        num_good = sum(line.is_answered for line in lines)
        counts = replace(
            counts,
            completed=counts.completed + num_good,
            failed=counts.failed + len(lines) - num_good,
        )
        rows = [
            (
                kept.outputs.good if line.is_answered else kept.outputs.bad,
                line.custom_id,
                msgspec.json.encode(line) + b"\n",
            )
            for line in lines
        ]

        data = msgspec.json.encode(replace(batch, request_counts=counts))

        def append(connection: Connection) -> None:
            connection.executemany(
                "INSERT INTO pieces (file_id, custom_id, data) VALUES (?, ?, ?)", rows
            )
            _save(connection, batch.id, data)

        await self.run(append)
        batch.request_counts = counts

    async def end(self, kept: KeptBatch, status: Status, errors: Sequence[LineError] = ()) -> None:
        """End a batch and publish its answers as files."""
        ended_at = now()
        batch = replace(kept.batch, errors=LineErrors(data=[*errors]) if errors else None)
        _set_status(batch, status, ended_at)

        def end(connection: Connection) -> None:
            batch.request_counts = _counted(connection, kept)
            for kind, file_id in zip(("output", "error"), kept.outputs, strict=True):
                num_bytes = _one(
                    connection,
                    "SELECT ifnull(sum(length(data)), 0) FROM pieces WHERE file_id = ?",
                    file_id,
                )[0]
                if num_bytes:
                    file = FileBody(
                        id=file_id, bytes=num_bytes, created_at=ended_at, purpose="batch_output",
                        filename=f"{batch.id}_{kind}.jsonl",
                        expires_at=self.expiry(ended_at, kept.output_seconds),
                    )  # fmt: skip
                    _insert_file(connection, file, kept.owner)
                    setattr(batch, f"{kind}_file_id", file_id)
            _save(connection, batch.id, msgspec.json.encode(batch), ended_at)

        await self._database.run_at_last(end)


class _Arrival:
    """Counts the bytes of an upload in progress."""

    def __init__(self, store: BatchStore) -> None:
        self.num_bytes = 0
        self._store = store

    def count(self, num_bytes: int, room: int) -> None:
        """Count received bytes. Raises `ApiError` 413 if the current uploads together have more
        than ``room`` bytes.
        """
        self.num_bytes += num_bytes
        self._store._num_arriving += num_bytes
        if self._store._num_arriving > room:
            raise self._store.too_large()


def now() -> int:
    """Return the Unix time in seconds."""
    return int(time.time())


def _reading(file_id: str, number: int) -> Job[tuple[bytes, int]]:
    """Return a job that reads the pieces of a file after piece ``number``.

    The job returns their data and the number of the last piece.
    """

    def read(connection: Connection) -> tuple[bytes, int]:
        rows = connection.execute(
            "SELECT number, data FROM pieces WHERE file_id = ? AND number > ? ORDER BY number"
            " LIMIT ?",
            (file_id, number, READ_PIECES),
        ).fetchall()
        return b"".join(data for _, data in rows), rows[-1][0] if rows else number

    return read


def _table(kind: type[FileBody] | type[BatchBody]) -> str:
    return "files" if kind is FileBody else "batches"


def _one(connection: Connection, query: str, *given: object) -> tuple[int, ...]:
    row: tuple[int, ...] = connection.execute(query, given).fetchone()
    return row


def _insert_file(connection: Connection, file: FileBody, owner: bytes) -> None:
    connection.execute(
        "INSERT INTO files (id, owner, purpose, bytes, expires_at, body) VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, owner, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
    )


def _set_status(batch: BatchBody, status: Status, time: int) -> None:
    batch.status = status
    setattr(batch, f"{status}_at", time)


def _save(connection: Connection, batch_id: str, body: bytes, ended_at: int | None = None) -> None:
    """Store a batch, unless it has ended."""
    connection.execute(
        "UPDATE batches SET body = ?, ended_at = ? WHERE id = ? AND ended_at IS NULL",
        (body, ended_at, batch_id),
    )


def _counted(connection: Connection, kept: KeptBatch) -> Counts:
    """Return the counts of a batch, from its stored answers."""
    good, bad = (
        _one(connection, "SELECT count(*) FROM pieces WHERE file_id = ?", file_id)[0]
        for file_id in kept.outputs
    )
    return Counts(total=kept.batch.request_counts.total, completed=good, failed=bad)


def _sweep(connection: Connection, file_seconds: float) -> None:
    """Delete expired files and batches. O(log n) if nothing has expired."""
    read = "SELECT input_file_id FROM batches WHERE ended_at IS NULL"
    expired = f"SELECT id FROM files WHERE expires_at <= ? AND id NOT IN ({read})"
    time = now()
    connection.execute(f"DELETE FROM pieces WHERE file_id IN ({expired})", (time,))
    connection.execute(f"DELETE FROM files WHERE id IN ({expired})", (time,))
    connection.execute("DELETE FROM batches WHERE ended_at <= ?", (time - file_seconds,))


def _too_many(message: str) -> ApiError:
    return ApiError(413, message, param="file")
