"""AdapterLoader: reads adapters for the model that a process serves, here or in its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ...core.interface.adapter import LoadedAdapter


class AdapterLoader(Protocol):
    """Brings adapters to where the model is computed."""

    async def load(self, name: str, number: int, folder: Path) -> LoadedAdapter:
        """Load an adapter. ``number``: of its loading, never given twice.

        Raises `ModelLoadError` for files that are not of an adapter for this model.
        """

    async def unload(self, loaded: LoadedAdapter) -> None:
        """Let go of an adapter that no request has any longer."""


class OwnAdapters:
    """An `AdapterLoader` for a model in this process. ``read`` blocks."""

    def __init__(self, read: Callable[[Path], LoadedAdapter]) -> None:
        self._read = read

    async def load(self, name: str, number: int, folder: Path) -> LoadedAdapter:  # noqa: ARG002
        """Read a folder, off the event loop."""
        return await asyncio.to_thread(self._read, folder)

    async def unload(self, loaded: LoadedAdapter) -> None:
        """Do nothing: its memory is free once nothing refers to it."""
