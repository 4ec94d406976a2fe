"""KeptKV: the prefix cache over a pool, what stores its pages, and what lends them to others."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from ....core.config import EngineConfig, format_size
from ....core.errors import InvalidRequest
from ....core.execution.proposer import Proposer
from ....core.interface.extras.tiers import KVTiers
from ....core.interface.extras.transfers import PageServer
from ....core.ops.kv_pool import KVPool
from ....core.ops.state_pool import StatePool
from ....core.scheduling.scheduler import Scheduler
from ....radix_cache import PrefixCache, StateSlots
from ..kv_events import keys_of, name_fingerprint

if TYPE_CHECKING:
    from ....core.tiers.events import KVEventPublisher
    from ....core.tiers.keys import PageKeys
    from ....core.tiers.transfer_params import TransferParams

logger = logging.getLogger(__name__)
STATE_INTERVAL = 4096  # tokens between states that are kept of a prompt, where they are large


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKV:
    """A prefix cache, the pool below it, and the keys by which pages are known outside.

    ``fingerprint``: of what computes the KV; None where nobody asked for it. ``proposer``: its
    share of a page is stored and sent, too.
    """

    config: EngineConfig
    cache: PrefixCache
    pool: KVPool
    proposer: Proposer | None
    fingerprint: bytes | None
    keys: PageKeys | None

    def make_tiers(self) -> KVTiers | None:
        """Make the tiers that are asked for."""
        if not self.config.has_tiers or self.keys is None or self.fingerprint is None:
            return None
        made: KVTiers = _kv_tiers().make_tiers(
            self.cache,
            self.keys,
            self.pool,
            self.proposer,
            config=self.config,
            fingerprint=self.fingerprint,
            make_peers=_kv_transfer().make_peers if self.config.takes_kv else None,
        )
        return made

    def make_transfers(
        self, scheduler: Scheduler
    ) -> tuple[PageServer | None, TransferParams | None]:
        """Let other engines read the pool, and read what requests say of theirs, if asked for."""
        config = self.config
        if config.kv_transfer is None or self.keys is None or self.fingerprint is None:
            return None, None
        stored = () if self.proposer is None else self.proposer.stored
        server = None
        if config.gives_kv:
            server = _kv_transfer().make_server(self.cache, self.pool, stored)
        loads = scheduler.page_loads
        params = _kv_transfer().make_params(
            self.cache,
            self.keys,
            self.pool,
            stored,
            fingerprint=self.fingerprint,
            server=server,
            end_offer=loads.end_offer if config.takes_kv and loads is not None else None,
        )
        return server, params


def check_places(config: EngineConfig) -> None:
    """Refuse stores and transfers that cannot be used. Raises `InvalidRequest`."""
    if config.has_tiers:
        _kv_tiers().check_places(config)
    if config.kv_transfer is not None:
        _kv_transfer().check_secret()


def refuse_tiers(config: EngineConfig) -> None:
    """Raise `InvalidRequest` for tiers that do not keep recurrent states."""
    names = ("kv_remote", "kv_transfer")
    name = next((each for each in names if getattr(config, each)), None)
    if name is not None:
        message = f"{name} does not keep recurrent states, which this model has: leave it out"
        raise InvalidRequest(message, param=name)


def page_keys(
    cache: PrefixCache, fingerprint: bytes | None, events: KVEventPublisher | None, model: str
) -> PageKeys | None:
    """Give cached pages keys, where there is a fingerprint or events are published."""
    if fingerprint is None and events is None:
        return None
    keys = keys_of(cache, fingerprint or name_fingerprint(model, cache.page_size))
    if events is not None:
        keys.add_observer(events)
    return keys


def prefix_cache(config: EngineConfig, pool: KVPool) -> PrefixCache:
    """Make the cache over a pool, and over its recurrent states where it has some."""
    return PrefixCache(
        pool.num_pages,
        pool.page_size,
        pin_quota=config.pin_quota,
        session_ttl=config.session_ttl,
        cache_quota=config.cache_quota,
        states=None if pool.states is None else _state_slots(config, pool, pool.states),
    )


def _state_slots(config: EngineConfig, pool: KVPool, states: StatePool) -> StateSlots:
    """Return the ledger of a pool of recurrent states.

    By default states that are no larger than a page are kept at the end of each page of a prompt.
    """
    interval = config.state_interval
    if interval is None:
        is_small = states.bytes_per_slot * pool.num_pages <= pool.num_bytes
        interval = pool.page_size if is_small else STATE_INTERVAL
    logger.info(
        "%d slots for recurrent states, %s each; requests that run at a time: %d",
        states.num_slots, format_size(states.bytes_per_slot), states.num_logs,
    )  # fmt: skip
    return StateSlots(states.num_slots, states.num_logs, interval=interval)


def _kv_transfer() -> ModuleType:
    # Not at the top: nothing of NIXL is imported without it.
    from .. import kv_transfer

    return kv_transfer


def _kv_tiers() -> ModuleType:
    # Not at the top: without a tier nothing of core/tiers is imported.
    from .. import kv_tiers

    return kv_tiers
