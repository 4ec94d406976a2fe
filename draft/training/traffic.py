"""Recorded traffic: token ids of finished requests in files, for `foretoken train-draft`.

Off unless asked for. What is written is as telling as the conversations themselves, and a draft
trained on it leaks by its timing what it learnt: so each tenant and cache salt has a file of its
own, and callers with API keys are recorded only where their key is named.
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
QUEUE_LEN = 256  # answers that wait for the thread; beyond it they are left out
DEFAULT_BYTES = 2**30
FILES_SHARE = 16  # one file holds at most this part of all bytes


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Finished:
    """An answer on its way to its file."""

    tokens: array[int]
    prompt_len: int
    temperature: float
    finish: str


class Recorder(Generic[T]):
    """Writes finished requests to ``folder``, in a thread of its own: a line for each.

    A subclass says what is kept of a request (`kept`) and how it is written (`line`).

    ``callers``: hashes of the API keys that are recorded; None: all requests are.
    ``max_bytes`` bounds the folder's records, a file holds a sixteenth of it at most: what would
    exceed either is left out. `expect` and `finish` belong to the event loop.
    """

    option: ClassVar[str]  # that has the folder, for errors

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = DEFAULT_BYTES,
        callers: Collection[bytes] | None = None,
    ) -> None:
        """Raises `InvalidRequest` for a folder that cannot be written."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            message = f"{self.option}: {folder}: {error.strerror}"
            raise InvalidRequest(message, param=self.option) from error
        if not os.access(folder, os.W_OK):
            message = f"{self.option}: {folder} cannot be written"
            raise InvalidRequest(message, param=self.option)
        self._folder, self._max_bytes, self._callers = folder, max_bytes, callers
        self._namespaces: dict[str, str] = {}  # of requests that have not ended
        self._sizes = {path.name: path.stat().st_size for path in folder.glob("*.jsonl")}
        self.num_recorded = 0  # by the thread
        self.num_left_out = 0
        self._is_closed = False
        self._queue: queue.Queue[tuple[str, T] | None] = queue.Queue(QUEUE_LEN)
        self._thread = threading.Thread(target=self._write_all, name=f"foretoken-{self.option}")
        self._thread.daemon = True
        self._thread.start()

    def kept(self, request: Request, delta: Delta) -> T:
        """Copy what its line needs of a request that has ended; on the event loop."""
        raise NotImplementedError

    def line(self, kept: T, namespace: str) -> bytes:
        """The line of a file; in the thread."""
        raise NotImplementedError

    def expect(self, request: Request, caller: bytes) -> None:
        """A request was submitted; ``caller`` is the hash of its key, empty without one.

        One that may not leave anything in the cache is not recorded either, nor one of an adapter,
        whose answers are not those of the model that the recording is named after.
        """
        is_allowed = self._callers is None or caller in self._callers
        if is_allowed and request.cache.write and request.extras.adapter is None:
            self._namespaces[request.request_id] = namespace_of(caller, request.namespace)

    def finish(self, request: Request, delta: Delta) -> None:
        """A request has ended. Never waits: if the thread is behind, the answer is left out."""
        namespace = self._namespaces.pop(request.request_id, None)
        if namespace is None or delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        try:
            self._queue.put_nowait((namespace, self.kept(request, delta)))
        except queue.Full:
            self.num_left_out += 1

    def close(self) -> None:
        """Write what waits and end the thread; blocking, idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        else:  # nobody would take what waits
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
                logger.warning("%s: an answer could not be written: %s", self.option, error)
                is_written = False
            except Exception:  # one answer is lost, not all that follow
                logger.exception("%s: an answer could not be written", self.option)
                is_written = False
            if is_written:
                self.num_recorded += 1
            else:
                self.num_left_out += 1

    def _write(self, namespace: str, kept: T) -> bool:
        """Whether there was room."""
        line = self.line(kept, namespace)
        name = f"{namespace}.jsonl"
        size = self._sizes.get(name, 0) + len(line)
        total = sum(self._sizes.values()) + len(line)
        if size > self._max_bytes // FILES_SHARE or total > self._max_bytes:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self._folder / name, flags, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line)
        self._sizes[name] = size
        return True


class TrafficRecorder(Recorder[_Finished]):
    """Records token ids to train a draft on."""

    option = "record_traffic"
    _model = _tokenizer = ""

    def name(self, model: str, tokenizer: str) -> None:
        """Set the origin of the token ids: the model's name and a hash of its tokenizer."""
        self._model, self._tokenizer = model, tokenizer

    def kept(self, request: Request, delta: Delta) -> _Finished:
        """A copy of its tokens."""
        return _Finished(
            array("q", request.tokens),
            request.prompt_len,
            float(request.sampling.params.temperature),  # a default's type has no JSON
            str(delta.finish_reason),
        )

    def line(self, kept: _Finished, namespace: str) -> bytes:
        """A `Record`."""
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


def namespace_of(caller: bytes, cache_salt: str | None) -> str:
    """The hash that names a caller's and a salt's file."""
    return hashlib.sha256(msgspec.json.encode((caller.hex(), cache_salt))).hexdigest()[:32]
