"""The limit beside a figure: a decode step cannot be faster than reading every weight once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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
    """Of a checkpoint's files, or of so many bytes; None where there are none."""
    if weight_bytes is None:
        weight_bytes = file_bytes(path)
    if not weight_bytes:
        return None
    from .engine import read_bandwidth  # imports torch

    return Roofline(weight_bytes, read_bandwidth())


def file_bytes(path: Path) -> int:
    """Bytes of a checkpoint's files: of a GGUF file, or of a folder's tensors."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)
