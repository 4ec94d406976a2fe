"""HostedAdapters: the adapters that a front has had its replica load."""

from __future__ import annotations

from ....core.errors import InvalidRequest
from ....core.interface.extras.adapter import LoadedAdapter
from ...build.adapter_loader import AdapterFolder, AdapterLoader
from ...runtime.adapters import NO_ADAPTERS, ServedAdapter
from ..wire.forms import WireError


class HostedAdapters:
    """Adapters by the number of their loading at the front. Belongs to one event loop.

    The front counts their requests, and drops what is cached of them.
    """

    def __init__(self, loader: AdapterLoader | None) -> None:
        self._loader = loader
        self._served: dict[int, ServedAdapter] = {}

    async def load(self, name: str, number: int, folder: AdapterFolder) -> LoadedAdapter:
        """Load an adapter. Raises `InvalidRequest` where there can be none, and as its loader."""
        if self._loader is None:
            raise InvalidRequest(NO_ADAPTERS, param="lora_name")
        loaded = await self._loader.load(name, number, folder)
        self._served[number] = ServedAdapter(name, number, loaded)
        return loaded

    def find(self, number: int | None) -> ServedAdapter | None:
        """Return the adapter of a message. Raises `WireError` for one that was not loaded."""
        if number is None:
            return None
        if (found := self._served.get(number)) is None:
            raise WireError("a request of an adapter that is not loaded")
        return found

    def unload(self, number: int) -> None:
        """Let go of an adapter; its requests go on. Unknown ones are ignored."""
        self._served.pop(number, None)

    def clear(self) -> None:
        """Let go of all: the next front has numbers of its own."""
        self._served.clear()
