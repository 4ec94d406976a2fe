"""The process of ``foretoken replica``: an engine whose requests come from a front."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

from ....core.config import EngineConfig
from ....core.errors import InvalidRequest
from ...build.engine_builder import build
from ...server.lifecycle import Supervisor
from ...server.process import run_loop
from ...text.tokenizer import Tokenizer
from .engine_host import EngineHost
from .front_session import FrontLink

SAVE_SECONDS = 30.0  # time after a signal for writing pages to tiers
ON_DRAIN = "leaving the front, which moves running requests to other replicas"


def run(
    model: str | None,
    config: EngineConfig,
    dial: Callable[[], FrontLink],
    *,
    address: str,
    num_shares: int | None = None,
) -> int:
    """Load a model, serve the front at ``address``, and return the exit code. Blocking.

    ``dial`` opens a connection to the front. Raises the errors of `make_host`, and `RefusedError`.
    """
    return serve(make_host(model, config, dial, address=address, num_shares=num_shares))


def serve(host: EngineHost) -> int:
    """Run a replica until a signal or the end of its engine, and return the exit code. Blocking.

    The code is 0 after a signal, 1 for a dead engine, 70 for a hung one, as for a server. Raises
    `RefusedError`.
    """
    supervisor = Supervisor(host, drain_seconds=SAVE_SECONDS, on_drain=ON_DRAIN)
    return run_loop(_serve(host, supervisor), supervisor.close)


def make_host(
    model: str | None,
    config: EngineConfig,
    dial: Callable[[], FrontLink],
    *,
    address: str,
    num_shares: int | None = None,
    wait_seconds: float = 0.0,
) -> EngineHost:
    """Load a model, and return the replica that serves the front at ``address``. Blocking.

    ``num_shares``: number of replicas that share the disk of ``kv_disk``, or None if this replica
    has it alone. ``wait_seconds``: time to wait for a free share. Raises the errors of `build`, and
    `InvalidRequest` without a free share.
    """
    if config.lora:
        message = "--lora is a flag of the front, which loads adapters into its replicas"
        raise InvalidRequest(message, param="lora")
    if num_shares is not None:
        config = _with_disk_share(config, num_shares, wait_seconds)
    built = build(model, config, wants_keys=True)
    tokenizer = Tokenizer.load(built.path, max_model_len=built.max_model_len)
    return EngineHost(built, tokenizer, dial, address=address, config=config)


def _with_disk_share(config: EngineConfig, num_shares: int, wait_seconds: float) -> EngineConfig:
    """Return the config with a share of its disk, which this process holds until it ends."""
    if (disk := config.kv_disk_place()) is None:
        return config
    from ....core.tiers.stores.disk_shares import DiskShare  # imported only if there is a disk

    share = DiskShare(*disk, num_shares, wait_seconds=wait_seconds)
    return replace(config, kv_disk=f"{share.path}:{share.num_bytes}")


async def _serve(host: EngineHost, supervisor: Supervisor) -> int:
    await host.start()
    gc.freeze()
    try:
        with supervisor.watching(host.stop):
            await host.run()
    finally:
        await supervisor.end()
        await host.close(drain_seconds=SAVE_SECONDS)
    return supervisor.exit_code
