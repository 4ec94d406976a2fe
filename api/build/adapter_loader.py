"""AdapterLoader: reads adapters for the model that a process serves, here or in its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from ...core.errors import ModelLoadError
from ...core.interface.extras.adapter import LoadedAdapter
from ...core.model.adapters.files import leads_over_link


class AdapterFolder(NamedTuple):
    """The folder of an adapter. ``below``: no part of the path behind that may be a link."""

    path: Path
    below: Path | None = None


class AdapterLoader(Protocol):
    """Brings adapters to where the model is computed."""

    async def load(self, name: str, number: int, folder: AdapterFolder) -> LoadedAdapter:
        """Load an adapter. ``number``: of its loading, never given twice.

        Raises `ModelLoadError` for files that are not of an adapter for this model.
        """

    async def unload(self, loaded: LoadedAdapter) -> None:
        """Let go of an adapter that no request has any longer."""


class OwnAdapters:
    """An `AdapterLoader` for a model in this process. ``read`` blocks."""

    def __init__(self, read: Callable[[Path], LoadedAdapter]) -> None:
        self._read = read

    async def load(self, name: str, number: int, folder: AdapterFolder) -> LoadedAdapter:  # noqa: ARG002
        """Read a folder, off the event loop."""
        return await asyncio.to_thread(self._load, folder)

    def _load(self, folder: AdapterFolder) -> LoadedAdapter:
        path, below = folder
        try:
            is_elsewhere = below is not None and leads_over_link(path, below)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        if is_elsewhere:
            raise ModelLoadError(f"{path} leads over a link")
        return self._read(path)

    async def unload(self, loaded: LoadedAdapter) -> None:
        """Do nothing: its memory is free once nothing refers to it."""
