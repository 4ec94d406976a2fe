"""Database: an SQLite file that one thread reads and writes."""

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
SPARE = "spare"  # a file that is given up on a full disk, for the end of a batch to be written
SPARE_BYTES = 2**18
JOURNAL_BYTES = 2**22  # of the journal that is kept
VACUUM_PAGES = 4096  # free pages that are given back to the disk behind one job
SETTINGS = (
    "PRAGMA auto_vacuum=INCREMENTAL",  # before there is a table
    "PRAGMA locking_mode=EXCLUSIVE",  # of one server
    "PRAGMA journal_mode=PERSIST",
    f"PRAGMA journal_size_limit={JOURNAL_BYTES}",
    "PRAGMA synchronous=FULL",
    "PRAGMA secure_delete=OFF",  # else to delete needs as much room in the journal
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
"""``pieces``: the content of files, in order; of answers one for each line, with its request's id.
``body``: the JSON that callers read. ``ended_at`` is NULL while a batch is under way.
"""


class DiskFull(ApiError):  # noqa: N818
    """507: the disk has no room."""

    def __init__(self) -> None:
        message = "the disk of files and batches is full (--batch-dir)"
        super().__init__(507, message, kind="server_error", code="disk_full")


class Database:
    """A file in a folder, or in a temporary one, which goes with its owner.

    A job is one transaction: it is on the disk when `run` returns, or nothing of it is. One server
    at a time has the file; it is opened by the first job.
    """

    def __init__(self, folder: Path | None) -> None:
        """Raises `InvalidRequest` for a folder that cannot be used."""
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foretoken-batches")
        self._opened: list[sqlite3.Connection] = []  # none or one; the finalizer has it, too
        self._is_closed = False
        self._spare = Path()  # known when it is opened
        self._finalize = weakref.finalize(self, _close, self._thread, self._opened)
        if folder is not None:
            self._check(folder)

    def _check(self, folder: Path) -> None:
        if any(folder.glob("file-*.json")) or any(folder.glob("batch_*.json")):
            logger.warning("%s has files of an earlier version, which are not read", folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection()
        except Unavailable:
            pass  # another server has it: this one may take over later
        except (OSError, sqlite3.Error, ApiError) as error:
            reason = getattr(error, "strerror", None) or error
            message = f"batch_dir: {folder}: {reason}"
            raise InvalidRequest(message, param="batch_dir") from None

    async def run(self, job: Job[T]) -> T:
        """Return what a job returns, in a transaction.

        Raises what it raises, `Unavailable` while another server has the file, and `ApiError` 507
        where the disk is full.
        """
        if self._is_closed:
            raise Unavailable("the server is shutting down")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, job)

    async def run_at_last(self, job: Job[T]) -> T:
        """Do as `run` does, on a full disk in the room that was kept for such jobs."""
        try:
            return await self.run(job)
        except DiskFull:
            await asyncio.to_thread(self._spare.unlink, missing_ok=True)
            return await self.run(job)

    async def close(self) -> None:
        """Let another server have the file, once the jobs that wait are done."""
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
        """Keep room on the disk for the end of a batch; on a full one there is none."""
        if self._spare.exists():
            return
        try:
            self._spare.write_bytes(os.urandom(SPARE_BYTES))  # which no file system packs
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
    """Raise `Unavailable` where another process has it, `ApiError` and `sqlite3.Error`."""
    file.touch(mode=0o600)
    connection = sqlite3.connect(file, timeout=0, check_same_thread=False)
    try:
        for setting in SETTINGS:
            connection.execute(setting)
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise sqlite3.DatabaseError(f"{NAME} is of another version of foretoken ({found})")
        connection.executescript(f"BEGIN IMMEDIATE;{TABLES}PRAGMA user_version={VERSION};COMMIT")
    except sqlite3.OperationalError as error:
        connection.close()
        raise _refusal(error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _give_back_pages(connection: sqlite3.Connection) -> None:
    """Shrink the file by what was deleted, a part at a time. On a full disk it keeps its size."""
    try:
        if connection.execute("PRAGMA freelist_count").fetchone()[0] > VACUUM_PAGES:
            connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
    except sqlite3.OperationalError:
        connection.rollback()


def _refusal(error: sqlite3.OperationalError) -> Exception:
    """Return the error of a job for its caller; what is not expected stays as it is."""
    code: int = getattr(error, "sqlite_errorcode", 0)  # errors of the module itself have none
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
