"""Database: an SQLite file that is used by one thread."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

from ....core.errors import InvalidRequest, Unavailable
from ...serving.errors import ApiError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]
NAME = "batches.sqlite3"
VERSION = 1
SPARE = "spare"  # a file that is deleted to make room for a batch's final status on a full disk
SPARE_BYTES = 2**18
JOURNAL_BYTES = 2**22  # maximum size of the journal file after a transaction
VACUUM_PAGES = 4096  # maximum number of free pages released after a job
SETTINGS = (
    "PRAGMA auto_vacuum=INCREMENTAL",  # must precede the first table
    "PRAGMA locking_mode=EXCLUSIVE",  # a single server uses the file
    "PRAGMA journal_mode=PERSIST",
    f"PRAGMA journal_size_limit={JOURNAL_BYTES}",
    "PRAGMA synchronous=FULL",
    "PRAGMA secure_delete=OFF",  # secure deletion would need as much space in the journal
)
TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner BLOB NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires_at INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_end ON files (expires_at);
CREATE TABLE IF NOT EXISTS pieces (
    number INTEGER PRIMARY KEY, file_id TEXT NOT NULL, custom_id TEXT, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS pieces_by_file ON pieces (file_id);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner BLOB NOT NULL,
    input_file_id TEXT NOT NULL, output_seconds INTEGER, ended_at INTEGER, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_end ON batches (ended_at);
"""
"""``pieces``: contents of files in order; answers have one piece per line, with ``custom_id``.
``body``: the JSON that callers read. ``ended_at`` is NULL while a batch runs.
"""


class DiskFull(ApiError):  # noqa: N818
    """Raised if the disk is full. The HTTP status is 507."""

    def __init__(self) -> None:
        message = "the disk of files and batches is full (--batch-dir)"
        super().__init__(507, message, kind="server_error", code="disk_full")


class Database:
    """An SQLite file in ``folder``, or in a temporary folder that is removed with this object.

    Each job is one transaction, which is on disk when `run` returns. If the job fails, it changes
    nothing. Only one server at a time can use the file. The first job opens it.
    """

    def __init__(self, folder: Path | None) -> None:
        """Check that the file in ``folder`` can be opened. Raises `InvalidRequest` if not."""
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foretoken-batches")
        self._opened: list[sqlite3.Connection] = []  # at most one connection
        self._is_closed = False
        self._spare = Path()  # set when the database is opened
        self._finalize = weakref.finalize(self, _close, self._thread, self._opened)
        if folder is not None:
            self._check(folder)

    def _check(self, folder: Path) -> None:
        if any(folder.glob("file-*.json")) or any(folder.glob("batch_*.json")):
            logger.warning(
                "%s contains batch files of an earlier version of foretoken; they are ignored",
                folder,
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection()
        except Unavailable:
            pass  # another server uses the file, and this one can open it later
        except (OSError, sqlite3.Error, ApiError) as error:
            reason = getattr(error, "strerror", None) or error
            message = f"batch_dir: {folder}: {reason}"
            raise InvalidRequest(message, param="batch_dir") from None

    async def run(self, job: Job[T]) -> T:
        """Run a job in a transaction and return its result.

        Raises the job's errors, `Unavailable` while another server uses the file, and `ApiError`
        507 if the disk is full.
        """
        if self._is_closed:
            raise Unavailable("the server is shutting down")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, job)

    async def run_at_last(self, job: Job[T]) -> T:
        """Run a job, like `run`. If the disk is full, free reserved space and run the job again."""
        try:
            return await self.run(job)
        except DiskFull:
            await asyncio.to_thread(self._spare.unlink, missing_ok=True)
            return await self.run(job)

    async def close(self) -> None:
        """Finish queued jobs and release the file for another server."""
        self._is_closed = True
        await asyncio.to_thread(self._finalize)

    def _do(self, job: Job[T]) -> T:
        connection = self._connection()
        try:
            with connection:
                result = job(connection)
        except sqlite3.OperationalError as error:
            raise _refusal(error) from error
        _give_back_pages(connection)
        self._keep_spare()
        return result

    def _keep_spare(self) -> None:
        """Reserve disk space for the final status of a batch, unless the disk is full."""
        if self._spare.exists():
            return
        try:
            # random bytes, which no file system compresses
            self._spare.write_bytes(os.urandom(SPARE_BYTES))
        except OSError:
            self._spare.unlink(missing_ok=True)

    def _connection(self) -> sqlite3.Connection:
        if not self._opened:
            folder = self._folder
            if folder is None:
                folder = self._folder = Path(mkdtemp(prefix="foretoken-batches-"))
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._opened.append(_open(folder / NAME))
            self._spare = folder / SPARE
        return self._opened[0]


def _open(file: Path) -> sqlite3.Connection:
    """Open the file.

    Raises `Unavailable` if another process uses the file, `DiskFull` if the disk is full, and
    `sqlite3.Error` for a file that cannot be used.
    """
    file.touch(mode=0o600)
    connection = sqlite3.connect(file, timeout=0, check_same_thread=False)
    try:
        for setting in SETTINGS:
            connection.execute(setting)
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise sqlite3.DatabaseError(
                f"{NAME} was written by another version of foretoken (schema {found})"
            )
        connection.executescript(f"BEGIN IMMEDIATE;{TABLES}PRAGMA user_version={VERSION};COMMIT")
    except sqlite3.OperationalError as error:
        connection.close()
        raise _refusal(error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _give_back_pages(connection: sqlite3.Connection) -> None:
    """Shrink the file by some free pages. Do nothing if SQLite cannot write, as on a full disk."""
    try:
        if connection.execute("PRAGMA freelist_count").fetchone()[0] > VACUUM_PAGES:
            connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
    except sqlite3.OperationalError:
        connection.rollback()


def _refusal(error: sqlite3.OperationalError) -> Exception:
    """Return the error to raise for an SQLite error; an unexpected one is returned unchanged."""
    code: int = getattr(error, "sqlite_errorcode", 0)  # errors of the Python module have no code
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Unavailable("another server uses the files and batches of --batch-dir")
        case sqlite3.SQLITE_FULL:
            return DiskFull()
        case sqlite3.SQLITE_IOERR if code == sqlite3.SQLITE_IOERR_WRITE:
            return DiskFull()
    return error


def _close(thread: ThreadPoolExecutor, opened: list[sqlite3.Connection]) -> None:
    thread.shutdown()
    while opened:
        opened.pop().close()
