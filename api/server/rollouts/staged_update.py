"""StagedUpdate: an update of the weights whose tensors arrive in parts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ....core.config import format_size
from ....core.model.formats.files import SINGLE_FILE
from ...build.updates.held_folder import HeldFolder
from ...build.updates.new_weights import NewWeights, SharedWeights, WeightFolder
from ...build.updates.refusal import UpdateConflict, WeightsRefused

if TYPE_CHECKING:
    from ...build.updates.rollouts import Rollouts

logger = logging.getLogger(__name__)
IDLE_SECONDS = 600.0  # time without a call after which an open update is dropped


class StagedUpdate:
    """The update that `start` begins and `finish` ends. At most one is open.

    Its tensors are `NewWeights` that exist already, or the bytes of one safetensors file in parts.
    Nothing changes before `finish`, which ends the update even if it refuses the tensors. An update
    without a call for ``idle_seconds`` is dropped.
    """

    def __init__(self, rollouts: Rollouts, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._rollouts, self._idle_seconds = rollouts, idle_seconds
        self._staging: HeldFolder | None = None  # None: no update is open
        self._num_bytes = 0  # bytes of the parts so far
        self._source: NewWeights | None = None  # weights that are not in parts
        self._turn = asyncio.Lock()  # parts are written in the order of their arrival
        self._finishing: asyncio.Task[str] | None = None  # the last call of `finish`
        self._idle: asyncio.TimerHandle | None = None  # drops the open update

    @property
    def is_open(self) -> bool:
        """Whether an update is open."""
        return self._staging is not None

    async def start(self, *, drops_open: bool = False) -> None:
        """Begin an update. Raises `UpdateConflict` if one is open.

        ``drops_open``: drop an open update instead.
        """
        async with self._turn:
            if self._staging is not None:
                if not drops_open:
                    message = (
                        "an update of the weights is open: /finish_weight_update ends it, and "
                        "drop_open drops it"
                    )
                    raise UpdateConflict(message)
                await self._end()
            self._staging = await asyncio.to_thread(HeldFolder)
            self._num_bytes, self._source = 0, None
            self._wait()

    async def add(self, part: bytes, offset: int | None) -> int:
        """Append a part of the file; return the number of bytes so far.

        ``offset``: number of bytes before the part. Raises `UpdateConflict` without an open update,
        for another offset, and after `set_source`, and `WeightsRefused` for more bytes than the
        served model's files have; the parts before it stay.
        """
        async with self._turn:
            staged = self._open_folder()
            if self._source is not None:
                raise UpdateConflict("this update has its tensors already")
            if offset is not None and offset != self._num_bytes:
                message = f"offset is {offset}, but the update has {self._num_bytes} bytes so far"
                raise UpdateConflict(message, param="update_info.offset")
            if self._num_bytes + len(part) > self._rollouts.max_bytes:
                most = format_size(self._rollouts.max_bytes)
                message = f"all parts together must not exceed {most}, the size of the served files"
                raise WeightsRefused(message, param="update_info.data")
            await asyncio.to_thread(_write, staged / SINGLE_FILE, self._num_bytes, part)
            self._num_bytes += len(part)
            self._wait()
            return self._num_bytes

    async def set_source(self, weights: NewWeights) -> None:
        """Use weights that exist already.

        Raises `UpdateConflict` without an open update, or if it has tensors already.
        """
        async with self._turn:
            self._open_folder()
            if self._num_bytes or self._source is not None:
                raise UpdateConflict("this update has tensors already")
            self._source = weights
            self._wait()

    async def finish(self, sha256: str | None, version: str | None) -> str:
        """Replace the weights, and return the name of the new version.

        ``sha256``: digest of all parts or of the shared memory, required for parts. Raises
        `UpdateConflict` without an open update, and `WeightsRefused`; then nothing has changed.
        """
        # A caller that goes away must not remove the parts while they are read.
        self._finishing = asyncio.create_task(self._finish(sha256, version))
        return await asyncio.shield(self._finishing)

    async def _finish(self, sha256: str | None, version: str | None) -> str:
        async with self._turn:
            staged = self._open_folder()
            self._stop_waiting()
            try:
                return await self._rollouts.update(self._weights(staged, sha256), version=version)
            finally:
                await self._end()

    def _weights(self, staged: Path, sha256: str | None) -> NewWeights:
        """Return the tensors of the open update. Raises `WeightsRefused`."""
        if isinstance(self._source, SharedWeights):
            return self._source._replace(sha256=sha256)
        if self._source is not None:
            if sha256 is not None:
                message = "digests of a folder's files belong to update_info; the update has ended"
                raise WeightsRefused(message, param="sha256")
            return self._source
        if not self._num_bytes:
            raise WeightsRefused("the update has no tensors; it has ended")
        if sha256 is None:
            message = "sha256 of the bytes of all parts is required; the update has ended"
            raise WeightsRefused(message, param="sha256")
        return WeightFolder(staged, {SINGLE_FILE: sha256})

    def _open_folder(self) -> Path:
        if self._staging is None:
            raise UpdateConflict("no update of the weights is open: /start_weight_update opens one")
        return self._staging.path

    async def _end(self) -> None:
        """End the open update, and remove its parts."""
        self._stop_waiting()
        staging, self._staging, self._source = self._staging, None, None
        if staging is not None:
            await asyncio.to_thread(staging.remove)

    def _wait(self) -> None:
        """Begin to count the time without a call."""
        self._stop_waiting()
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(self._idle_seconds, self._expire)

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _expire(self) -> None:
        """Drop the open update, unless a call to it runs, which begins a new wait or ends it."""
        if self._turn.locked():
            self._wait()
        elif self._staging is not None:
            logger.info("dropped an update of the weights: no call for %g s", self._idle_seconds)
            staging, self._staging, self._source = self._staging, None, None
            asyncio.get_running_loop().run_in_executor(None, staging.remove)


def _write(file: Path, offset: int, part: bytes) -> None:
    """Write a part behind ``offset`` bytes; an earlier attempt may have written some of it."""
    try:
        with file.open("r+b" if offset else "wb") as stream:
            stream.seek(offset)
            stream.write(part)
    except OSError as error:
        raise WeightsRefused(f"the part cannot be stored: {error.strerror}") from None
