"""Roofline of a model on a machine: operations, bytes, and the least time that they take.

Every linear costs two operations for each parameter and token, attention four for each query
feature and position that is seen; a step reads all weights once, and the KV that it looks back on.
No step is faster than the slower of both at the measured limits: the roofline (Williams,
Waterman and Patterson, 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

LENGTHS = (10, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
POSITIONS = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_FAR = 1 << 20  # tokens or requests: beyond any prompt or batch
NEAR = 1.2  # a last point closer than this to the one before would say nothing new


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the machine, measured in the same run."""

    read: float  # bytes a second from memory
    matrix: float  # operations a second
    drift: float  # how far the measurements of it lay apart, 0.1 for a tenth
    dtype: str  # of the numbers multiplied
    how: str  # what measured it


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model that decide how long a step takes."""

    block_params: int  # of all layers' linears: multiplied for every token
    head_params: int  # of the output layer: multiplied where logits are wanted
    query_width: int  # features of all query heads of a layer
    windows: tuple[int | None, ...]  # [num_layers] positions that a row sees; None: all before it
    weight_bytes: int  # that every step reads
    kv_bytes: float  # of one position, over all layers

    def seen(self, position: int) -> int:
        """Positions that a token sees, itself included, summed over the layers."""
        return sum(min(position + 1, window or position + 1) for window in self.windows)

    def seen_by_all(self, num_tokens: int) -> int:
        """The same, summed over the tokens of a prompt."""
        total = 0
        for window in self.windows:
            growing = min(num_tokens, window or num_tokens)
            total += growing * (growing + 1) // 2 + (num_tokens - growing) * (window or 0)
        return total

    def attention_ops(self, num_tokens: int) -> int:
        """Operations of attention over a prompt."""
        return 4 * self.query_width * self.seen_by_all(num_tokens)

    def prefill_ops(self, num_tokens: int) -> int:
        """Operations from a prompt to its first token."""
        linears = 2 * (self.block_params * num_tokens + self.head_params)
        return linears + self.attention_ops(num_tokens)

    def decode_ops(self, position: int, batch: int = 1) -> int:
        """Operations of a step that adds one token to each of a batch."""
        attention = 4 * self.query_width * self.seen(position)
        return batch * (2 * (self.block_params + self.head_params) + attention)

    def decode_bytes(self, position: int, batch: int = 1) -> float:
        """Bytes that such a step reads: the weights once, the KV of each."""
        kv = self.seen(position) * self.kv_bytes / len(self.windows)
        return self.weight_bytes + batch * kv


def arithmetic_seconds(shape: Shape, limits: Limits, prompt_len: int) -> float:
    """Least seconds for a prompt's operations."""
    return shape.prefill_ops(prompt_len) / limits.matrix


def weights_seconds(shape: Shape, limits: Limits) -> float:
    """Least seconds to read the weights once."""
    return shape.weight_bytes / limits.read


def prefill_floor(shape: Shape, limits: Limits, prompt_len: int) -> float:
    """Seconds from a prompt to its first token, at least."""
    return max(arithmetic_seconds(shape, limits, prompt_len), weights_seconds(shape, limits))


def decode_floor(shape: Shape, limits: Limits, position: int, batch: int = 1) -> float:
    """Seconds of a decode step, at least."""
    return max(
        shape.decode_bytes(position, batch) / limits.read,
        shape.decode_ops(position, batch) / limits.matrix,
    )


def prefill_ridge(shape: Shape, limits: Limits) -> int:
    """The shortest prompt whose operations take longer than reading the weights."""
    bound = weights_seconds(shape, limits)
    return _first(lambda n: arithmetic_seconds(shape, limits, n) >= bound) or _FAR


def batch_ridge(shape: Shape, limits: Limits, position: int) -> int | None:
    """The smallest batch whose operations take longer than its bytes; None where none does."""

    def by_arithmetic(batch: int) -> bool:
        operations = shape.decode_ops(position, batch) / limits.matrix
        return operations >= shape.decode_bytes(position, batch) / limits.read

    return _first(by_arithmetic)


def _first(holds: Callable[[int], bool], limit: int = _FAR) -> int | None:
    """The first number above 0 from which on something holds, by bisection; None: none is."""
    low, high = 0, limit
    if not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def clipped(grid: Sequence[int], longest: int) -> list[int]:
    """The points of a grid that fit, and the longest itself unless one lies near it."""
    fitting = [n for n in grid if n <= longest]
    if longest > 0 and (not fitting or longest > NEAR * fitting[-1]):
        fitting.append(longest)
    return fitting


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bytes of the weights, and bytes a second that this machine reads, measured before the run."""

    weight_bytes: int
    read_rate: float

    @property
    def steps_per_s(self) -> float:
        """Decode steps a second at best; a step serves one token a user, more with speculation."""
        return self.read_rate / self.weight_bytes

    def beside(self, figures: Mapping[str, object]) -> str:
        """The limit in words, and how near the median user's steps come to it."""
        size, rate = self.weight_bytes / 1e6, self.read_rate / 1e9
        text = f"{self.steps_per_s:.4g} steps/s ({size:.4g} MB of weights at {rate:.3g} GB/s)"
        users, per_step = figures.get("tokens_per_s_user"), figures.get("tokens_per_step")
        if not isinstance(users, Mapping):
            return text
        if not isinstance(per_step, float):
            return f"{text}; tokens a step are not told"
        return f"{text}; median user {users['p50'] / per_step / self.steps_per_s:.2g} of it"


def measured_roofline(path: Path, weight_bytes: int | None = None) -> Roofline | None:
    """Roofline of a checkpoint's files, or of ``weight_bytes``; None where there are no bytes."""
    if weight_bytes is None:
        weight_bytes = file_bytes(path)
    if not weight_bytes:
        return None
    from .machine import torch_read_bandwidth  # imports torch

    return Roofline(weight_bytes, torch_read_bandwidth())


def file_bytes(path: Path) -> int:
    """Bytes of a checkpoint's files: of a GGUF file, or of a folder's tensors."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)
