"""Estimates whether a model fits into memory, before its weights are read.

The estimate uses file headers only. A model is rejected only if it certainly does not fit: the
system would kill the process during the load without an error message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ...core.config import EngineConfig, format_size
from ...core.errors import ModelLoadError
from ...core.model.report import WEIGHT_BYTES, ModelReport, inspect_model, weight_files
from ...core.ops.machine.device import free_memory
from ...core.ops.machine.system_memory import free_swap
from ...core.ops.quantize import Quantize
from ...core.options.settings import parse_size
from .kv.pools import HOST_KV_BYTES, LEAST_TOKENS

logger = logging.getLogger(__name__)
PROGRAM_BYTES = 400 * 2**20  # Python, torch and the engine, without weights and KV (measured)
USUAL_TOKENS = 8192  # number of tokens of a usual conversation, for the estimate of its KV
LARGEST = 8  # maximum ratio of weights in memory to files: 4 bits computed in float32
LARGEST_TOKEN = 2**20  # maximum bytes of KV per token
_SHARE = 4  # divisor: the default pool gets 1/4 of the memory left after the weights
_ROOM = 1.05  # safety factor of proposed options


class Room(NamedTuple):
    """The memory that a model needs, in bytes: a lower bound (``least_...``) and an estimate."""

    least_weights: int
    least_kv: int
    weights: int
    kv: int

    @property
    def least(self) -> int:
        """Lower bound of the memory to serve the model, in bytes."""
        return self.least_weights + self.least_kv


def room_for(report: ModelReport, config: EngineConfig) -> Room:
    """Return the memory that a model needs with these options, per tensor-parallel process."""
    options: dict[str, str] = {"dtype": config.dtype, "quantize": config.quantize}
    weights, least = report.weights_in_memory(**options), report.least_weights(**options)  # type: ignore[arg-type]
    token = report.kv_bytes_per_token or 0
    usual = token * min(USUAL_TOKENS, report.max_model_len)
    if config.kv_memory is not None:
        kv = least_kv = parse_size(config.kv_memory)
    elif config.kv_tokens is not None:
        kv = config.kv_tokens * token
        least_kv = kv if config.kv_cache_dtype == "auto" else kv // 2
    else:
        kv, least_kv = usual, _SHARE * token * min(LEAST_TOKENS, report.max_model_len)
    return Room(least // config.tp, least_kv, weights // config.tp, kv)


def check_room(path: Path, config: EngineConfig, device: torch.device) -> None:
    """Raise `ModelLoadError` for a model that cannot fit; log a warning if it may not fit.

    A damaged or unsupported model passes: loading it reports the reason.
    """
    free = free_memory(device)
    asked = 0 if config.kv_memory is None else parse_size(config.kv_memory)
    asked += LARGEST_TOKEN * (config.kv_tokens or 0)
    if LARGEST * weight_files(path)[1] + asked < free:
        return
    report = inspect_model(path)
    if report.problem is not None:
        return
    room = room_for(report, config)
    swap = free_swap() if device.type == "cpu" else 0
    if room.least > free + swap:
        raise ModelLoadError(f"{path.name} does not fit: {short_of(report, config, free)}")
    if room.weights + room.kv > free:
        logger.warning(
            "%s may not fit: its weights need about %s and the KV pool %s, but only %s of "
            "memory are free",
            path.name,
            format_size(room.weights),
            format_size(room.kv),
            format_size(free),
        )


def short_of(report: ModelReport, config: EngineConfig, free: int) -> str:
    """Return the needed memory, the free memory and a remedy, as the end of an error message."""
    room = room_for(report, config)
    needs = f"its weights need {format_size(room.weights)}"
    if room.least_weights <= free:
        needs += f" and the KV pool {format_size(room.kv)}"
    options = list(_what_fits(report, config, free))
    remedy = " or ".join(options) or _smaller(report, free)
    return f"{needs}, but only {format_size(free)} of memory are free; {remedy}"


def _what_fits(report: ModelReport, config: EngineConfig, free: int) -> Iterator[str]:
    """Yield the flags that would let the model fit."""
    left = int(free / _ROOM)
    default = room_for(report, EngineConfig(dtype=config.dtype, quantize=config.quantize))
    kv = left - default.weights
    if kv >= default.least_kv and config.kv_memory is not None:
        yield f"use --kv-memory {kv >> 20}MiB"
    elif kv >= default.least_kv and config.kv_tokens is not None and report.kv_bytes_per_token:
        yield f"use --kv-tokens {kv // report.kv_bytes_per_token // 64 * 64}"
    if config.quantize != "none" or (report.quantization and config.dtype == "auto"):
        return
    choices: tuple[tuple[str, str, Quantize], ...] = (
        ("--dtype bfloat16", "bfloat16", "none"),
        ("--quantize int8", config.dtype, "int8"),
        ("--quantize int4", config.dtype, "int4"),
    )
    for flag, dtype, quantize in choices:
        weights = report.weights_in_memory(dtype=dtype, quantize=quantize)
        if weights + default.least_kv <= left and weights < default.weights:
            yield f"use {flag} ({format_size(weights)})"


def _smaller(report: ModelReport, free: int) -> str:
    """Return a recommendation to use a smaller model, for the case that no flag helps."""
    bits = 8 * free / _ROOM / max(1, report.num_parameters)
    if bits >= 2:
        return f"use a file with at most {bits:.1f} bits per weight"
    return f"use a model of at most {most_billions(free, 'int4'):.1f} billion parameters in 4 bits"


def most_billions(free: int, quantize: Quantize) -> float:
    """Return how many billion parameters fit into ``free`` bytes with a default KV pool."""
    left = max(0, free - min(HOST_KV_BYTES, free // _SHARE))
    return left / (WEIGHT_BYTES.get(quantize, 2.0) * 1e9)
