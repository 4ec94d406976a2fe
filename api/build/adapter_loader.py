"""AdapterLoader: loads LoRA adapters into the model, in this process or in all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from ...core.errors import ModelLoadError
from ...core.interface.extras.adapter import LoadedAdapter
from ...core.model.adapters.files import leads_over_link


class AdapterFolder(NamedTuple):
    """The folder of an adapter.

    ``below``: a parent folder; ``path`` must not contain symbolic links below it.
    """

    path: Path
    below: Path | None = None


class AdapterLoader(Protocol):
    """Loader of adapters into the processes that compute the model."""

    async def load(self, name: str, number: int, folder: AdapterFolder) -> LoadedAdapter:
        """Load an adapter. ``number``: a number that is unique to this load.

        Raises `ModelLoadError` for files that are not an adapter of this model.
        """

    async def unload(self, loaded: LoadedAdapter) -> None:
        """Release an adapter that no request uses any more."""


class OwnAdapters:
    """An `AdapterLoader` for a model in this process.

    ``read`` loads the adapter in a folder; it blocks, so it is called in a thread.
    """

    def __init__(self, read: Callable[[Path], LoadedAdapter]) -> None:
        self._read = read

    async def load(self, name: str, number: int, folder: AdapterFolder) -> LoadedAdapter:  # noqa: ARG002
        """Load the adapter in ``folder``, in a thread. Raises `ModelLoadError`."""
        return await asyncio.to_thread(self._load, folder)

    def _load(self, folder: AdapterFolder) -> LoadedAdapter:
        path, below = folder
        try:
            is_elsewhere = below is not None and leads_over_link(path, below)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        if is_elsewhere:
            raise ModelLoadError(f"{path} must not contain a symbolic link")
        return self._read(path)

    async def unload(self, loaded: LoadedAdapter) -> None:
        """Do nothing: the memory is freed with the last reference."""
