"""The roofline beside a row: decode is bound by bytes read, prefill by arithmetic."""

from __future__ import annotations

from pathlib import Path

from ...common.roofline import Limits
from .checkpoints import Shape
from .rows import Row

_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 32}
"""A parameter; of int4 with the scale of its group of 32."""

_CACHED = 2**27
"""Bytes of weights that caches may hold, so that reading memory is no limit."""


def num_params(folder: Path) -> int:
    """Number of parameters of a bfloat16 checkpoint."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2


def roofline(row: Row, shape: Shape, params: int, limits: Limits) -> float | None:
    """The best that the row's figure can be on this machine, where a formula is at hand.

    Every step of a decode reads all weights once, for all its requests; of experts those that
    the requests are expected to choose. A prefill multiplies every parameter but the vocabulary's
    with every token, of experts those that a token chooses; attention, which grows with the
    square of the prompt, is left out. Speculation and integer arithmetic have no such line here.
    """
    if params * _BYTES[row.setting.dtype] < _CACHED:
        return None
    if row.kind == "decode" and not row.setting.depth:
        num_bytes = _params_of(shape, params, row.batch) * _BYTES[row.setting.dtype]
        return row.batch * limits.read / num_bytes
    if row.kind in ("prefill", "cold", "embed", "score") and row.setting.dtype == "bf16":
        rate = limits.matrix / (2 * (_params_of(shape, params, 1) - shape.vocab_size * shape.width))
        computed = row.num_shared + row.batch * (row.prompt_len - row.num_shared)
        return rate if row.is_rate else computed / rate
    return None


def _params_of(shape: Shape, params: int, rows: int) -> float:
    """Parameters that some of ``rows`` tokens need."""
    experts = shape.experts
    return params if experts is None else params - experts.params + experts.params_of(rows)
