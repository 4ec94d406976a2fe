"""Recorded traffic: token ids of finished requests in files, for `foretoken train-draft`.

Recording is off by default. The files reveal as much as the conversations themselves. A draft that
was trained on them accepts more tokens for similar text, so response times may reveal what it
learnt. So each pair of tenant and cache salt has its own file, and callers with API keys are
recorded only if their key is listed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec

from ...core.errors import InvalidRequest
from ...core.interface.request import Delta, FinishReason, Request
from .records import VERSION, Record, write_line

logger = logging.getLogger(__name__)
QUEUE_LEN = 256  # maximum number of answers that wait for the thread; more are left out
DEFAULT_BYTES = 2**30
READ_BYTES = 2**16
FILES_SHARE = 16  # divisor of the folder's limit that gives the limit of one file


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Finished:
    """The token ids and options of an ended request, to be written."""

    tokens: array[int]
    prompt_len: int
    temperature: float
    finish: str


class Recorder(Generic[T]):
    """Writes a line for each finished request to a file in ``folder``, in its own thread.

    A subclass defines which data of a request are kept (`kept`) and the line that is written
    (`line`).

    ``callers``: hashes of the API keys whose requests are recorded; None: all requests.
    ``max_bytes``: limit of all records in the folder; the limit of one file is a sixteenth of it.
    Requests that would exceed a limit are left out. The event loop calls `expect` and `finish`.
    """

    option: ClassVar[str]  # name of the option that sets the folder, for errors and logs

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = DEFAULT_BYTES,
        callers: Collection[bytes] | None = None,
    ) -> None:
        """Start the thread. Raises `InvalidRequest` if the folder cannot be written."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            message = f"{self.option}: {folder}: {error.strerror}"
            raise InvalidRequest(message, param=self.option) from error
        if not os.access(folder, os.W_OK):
            message = f"{self.option}: {folder} cannot be written"
            raise InvalidRequest(message, param=self.option)
        self._folder, self._max_bytes, self._callers = folder, max_bytes, callers
        self._namespaces: dict[str, str] = {}  # namespaces of running requests, by request id
        self._sizes = {path.name: path.stat().st_size for path in folder.glob("*.jsonl")}
        self._whole: set[str] = set()  # files that end with a whole line
        self.num_recorded = 0  # number of written answers; the thread changes it
        self.num_left_out = 0
        self._is_closed = False
        self._queue: queue.Queue[tuple[str, T] | None] = queue.Queue(QUEUE_LEN)
        self._thread = threading.Thread(target=self._write_all, name=f"foretoken-{self.option}")
        self._thread.daemon = True
        self._thread.start()

    def kept(self, request: Request, delta: Delta) -> T:
        """Return the data of an ended request from which `line` makes a line.

        The event loop calls this method.
        """
        raise NotImplementedError

    def line(self, kept: T, namespace: str) -> bytes:
        """Return the line to write. The recorder's thread calls this method."""
        raise NotImplementedError

    def expect(self, request: Request, caller: bytes) -> None:
        """Register a submitted request, so that it will be recorded if it is allowed.

        ``caller``: hash of the request's API key, or empty without a key. Requests that may not
        write to the cache are not recorded. Requests with an adapter are not recorded either,
        because the recorded model would give other answers.
        """
        is_allowed = self._callers is None or caller in self._callers
        if is_allowed and request.cache.write and request.extras.adapter is None:
            self._namespaces[request.request_id] = namespace_of(caller, request.namespace)

    def expects(self, request_id: str) -> bool:
        """Whether a running request will be recorded."""
        return request_id in self._namespaces

    def finish(self, request: Request, delta: Delta) -> None:
        """Queue an ended request for writing.

        Never blocks: if the queue is full, the request is not recorded.
        """
        namespace = self._namespaces.pop(request.request_id, None)
        if namespace is None or delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        try:
            self._queue.put_nowait((namespace, self.kept(request, delta)))
        except queue.Full:
            self.num_left_out += 1

    def close(self) -> None:
        """Write all queued answers and end the thread.

        Blocks until the answers are written. Further calls do nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        else:  # Without the thread, the queued answers are lost.
            self.num_left_out += self._queue.qsize()
            logger.error("%s: the recording thread ended early; answers were lost", self.option)
        logger.info(
            "%s: %d answers recorded, %d skipped",
            self.option, self.num_recorded, self.num_left_out,
        )  # fmt: skip

    def _write_all(self) -> None:
        while (finished := self._queue.get()) is not None:
            try:
                is_written = self._write(*finished)
            except OSError as error:
                logger.warning("%s: cannot write an answer: %s", self.option, error)
                is_written = False
            except Exception:  # An error must cost one answer, not all later ones.
                logger.exception("%s: cannot write an answer", self.option)
                is_written = False
            if is_written:
                self.num_recorded += 1
            else:
                self.num_left_out += 1

    def _write(self, namespace: str, kept: T) -> bool:
        """Append a line to the file of its namespace.

        Returns False without writing if the line would exceed a limit. Raises OSError.
        """
        line = self.line(kept, namespace)
        name = f"{namespace}.jsonl"
        if name in self._sizes and name not in self._whole:
            self._sizes[name] = _end_at_line(self._folder / name)
        size = self._sizes.get(name, 0) + len(line)
        total = sum(self._sizes.values()) + len(line)
        if size > self._max_bytes // FILES_SHARE or total > self._max_bytes:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self._folder / name, flags, 0o600)
        self._whole.discard(name)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line)
        self._whole.add(name)
        self._sizes[name] = size
        return True


class TrafficRecorder(Recorder[_Finished]):
    """Records the token ids of requests, to train a draft on."""

    option = "record_traffic"
    _model = _tokenizer = ""

    def name(self, model: str, tokenizer: str) -> None:
        """Set the origin of the token ids: the model's name and a hash of its tokenizer."""
        self._model, self._tokenizer = model, tokenizer

    def kept(self, request: Request, delta: Delta) -> _Finished:
        """Return a copy of the request's tokens, with its temperature and finish reason."""
        return _Finished(
            array("q", request.tokens),
            request.prompt_len,
            # A default may have a type that JSON lacks.
            float(request.sampling.params.temperature),
            str(delta.finish_reason),
        )

    def line(self, kept: _Finished, namespace: str) -> bytes:
        """Return the request as a `Record`, encoded as a line of JSON."""
        return write_line(
            Record(
                v=VERSION,
                tokens=kept.tokens.tolist(),
                prompt_len=kept.prompt_len,
                temperature=kept.temperature,
                finish=kept.finish,
                model=self._model,
                tokenizer=self._tokenizer,
                namespace=namespace,
            )
        )


def _end_at_line(path: Path) -> int:
    """Remove the last line of a file if its writer was stopped inside it. Return the size."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - READ_BYTES)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end < size:
            logger.warning("%s: removing an incomplete last line of %d bytes", path, size - end)
            file.truncate(end)
    return end


def namespace_of(caller: bytes, cache_salt: str | None) -> str:
    """Return a hash of a caller and a cache salt; it is the name of the file for both."""
    return hashlib.sha256(msgspec.json.encode((caller.hex(), cache_salt))).hexdigest()[:32]
