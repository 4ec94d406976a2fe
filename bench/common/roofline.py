"""Roofline of a model on a machine: operations, bytes, and the minimum time that they take.

Every linear layer costs two operations per parameter and token; attention costs four per query
feature and attended position. A step reads all weights once, and the KV of the positions that it
attends to. At the measured limits of the machine, a step takes at least the time of its operations
and at least the time of its reads: the roofline (Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

LENGTHS = (10, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
POSITIONS = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_FAR = 1 << 20  # Tokens or requests: more than any prompt or batch has.
NEAR = 1.2  # A last point closer than this factor to the one before would add no information.


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the machine, measured in the same run."""

    read: float  # Bytes read from memory per second.
    matrix: float  # Operations per second.
    drift: float  # Relative difference between the measurements of one limit; 0.1 is 10%.
    dtype: str  # Dtype of the numbers that were multiplied.
    how: str  # The code that measured these limits.


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model that decide how long a step takes."""

    block_params: int  # Parameters of all layers' linears, which are multiplied for every token.
    head_params: int  # Parameters of the output layer, multiplied only for tokens that need logits.
    query_width: int  # Features of all query heads of a layer.
    # [num_layers] Positions that a row attends to; None: all before it.
    windows: tuple[int | None, ...]
    weight_bytes: int  # Bytes of weights that every step reads.
    kv_bytes: float  # Bytes of one position, over all layers.

    def seen(self, position: int) -> int:
        """Return how many positions a token attends to, itself included, summed over the layers."""
        return sum(min(position + 1, window or position + 1) for window in self.windows)

    def seen_by_all(self, num_tokens: int) -> int:
        """Return how many positions a prompt's tokens attend to, summed over layers and tokens."""
        total = 0
        for window in self.windows:
            growing = min(num_tokens, window or num_tokens)
            total += growing * (growing + 1) // 2 + (num_tokens - growing) * (window or 0)
        return total

    def attention_ops(self, num_tokens: int) -> int:
        """Return the operations of attention over a prompt."""
        return 4 * self.query_width * self.seen_by_all(num_tokens)

    def prefill_ops(self, num_tokens: int) -> int:
        """Return the operations from the start of a prompt to its first token."""
        linears = 2 * (self.block_params * num_tokens + self.head_params)
        return linears + self.attention_ops(num_tokens)

    def decode_ops(self, position: int, batch: int = 1) -> int:
        """Return the operations of a step that adds one token to each request of a batch."""
        attention = 4 * self.query_width * self.seen(position)
        return batch * (2 * (self.block_params + self.head_params) + attention)

    def decode_bytes(self, position: int, batch: int = 1) -> float:
        """Return the bytes that a decode step reads: the weights once, and each request's KV."""
        kv = self.seen(position) * self.kv_bytes / len(self.windows)
        return self.weight_bytes + batch * kv


def arithmetic_seconds(shape: Shape, limits: Limits, prompt_len: int) -> float:
    """Return the minimum seconds that a prompt's operations take."""
    return shape.prefill_ops(prompt_len) / limits.matrix


def weights_seconds(shape: Shape, limits: Limits) -> float:
    """Return the minimum seconds that reading the weights once takes."""
    return shape.weight_bytes / limits.read


def prefill_floor(shape: Shape, limits: Limits, prompt_len: int) -> float:
    """Return the minimum seconds from the start of a prompt to its first token."""
    return max(arithmetic_seconds(shape, limits, prompt_len), weights_seconds(shape, limits))


def decode_floor(shape: Shape, limits: Limits, position: int, batch: int = 1) -> float:
    """Return the minimum seconds that a decode step takes."""
    return max(
        shape.decode_bytes(position, batch) / limits.read,
        shape.decode_ops(position, batch) / limits.matrix,
    )


def prefill_ridge(shape: Shape, limits: Limits) -> int:
    """Return the shortest prompt length whose operations take longer than reading the weights."""
    bound = weights_seconds(shape, limits)
    return _first(lambda n: arithmetic_seconds(shape, limits, n) >= bound) or _FAR


def batch_ridge(shape: Shape, limits: Limits, position: int) -> int | None:
    """Return the smallest batch size that is bound by arithmetic.

    None if all are bound by reading.
    """

    def by_arithmetic(batch: int) -> bool:
        operations = shape.decode_ops(position, batch) / limits.matrix
        return operations >= shape.decode_bytes(position, batch) / limits.read

    return _first(by_arithmetic)


def _first(holds: Callable[[int], bool], limit: int = _FAR) -> int | None:
    """Return by bisection the first number above 0 from which a condition holds, or None."""
    low, high = 0, limit
    if not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def clipped(grid: Sequence[int], longest: int) -> list[int]:
    """Return the grid points up to ``longest``, and ``longest`` itself unless one is near it."""
    fitting = [n for n in grid if n <= longest]
    if longest > 0 and (not fitting or longest > NEAR * fitting[-1]):
        fitting.append(longest)
    return fitting


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bytes of the weights, and bytes per second that this machine reads."""

    weight_bytes: int
    read_rate: float

    @property
    def steps_per_s(self) -> float:
        """Decode steps per second at best; each gives a user one token, more with speculation."""
        return self.read_rate / self.weight_bytes

    def describe(self, figures: Mapping[str, object]) -> str:
        """Describe the limit, and the fraction of it that the median user's steps reach."""
        size, rate = self.weight_bytes / 1e6, self.read_rate / 1e9
        text = f"{self.steps_per_s:.4g} steps/s ({size:.4g} MB of weights at {rate:.3g} GB/s)"
        users, per_step = figures.get("tokens_per_s_user"), figures.get("tokens_per_step")
        if not isinstance(users, Mapping):
            return text
        if not isinstance(per_step, float):
            return f"{text}; tokens per step unknown"
        return (
            f"{text}; the median user reaches {users['p50'] / per_step / self.steps_per_s:.2g} "
            "of it"
        )


def measured_roofline(path: Path, weight_bytes: int | None = None) -> Roofline | None:
    """Return the roofline of a checkpoint's files, or of ``weight_bytes``; None for zero bytes."""
    if weight_bytes is None:
        weight_bytes = file_bytes(path)
    if not weight_bytes:
        return None
    from .machine import torch_read_bandwidth  # Imported here, because the module loads torch.

    return Roofline(weight_bytes, torch_read_bandwidth())


def file_bytes(path: Path) -> int:
    """Return the bytes of a checkpoint's files: of a GGUF file, or of the tensors in a folder."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)
