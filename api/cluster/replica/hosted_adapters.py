"""HostedAdapters: the adapters that a replica has loaded for its front."""

from __future__ import annotations

from ....core.errors import InvalidRequest
from ....core.interface.extras.adapter import LoadedAdapter
from ...build.adapter_loader import AdapterFolder, AdapterLoader
from ...runtime.adapters import NO_ADAPTERS, ServedAdapter
from ..wire.forms import WireError


class HostedAdapters:
    """A replica's adapters by the numbers that the front gave them. Belongs to one event loop.

    The front counts the requests of each adapter and flushes its cached prefixes.
    """

    def __init__(self, loader: AdapterLoader | None) -> None:
        self._loader = loader
        self._served: dict[int, ServedAdapter] = {}

    async def load(self, name: str, number: int, folder: AdapterFolder) -> LoadedAdapter:
        """Load an adapter.

        Raises `InvalidRequest` if the engine supports no adapters, and the loader's errors.
        """
        if self._loader is None:
            raise InvalidRequest(NO_ADAPTERS, param="lora_name")
        loaded = await self._loader.load(name, number, folder)
        self._served[number] = ServedAdapter(name, number, loaded)
        return loaded

    def find(self, number: int | None) -> ServedAdapter | None:
        """Return the adapter with a number; None if ``number`` is None.

        Raises `WireError` for an adapter that is not loaded.
        """
        if number is None:
            return None
        if (found := self._served.get(number)) is None:
            raise WireError("the request needs an adapter that is not loaded")
        return found

    def unload(self, number: int) -> None:
        """Unload an adapter; its running requests continue. Unknown ones are ignored."""
        self._served.pop(number, None)

    def clear(self) -> None:
        """Unload all adapters: the next front gives its own numbers."""
        self._served.clear()
