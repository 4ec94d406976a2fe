"""The roofline beside a row: decode is bound by bytes read, prefill by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....core.ops.native.library import native_library
from ....core.ops.native.limits import matrix_rate, read_bandwidth
from .rows import Row
from .shapes import Shape

_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 32}
"""A parameter; of int4 with the scale of its group of 32."""

_CACHED = 2**27
"""Bytes of weights that caches may hold, so that reading memory is no limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second read from memory, and bfloat16 operations a second, by our kernels."""

    read: float
    matrix: float

    def or_better(self, other: Limits | None) -> Limits:
        """The best of two measurements: what else runs on a machine only takes away."""
        if other is None:
            return self
        return Limits(max(self.read, other.read), max(self.matrix, other.matrix))


def measured_limits(threads: int) -> Limits | None:
    """Of this machine now; None without native kernels."""
    library = native_library()
    if library is None:
        return None
    library.set_threads(threads)
    return Limits(read_bandwidth(library), matrix_rate(library))


def num_params(folder: Path) -> int:
    """Of a bfloat16 checkpoint."""
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
    if row.kind in ("prefill", "cold") and row.setting.dtype == "bf16":
        rate = limits.matrix / (2 * (_params_of(shape, params, 1) - shape.vocab_size * shape.width))
        return rate if row.is_rate else row.prompt_len / rate
    return None


def _params_of(shape: Shape, params: int, rows: int) -> float:
    """Parameters that some of ``rows`` tokens need."""
    experts = shape.experts
    return params if experts is None else params - experts.params + experts.params_of(rows)
