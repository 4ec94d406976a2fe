"""Adapters: the LoRA adapters of a served model, by name."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...core.engine.inbox import TokenStream
from ...core.errors import InvalidRequest
from ...core.interface.extras.adapter import LoadedAdapter, adapter_group, adapter_namespace
from ..build.adapter_loader import AdapterFolder, AdapterLoader

logger = logging.getLogger(__name__)
MAX_NAMESPACES = 4096  # maximum number of namespaces per adapter that are dropped from KV tiers
NAME = re.compile(r"[^\s=\0-\x1f]{1,256}")
NO_ADAPTERS = "adapters are not supported with --tp"
Flush = Callable[..., Awaitable[int]]


class UnknownAdapter(InvalidRequest):
    """Raised if no adapter ``name`` is loaded."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no adapter {name} is loaded", param="lora")
        self.name = name


class ServedAdapter:
    """A loaded adapter that requests may name, with counts of its requests."""

    def __init__(self, name: str, number: int, loaded: LoadedAdapter) -> None:
        self.name, self.number, self.loaded = name, number, loaded
        self.created = time.time()
        self.num_requests = 0  # number of requests since the adapter was loaded
        self.num_holders = 0  # number of requests and of choices that have not ended
        self.unused = asyncio.Event()
        self.unused.set()
        self.group = adapter_group(name, number, loaded.digest)
        # namespaces of its requests so far: some stores can drop pages by namespace only
        self.namespaces: set[str] = set()

    def namespace(self, salt: str | None) -> str:
        """Return the cache namespace of a request with this cache salt."""
        made = adapter_namespace(self.group, salt)
        if len(self.namespaces) < MAX_NAMESPACES:
            self.namespaces.add(made)
        return made

    def enter(self) -> None:
        """Count a request that begins."""
        self.num_requests += 1
        self._hold()

    def hold(self, stream: TokenStream) -> None:
        """Count a choice of a request until the engine has ended it.

        An aborted choice keeps its pages until then, and caches them when it ends.
        """
        self._hold()
        stream.when_ended(self.leave)

    def leave(self) -> None:
        """Count a request or a choice that has ended."""
        self.num_holders -= 1
        if not self.num_holders:
            self.unused.set()

    def _hold(self) -> None:
        self.num_holders += 1
        self.unused.clear()


class Adapters:
    """The adapters by name. Belongs to one event loop.

    ``loader`` loads adapters into the model; None if the engine does not support adapters.
    ``flush`` drops namespaces from the cache. At most ``most`` adapters are in memory, including
    removed ones that running requests still use. ``reserved``: names that no adapter may have.
    """

    def __init__(
        self,
        loader: AdapterLoader | None = None,
        flush: Flush | None = None,
        *,
        most: int = 0,
        reserved: frozenset[str] = frozenset(),
    ) -> None:
        self._loader, self._flush, self._most, self._reserved = loader, flush, most, reserved
        self._served: dict[str, ServedAdapter] = {}
        self._leaving: set[ServedAdapter] = set()
        self._last_number = 0
        self._loading = asyncio.Lock()

    @property
    def served(self) -> list[ServedAdapter]:
        """Adapters that requests may name, in the order of loading."""
        return list(self._served.values())

    @property
    def num_loaded(self) -> int:
        """Number of adapters in memory."""
        return len(self._served) + len(self._leaving)

    def __contains__(self, name: object) -> bool:
        return name in self._served

    def enter(self, name: str) -> ServedAdapter:
        """Return the adapter for a request, which must call `ServedAdapter.leave` at its end.

        Raises `UnknownAdapter`.
        """
        adapter = self.find(name)
        adapter.enter()
        return adapter

    def find(self, name: str) -> ServedAdapter:
        """Return the adapter of this name. Raises `UnknownAdapter`."""
        adapter = self._served.get(name)
        if adapter is None:
            raise UnknownAdapter(name)
        return adapter

    def namespaces(self, salt: str | None) -> list[str]:
        """Return the namespaces of all adapters in memory for this cache salt."""
        loaded = (*self._served.values(), *self._leaving)
        return [adapter_namespace(each.group, salt) for each in loaded]

    async def load(self, name: str, folder: Path, below: Path | None = None) -> ServedAdapter:
        """Load an adapter, which replaces an adapter of the same name for new requests.

        Running requests keep the replaced adapter. ``below``: a parent folder, below which the path
        must not contain symbolic links. Raises `InvalidRequest` for an invalid or reserved name or
        too many adapters, and the errors of the loader.
        """
        loader = self._loader
        if loader is None:
            raise InvalidRequest(NO_ADAPTERS, param="lora_name")
        self._check_name(name)
        async with self._loading:
            self._check_room(name)
            self._last_number += 1
            where = AdapterFolder(folder, below)
            loaded = await loader.load(name, self._last_number, where)
            # Checked again, because requests that began during the load may keep the adapter that
            # is to be replaced in memory.
            try:
                self._check_room(name)
            except InvalidRequest:
                await loader.unload(loaded)
                raise
            adapter = ServedAdapter(name, self._last_number, loaded)
            replaced, self._served[name] = self._served.pop(name, None), adapter
        logger.info("adapter %s: rank %d, %d bytes", name, loaded.rank, loaded.num_bytes)
        if replaced is not None:
            leaving = self._retire(replaced)
            if replaced.unused.is_set():  # wait for the removal, so that the next load finds room
                await asyncio.shield(leaving)
        return adapter

    async def unload(self, name: str) -> None:
        """Hide an adapter from new requests, wait for its running requests, and remove it.

        Raises `UnknownAdapter`.
        """
        adapter = self._served.pop(name, None)
        if adapter is None:
            raise UnknownAdapter(name)
        await asyncio.shield(self._retire(adapter))

    def _check_room(self, name: str) -> None:
        """Raise `InvalidRequest` if one more adapter would exceed the maximum.

        A replaced adapter still counts while requests use it.
        """
        replaced = self._served.get(name)
        is_freed = replaced is not None and replaced.unused.is_set()
        if self.num_loaded - is_freed >= self._most:
            message = (
                f"{self.num_loaded} adapters are loaded, the maximum (--max-loras): unload "
                "one first"
            )
            raise InvalidRequest(message, param="lora_name")

    def _check_name(self, name: str) -> None:
        if NAME.fullmatch(name) is None:
            message = "an adapter's name must have 1 to 256 characters, without spaces or ="
            raise InvalidRequest(message, param="lora_name")
        if name in self._reserved:
            raise InvalidRequest(
                f"{name} is a name of the model itself: choose another", param="lora_name"
            )

    def _retire(self, adapter: ServedAdapter) -> asyncio.Task[None]:
        self._leaving.add(adapter)
        task = asyncio.create_task(self._drop(adapter))
        task.add_done_callback(lambda _: self._leaving.discard(adapter))
        return task

    async def _drop(self, adapter: ServedAdapter) -> None:
        """Wait until no request uses an adapter, then drop its cached pages and unload it."""
        await adapter.unused.wait()
        try:
            if self._flush is not None and adapter.namespaces:
                await self._flush(adapter.group, *adapter.namespaces)
        finally:
            if self._loader is not None:
                await self._loader.unload(adapter.loaded)
