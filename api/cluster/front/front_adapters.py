"""FrontAdapters: the adapters of a front, which all present and future replicas load."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from ....core.errors import ForetokenError, ModelLoadError, Unavailable
from ....core.interface.extras.adapter import LoadedAdapter
from ...build.adapter_loader import AdapterFolder
from ..wire.messages import (
    AdapterFacts,
    Answer,
    LoadAdapter,
    RemoteAdapter,
    UnloadAdapter,
    facts_of,
)
from .questions import ask_all, bytes_of, number_of
from .replica_link import ReplicaLink
from .roster import NO_REPLICA, Roster

logger = logging.getLogger(__name__)
LOAD_SECONDS = 300.0  # timeout for a replica to load an adapter


class _Loaded(NamedTuple):
    """An adapter that all present replicas have loaded and later ones will load."""

    question: LoadAdapter
    digest: bytes  # digest of the adapter's files


class FrontAdapters:
    """An `AdapterLoader` that loads adapters into all replicas. Belongs to one event loop.

    Each replica reads the same path and must find the same files there; a replica that joins later
    and does not find them is removed. ``on_equipped`` is called when a new replica has all
    adapters.
    """

    def __init__(self, roster: Roster, on_equipped: Callable[[], None]) -> None:
        self._roster, self._on_equipped = roster, on_equipped
        self._loaded: dict[RemoteAdapter, _Loaded] = {}
        self._equipping: set[asyncio.Task[None]] = set()

    async def load(self, name: str, number: int, folder: AdapterFolder) -> LoadedAdapter:
        """Let all replicas load an adapter.

        Raises `Unavailable` if no replica is connected, `ModelLoadError` if the replicas' files
        differ, and the error of any replica. If it raises, no replica keeps the adapter.
        """
        question = _question(name, number, folder)
        try:
            found = await self._load_everywhere(question)
        except BaseException:
            await asyncio.shield(self._unload(number))
            raise
        facts, remote = next(iter(found.values())), RemoteAdapter(number)
        for link in found:
            link.adapters.add(remote)
        self._loaded[remote] = _Loaded(question, facts.digest)
        return LoadedAdapter(remote, facts.rank, facts.num_bytes, facts.digest)

    async def _load_everywhere(self, question: LoadAdapter) -> dict[ReplicaLink, AdapterFacts]:
        """Ask all replicas, including any that join meanwhile, to load an adapter.

        Raises `Unavailable`, `ModelLoadError`, and the error of any replica.
        """
        asked: set[bytes] = set()
        found: dict[ReplicaLink, AdapterFacts] = {}
        links = self._roster.links
        while fresh := [link for peer, link in links.items() if peer not in asked]:
            asked |= {link.peer for link in fresh}
            found |= await self._ask(question, fresh)
            found = {link: facts for link, facts in found.items() if link.peer in links}
        if not found:
            raise Unavailable(NO_REPLICA)
        if len({facts.digest for facts in found.values()}) > 1:
            raise ModelLoadError(f"{question.path}: the replicas have different files at this path")
        return found

    async def unload(self, loaded: LoadedAdapter) -> None:
        """Let all replicas unload an adapter."""
        remote = loaded.weights
        if isinstance(remote, RemoteAdapter):
            del self._loaded[remote]
            for link in self._roster.links.values():
                link.adapters.discard(remote)
            await self._unload(remote.number)

    def equip(self, link: ReplicaLink) -> None:
        """Let a new replica load the adapters that the other replicas have."""
        if self._loaded:
            task = asyncio.create_task(self._equip(link))
            self._equipping.add(task)
            task.add_done_callback(self._equipping.discard)

    def close(self) -> None:
        """Stop waiting for replicas."""
        for task in self._equipping:
            task.cancel()

    async def _equip(self, link: ReplicaLink) -> None:
        for remote, (question, digest) in list(self._loaded.items()):
            if self._roster.links.get(link.peer) is not link:
                return
            try:
                facts = (await self._ask(question, [link])).get(link)
                if facts is not None and facts.digest != digest:
                    raise ModelLoadError(
                        f"{question.path}: its files differ from the other replicas' files"
                    )
            except ForetokenError as error:
                if remote in self._loaded:
                    reason = f"the replica cannot load the adapter {question.name}: {error}"
                    self._roster.lose(link, "wrong", reason)
                    return
                continue
            if facts is not None and remote in self._loaded:
                link.adapters.add(remote)
            elif facts is not None:
                await self._unload(remote.number)
        self._on_equipped()

    async def _ask(
        self, question: LoadAdapter, links: list[ReplicaLink]
    ) -> dict[ReplicaLink, AdapterFacts]:
        return await ask_all(self._roster, question, _facts_in, links=links, seconds=LOAD_SECONDS)

    async def _unload(self, number: int) -> None:
        await ask_all(self._roster, UnloadAdapter(number=number), number_of, skips=True)


def _question(name: str, number: int, folder: AdapterFolder) -> LoadAdapter:
    below = None if folder.below is None else os.path.abspath(folder.below)
    return LoadAdapter(name=name, number=number, path=os.path.abspath(folder.path), below=below)


def _facts_in(answer: Answer) -> AdapterFacts:
    return facts_of(bytes_of(answer))
