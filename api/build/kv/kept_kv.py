"""KeptKV: the prefix cache of a pool, with its tiers and its transfers to other engines."""

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
from ....radix_cache.versioned import VersionedPrefixCache
from .events import keys_of, name_fingerprint

if TYPE_CHECKING:
    from ....core.tiers.events import KVEventPublisher
    from ....core.tiers.keys import PageKeys
    from ....core.tiers.transfer_params import TransferParams

logger = logging.getLogger(__name__)
STATE_INTERVAL = 4096  # default number of prompt tokens between kept states, if states are large


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKV:
    """A prefix cache, its pool, and the keys that identify pages outside this process.

    ``fingerprint``: digest of everything that determines the KV; None if it is not needed.
    ``proposer``: if it keeps rows for each page, they are stored and sent with the page.
    """

    config: EngineConfig
    cache: PrefixCache
    pool: KVPool
    proposer: Proposer | None
    fingerprint: bytes | None
    keys: PageKeys | None

    def make_tiers(self) -> KVTiers | None:
        """Return the tiers that the options ask for; None if they ask for none."""
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
        """Return the server that lets other engines read the pool, and the codec of
        ``kv_transfer_params``.

        Each is None unless the options ask for it.
        """
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


def check_stores(config: EngineConfig) -> None:
    """Raise `InvalidRequest` if a store or KV transfer of the options cannot be used."""
    if config.has_tiers:
        _kv_tiers().check_stores(config)
    if config.kv_transfer is not None:
        _kv_transfer().check_secret()


def refuse_tiers(config: EngineConfig) -> None:
    """Raise `InvalidRequest` if the options ask for tiers without support of recurrent states."""
    names = ("kv_remote", "kv_transfer")
    name = next((each for each in names if getattr(config, each)), None)
    if name is not None:
        message = f"{name} does not support models with recurrent states: leave it out"
        raise InvalidRequest(message, param=name)


def page_keys(
    cache: PrefixCache, fingerprint: bytes | None, events: KVEventPublisher | None, model: str
) -> PageKeys | None:
    """Return keys for cached pages; None if both ``fingerprint`` and ``events`` are None."""
    if fingerprint is None and events is None:
        return None
    keys = keys_of(cache, fingerprint or name_fingerprint(model, cache.page_size))
    if events is not None:
        keys.add_observer(events)
    return keys


def prefix_cache(config: EngineConfig, pool: KVPool) -> PrefixCache:
    """Return the prefix cache of a pool, including its recurrent states if it has any."""
    kind = VersionedPrefixCache if config.allow_weight_updates else PrefixCache
    return kind(
        pool.num_pages,
        pool.page_size,
        pin_quota=config.pin_quota,
        session_ttl=config.session_ttl,
        cache_quota=config.cache_quota,
        states=None if pool.states is None else _state_slots(config, pool, pool.states),
    )


def _state_slots(config: EngineConfig, pool: KVPool, states: StatePool) -> StateSlots:
    """Return the allocator of a pool of recurrent states.

    By default, states no larger than a page are kept at the end of each page of a prompt.
    """
    interval = config.state_interval
    if interval is None:
        is_small = states.bytes_per_slot * pool.num_pages <= pool.num_bytes
        interval = pool.page_size if is_small else STATE_INTERVAL
    logger.info(
        "%d slots for recurrent states, %s each; at most %d running requests",
        states.num_slots, format_size(states.bytes_per_slot), states.num_logs,
    )  # fmt: skip
    return StateSlots(states.num_slots, states.num_logs, interval=interval)


def _kv_transfer() -> ModuleType:
    # Imported here so that NIXL is loaded only if KV transfer is enabled.
    from . import transfer

    return transfer


def _kv_tiers() -> ModuleType:
    # Imported here so that core/tiers is loaded only if a tier is configured.
    from . import tiers

    return tiers
