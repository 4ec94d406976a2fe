"""StagedUpdate: an update of the weights whose tensors arrive in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ...build.updates.refusal import UpdateConflict, WeightsRefused

if TYPE_CHECKING:
    from ...build.updates.rollouts import Rollouts


SINGLE_FILE = "model.safetensors"  # name of the file that the parts make


class StagedUpdate:
    """The update that `start` begins and `finish` ends. At most one is open.

    Its tensors are the safetensors of a folder, or the bytes of one safetensors file in parts.
    Nothing changes before `finish`, which ends the update even if it refuses the tensors.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._staging: TemporaryDirectory[str] | None = None  # None: no update is open
        self._num_bytes = 0  # bytes of the parts so far
        self._source: tuple[Path, Mapping[str, str]] | None = None  # a folder with its digests
        self._turn = asyncio.Lock()  # parts are written in the order of their arrival

    async def start(self) -> None:
        """Begin an update. Raises `UpdateConflict` if one is open."""
        async with self._turn:
            if self._staging is not None:
                raise UpdateConflict(
                    "an update of the weights is open: /finish_weight_update ends it"
                )
            self._staging = await asyncio.to_thread(TemporaryDirectory, prefix="foretoken-weights-")
            self._num_bytes, self._source = 0, None

    async def add(self, part: bytes, offset: int | None) -> int:
        """Append a part of the file; return the number of bytes so far.

        ``offset``: number of bytes before the part. Raises `UpdateConflict` without an open update,
        for another offset, and after `set_folder`.
        """
        async with self._turn:
            staged = self._open_folder()
            if self._source is not None:
                raise UpdateConflict("this update has the tensors of a folder already")
            if offset is not None and offset != self._num_bytes:
                message = f"offset is {offset}, but the update has {self._num_bytes} bytes so far"
                raise UpdateConflict(message, param="update_info.offset")
            await asyncio.to_thread(_append, staged / SINGLE_FILE, part)
            self._num_bytes += len(part)
            return self._num_bytes

    async def set_folder(self, folder: Path, sha256: Mapping[str, str]) -> None:
        """Use the tensors in a folder. ``sha256``: digests of its files by name.

        Raises `UpdateConflict` without an open update, or if it has tensors already.
        """
        async with self._turn:
            self._open_folder()
            if self._num_bytes or self._source is not None:
                raise UpdateConflict("this update has tensors already")
            self._source = folder, sha256

    async def finish(self, sha256: str | None, version: str | None) -> str:
        """Replace the weights, and return the name of the new version.

        ``sha256``: digest of all parts, required for parts. Raises `UpdateConflict` without an open
        update, and `WeightsRefused`; then nothing has changed.
        """
        async with self._turn:
            staged = self._open_folder()
            try:
                if self._source is not None:
                    folder, digests = self._source
                elif not self._num_bytes:
                    raise WeightsRefused("the update has no tensors; it has ended")
                elif sha256 is None:
                    message = "sha256 of the bytes of all parts is required; the update has ended"
                    raise WeightsRefused(message, param="sha256")
                else:
                    folder, digests = staged, {SINGLE_FILE: sha256}
                return await self._rollouts.update(folder, sha256=digests, version=version)
            finally:
                staging, self._staging = self._staging, None
                if staging is not None:
                    await asyncio.to_thread(staging.cleanup)

    def _open_folder(self) -> Path:
        if self._staging is None:
            raise UpdateConflict("no update of the weights is open: /start_weight_update opens one")
        return Path(self._staging.name)


def _append(file: Path, part: bytes) -> None:
    with file.open("ab") as stream:
        stream.write(part)
