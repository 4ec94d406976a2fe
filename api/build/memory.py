"""Memory that a model needs, and whether there is enough of it: asked before weights are read.

All of it is estimated from headers. A model is refused only where it certainly cannot be loaded:
the system would kill the process, in the middle of the load and without a word.
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
from .kv_pools import HOST_KV_BYTES, LEAST_TOKENS

logger = logging.getLogger(__name__)
PROGRAM_BYTES = 400 * 2**20  # Python, torch and the engine, beside weights and KV (measured)
USUAL_TOKENS = 8192  # of KV, for one conversation
LARGEST = 8  # times as large as its files are weights at most: 4 bits computed in float32
LARGEST_TOKEN = 2**20  # bytes of KV
_SHARE = 4  # of what is left behind the weights a pool of the default size takes a quarter
_ROOM = 1.05  # what is proposed leaves so much


class Room(NamedTuple):
    """Bytes that weights and KV need: certainly, and as far as can be told."""

    least_weights: int
    least_kv: int
    weights: int
    kv: int

    @property
    def least(self) -> int:
        """Bytes without which the model cannot be served."""
        return self.least_weights + self.least_kv


def room_for(report: ModelReport, config: EngineConfig) -> Room:
    """Bytes that a model needs with these options, in one of the processes that share it."""
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
    """Raise `ModelLoadError` for a model that cannot fit; warn where it is near.

    A model that is damaged or not supported passes: loading it tells why.
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
            "%s may not fit: its weights need about %s and the KV pool %s, and %s of memory are "
            "free", path.name, format_size(room.weights), format_size(room.kv), format_size(free),
        )  # fmt: skip


def short_of(report: ModelReport, config: EngineConfig, free: int) -> str:
    """Tell what is needed, what there is, and what would fit, as the end of a sentence."""
    room = room_for(report, config)
    needs = f"its weights need {format_size(room.weights)}"
    if room.least_weights <= free:
        needs += f" and the KV pool {format_size(room.kv)}"
    options = list(_what_fits(report, config, free))
    remedy = " or ".join(options) or _smaller(report, free)
    return f"{needs}, and {format_size(free)} of memory are free; {remedy}"


def _what_fits(report: ModelReport, config: EngineConfig, free: int) -> Iterator[str]:
    """Flags with which the model would fit."""
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
    """Tell what to look for where no flag helps."""
    bits = 8 * free / _ROOM / max(1, report.num_parameters)
    if bits >= 2:
        return f"take a file with at most {bits:.1f} bits a weight"
    return f"take a model of at most {most_billions(free, 'int4'):.1f} billion parameters in 4 bits"


def most_billions(free: int, quantize: Quantize) -> float:
    """Billions of parameters that fit into so much memory, with a pool of the default size."""
    left = max(0, free - min(HOST_KV_BYTES, free // _SHARE))
    return left / (WEIGHT_BYTES.get(quantize, 2.0) * 1e9)
