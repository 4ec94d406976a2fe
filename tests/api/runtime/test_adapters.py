"""Adapters by name: which namespaces they have, and what is flushed when they go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from foretoken.api.build.adapter_loader import AdapterFolder, OwnAdapters
from foretoken.api.runtime import adapters as module
from foretoken.api.runtime.adapters import Adapters
from foretoken.core.errors import ForetokenError, InvalidRequest, ModelLoadError
from foretoken.core.interface.extras.adapter import Adapter, LoadedAdapter
from foretoken.radix_cache import FlushedNamespaces


def loaded(_: Path) -> LoadedAdapter:
    return LoadedAdapter(Adapter(), 4, 100, b"digest")


class Flushes:
    """Notes what is flushed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | None, ...]] = []

    async def __call__(self, *namespaces: str | None) -> int:
        self.calls.append(namespaces)
        return 0


async def test_a_salt_has_namespaces_of_all_adapters_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_NAMESPACES", 1)
    flushes = Flushes()
    adapters = Adapters(OwnAdapters(loaded), flushes, most=4)
    first = await adapters.load("a", Path())
    await adapters.load("b", Path())
    adapters.enter("a")
    made = [first.namespace("s"), first.namespace("t")]  # the second is beyond the limit
    unloading = asyncio.create_task(adapters.unload("a"))
    await asyncio.sleep(0)
    for salt, namespace in zip("st", made, strict=True):
        assert namespace in adapters.namespaces(salt)
        assert len(adapters.namespaces(salt)) == 2
    first.leave()
    await unloading
    flushed = FlushedNamespaces(*flushes.calls)
    assert all(namespace in flushed for namespace in made)
    assert adapters.namespaces("s")[0] not in flushed  # of b
    assert None not in flushed


async def test_each_loading_of_the_same_files_has_namespaces_of_its_own() -> None:
    adapters = Adapters(OwnAdapters(loaded), Flushes(), most=1)
    found = set()
    for _ in range(2):
        found.add((await adapters.load("a", Path())).namespace("s"))
    await adapters.unload("a")
    found.add((await adapters.load("a", Path())).namespace("s"))
    assert len(found) == 3


async def test_an_adapter_that_is_replaced_in_use_counts_until_its_requests_have_ended() -> None:
    adapters = Adapters(OwnAdapters(loaded), Flushes(), most=1)
    await adapters.load("a", Path())
    used = await adapters.load("a", Path())  # in the place of one that no request has
    adapters.enter("a")
    with pytest.raises(InvalidRequest, match="the maximum"):
        await adapters.load("a", Path())
    assert adapters.num_loaded == 1
    used.leave()
    await adapters.load("a", Path())


class Loader:
    """Loads when it may, and notes what is unloaded."""

    def __init__(self) -> None:
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.made: list[LoadedAdapter] = []
        self.unloaded: list[LoadedAdapter] = []

    async def load(self, name: str, number: int, folder: AdapterFolder) -> LoadedAdapter:
        await self.may_load.wait()
        self.made.append(loaded(folder))
        return self.made[-1]

    async def unload(self, loaded: LoadedAdapter) -> None:
        self.unloaded.append(loaded)


async def test_an_adapter_that_finds_no_room_once_it_is_loaded_is_unloaded() -> None:
    loader = Loader()
    adapters = Adapters(loader, Flushes(), most=1)
    await adapters.load("a", Path())
    loader.may_load.clear()
    replacing = asyncio.create_task(adapters.load("a", Path()))
    await asyncio.sleep(0)
    used = adapters.enter("a")  # so the one that it replaces stays
    loader.may_load.set()
    with pytest.raises(InvalidRequest, match="the maximum"):
        await replacing
    assert loader.unloaded == loader.made[1:]
    used.leave()


async def test_a_cache_that_cannot_be_flushed_keeps_no_adapter() -> None:
    async def refuse(*namespaces: str | None) -> int:
        raise ForetokenError("no answer")

    loader = Loader()
    adapters = Adapters(loader, refuse, most=1)
    (await adapters.load("a", Path())).namespace(None)
    with pytest.raises(ForetokenError, match="no answer"):
        await adapters.unload("a")
    assert loader.unloaded == loader.made
    await adapters.load("a", Path())


def test_no_link_is_followed_below_the_folder_that_adapters_must_be_in(tmp_path: Path) -> None:
    """The path may come from a front, whose files are others."""
    (tmp_path / "here" / "sql").mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    loader = OwnAdapters(loaded)

    def load(path: str, below: str | None) -> LoadedAdapter:
        folder = AdapterFolder(tmp_path / path, None if below is None else tmp_path / below)
        return asyncio.run(loader.load("sql", 1, folder))

    assert load("here/sql", "here").rank == load("link/sql", "link").rank == 4
    assert load("here/link", None).rank == 4, "the operator's own paths may lead anywhere"
    for path in ("here/link", "here/link/here/sql"):
        with pytest.raises(ModelLoadError, match="must not contain a symbolic link"):
            load(path, "here")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load("here/sql", "here/sql/deeper")
