"""The target: its device, its threads, its weights and its image tower."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...core.execution.ranks.ranks import Ranks, TpDecoder
from ...core.model.decoder import Decoder, OwnDecoder
from ...core.model.description.fields import UnsupportedConfig
from ...core.model.formats.checkpoint import OnRead
from ...core.model.images.vision import Vision, load_vision
from ...core.model.loader import load_decoder
from ...core.model.opening import read_config
from ...core.model.sharding import check_shards
from ...core.ops.backends import choose_ops
from ...core.ops.base import Ops
from ...core.ops.machine.device import choose_device
from ...core.ops.machine.host_memory import CAN_SHARE
from ...core.ops.parallel import Comm
from ...core.options.settings import parse_size
from ...core.startup import timed
from .kv.pools import out_of_memory_hint
from .memory import check_room

logger = logging.getLogger(__name__)


def device_of(config: EngineConfig) -> torch.device:
    """Return the device that the options choose: the CPU for the native kernels."""
    is_native = config.device == "auto" and config.backend == "native"
    return choose_device("cpu" if is_native else config.device)


def refuse_overlap(config: EngineConfig) -> None:
    """Raise `InvalidRequest` if ``overlap`` is on, for targets that cannot overlap steps."""
    if config.overlap == "on":
        message = "overlap on needs a GPU with the Triton kernels: leave it at auto"
        raise InvalidRequest(message, param="overlap")


def thread_setter(config: EngineConfig, ops: Ops) -> Callable[[], None]:
    """Return a function that sets the number of compute threads.

    The native kernels use every core, since their idle threads sleep at once. Idle OpenMP threads
    spin and would take the event loop's core, so the torch backend leaves one core free. (Measured
    on two cores: torch was slower with two threads than with one, and the native kernels were 1.2
    to 1.4 times faster with two.) With the native kernels, torch has little to compute and gets one
    thread.
    """
    count = num_threads(config, ops)

    def set_threads() -> None:
        ops.set_threads(count)
        if ops.has_own_threads:
            torch.set_num_threads(1)

    return set_threads


def num_threads(config: EngineConfig, ops: Ops) -> int:
    """Return the number of compute threads of this process."""
    cores = len(os.sched_getaffinity(0))
    return _threads(config) or (cores if ops.has_own_threads else max(1, cores - 1))


def _threads(config: EngineConfig) -> int | None:
    """Return the configured number of threads; with several processes, a share of the cores."""
    if config.tp == 1 or config.threads is not None:
        return config.threads
    return max(1, len(os.sched_getaffinity(0)) // config.tp)


@timed("target")
def load_target(
    path: Path, config: EngineConfig, device: torch.device, on_read: OnRead | None
) -> tuple[Decoder, Ranks | None]:
    """Load the target, and start the processes that share its computation.

    Raises `InvalidRequest` for a model that cannot be sharded.
    """
    if config.tp == 1:
        return load_model(path, config, device, on_read), None
    if _shares_pools(config) and not CAN_SHARE:
        raise InvalidRequest("tp supports KV tiers and transfers on Linux only", param="tp")
    _check_shards(path, config.tp, device)
    ranks = Ranks(path, config.tp, _load_options(config, device), threads=_threads(config) or 1)
    try:
        part = load_model(path, config, device, on_read, comm=ranks.comm)
        assert isinstance(part, OwnDecoder), "only own decoders can be sharded"
        ranks.wait_until_loaded()
    except BaseException:
        ranks.end(at_once=True)
        raise
    logger.info("the model is sharded across %d processes", config.tp)
    return TpDecoder(part, ranks, shares_pools=_shares_pools(config)), ranks


def _shares_pools(config: EngineConfig) -> bool:
    """Whether this process reads and writes the pools of all ranks between passes."""
    return config.has_tiers or config.gives_kv


def _check_shards(path: Path, size: int, device: torch.device) -> None:
    """Raise `InvalidRequest` for a model that cannot be sharded, before any rank starts."""
    if device.type != "cpu":
        raise InvalidRequest("tp supports the CPU only: add --device cpu", param="tp")
    try:
        check_shards(read_config(path), size)
    except UnsupportedConfig as reason:
        why = f"tp does not support transformers' modules, which this model needs: {reason}"
        raise InvalidRequest(why, param="tp") from None


def _load_options(config: EngineConfig, device: torch.device) -> dict[str, str]:
    return {
        "dtype": config.dtype,
        "device": str(device),
        "load_format": config.load_format,
        "exact": config.exact,
        "backend": config.backend,
        "quantize": config.quantize,
        "kv_dtype": config.kv_cache_dtype,
        "impl": config.model_impl,
    }


def load_model(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    on_read: OnRead | None = None,
    comm: Comm | None = None,
) -> Decoder:
    """Load a decoder with the options of the engine. Raises `ModelLoadError`."""
    if config.load_format == "auto":
        check_room(path, config, device)
    remedy = "use a smaller --dtype, or --quantize"
    options: dict[str, Any] = _load_options(config, device)
    with out_of_memory_hint(f"while loading {path.name}", remedy):
        return load_decoder(path, **options, on_read=on_read, comm=comm)


@timed("image tower")
def load_images(
    path: Path, config: EngineConfig, target: Decoder, on_read: OnRead | None
) -> Vision | None:
    """Load the image tower, without quantisation; None if images are not supported."""
    # Other ranks receive token ids only, and KV packing counts positions as for text.
    if config.no_images or config.tp > 1 or config.kv_evict is not None:
        return None
    plain = target.ops
    if config.quantize != "none":
        plain = choose_ops(
            target.device, exact=config.exact, backend=config.backend, dtype=target.dtype
        )
    with out_of_memory_hint(f"while loading the image tower of {path.name}", "use --no-images"):
        return load_vision(
            path,
            target,
            plain,
            cache_bytes=parse_size(config.image_cache),
            kernels=plain if plain.has_own_threads else None,
            has_weights=config.load_format == "auto",
            on_read=on_read,
        )
