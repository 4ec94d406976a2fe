"""TransferDesk: ends the transfers of an engine's KV pages to other engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ....radix_cache import PrefixCache
from ....radix_cache.transfers import SECONDS
from ...interface.extras.transfers import DONE, RENEW, PageServer

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.002  # interval between checks for messages; a check takes microseconds


class TransferDesk:
    """Receiver of the messages from engines that read this engine's pages; it ends transfers.

    The desk polls on the engine's event loop while pages are held and for `SECONDS` after that, and
    costs nothing at other times. The polling also answers readers: a reader whose transfer has
    already ended learns this, instead of concluding that this engine is dead. ``on_end`` is called
    when pages have become free, because requests may wait for free pages.
    """

    def __init__(
        self,
        cache: PrefixCache,
        server: PageServer,
        *,
        clock: Callable[[], float],
        on_end: Callable[[], None],
    ) -> None:
        self._cache, self._server = cache, server
        self._clock, self._on_end = clock, on_end
        self._timer: asyncio.TimerHandle | None = None
        self._ends = 0.0  # time at which the transfer parameters of all readers have expired
        cache.transfers.on_hold = self._watch

    def _watch(self) -> None:
        """Poll for messages from readers from now on."""
        self._ends = self._clock() + SECONDS
        self._poll_soon()

    def _poll_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_SECONDS, self._poll)

    def _poll(self) -> None:
        self._timer = None
        transfers = self._cache.transfers
        num_held = len(transfers)
        try:
            for note in self._server.notes():
                self._take(note)
        except OSError as error:
            logger.warning(
                "cannot receive notifications from engines that load KV pages: %s", error
            )
        now = self._clock()
        self._cache.tick(now)
        if len(transfers) < num_held:
            self._on_end()
        if num_held:
            self._watch()
        elif now < self._ends:
            self._poll_soon()

    def _take(self, note: bytes) -> None:
        """Execute a reader's message; a message of an unknown kind or transfer is ignored."""
        for verb, act in ((DONE, self._cache.transfers.end), (RENEW, self._cache.transfers.renew)):
            if note.startswith(verb):
                act(note[len(verb) :].decode(errors="replace"))

    def close(self) -> None:
        """End all transfers; readers must compute the pages that they have not loaded yet."""
        if self._timer is not None:
            self._timer.cancel()
        self._cache.transfers.on_hold = lambda: None
        self._cache.transfers.close()
        self._server.close()
