"""Results of `foretoken bench phases`: one JSON, from which plots and report are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from ...core.errors import InvalidRequest
from ..common.report import Spread
from ..common.roofline import Limits, Shape

Depth = int | Literal["auto"]


class PrefillPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Time to the first token of a prompt, cold and with the prompt in the cache; seconds."""

    prompt_len: int
    num_cached: int  # Prompt tokens that the second request found in the cache.
    runs: int
    cold: Spread
    cached: Spread

    @property
    def ratio(self) -> float:
        """Time when cold over time when cached."""
        return self.cold.median / self.cached.median


class DecodePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per token near a position, one request alone."""

    position: int
    runs: int
    seconds: Spread


class BatchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of ``size`` requests that decode together."""

    size: int
    position: int  # Position of the token in the middle of their answers.
    runs: int
    rate: Spread  # Tokens per second of all requests.
    seconds: Spread  # Seconds per token of one request.


class DepthPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of one request alone at one draft depth."""

    depth: Depth
    runs: int
    tokens_per_step: float  # All runs have the same tokens, and the same steps except with "auto".
    acceptance: float | None  # Accepted share of the draft tokens; None if there were none.
    seconds: Spread  # Seconds per token.


class Phases(msgspec.Struct, kw_only=True):
    """One run of the benchmark."""

    command: str
    machine: dict[str, object]
    model: str
    settings: dict[str, object]  # The engine's options, including those that it chose itself.
    text: str  # Source of the prompts.
    draft: str
    simulated: bool  # Whether acceptance is simulated.
    cache_bytes: int  # Size of the processor's largest cache; 0: unknown.
    shape: Shape
    limits: Limits
    depth_position: int = 0  # Position of the token in the middle of the answers of ``depths``.
    prefill: list[PrefillPoint] = []
    decode: list[DecodePoint] = []
    batches: list[BatchPoint] = []
    depths: list[DepthPoint] = []

    @property
    def cached(self) -> list[PrefillPoint]:
        """Points with a cached prefix; a prompt shorter than a page leaves nothing in the cache."""
        return [p for p in self.prefill if p.num_cached]

    def spreads(self) -> Iterator[tuple[str, int, Spread]]:
        """Yield phase, number of runs and spread of everything that was timed."""
        for first in self.prefill:
            yield "prefill", first.runs, first.cold
        for first in self.cached:
            yield "cached", first.runs, first.cached
        for token in self.decode:
            yield "decode", token.runs, token.seconds
        for batch in self.batches:
            yield "batch", batch.runs, batch.seconds
        for depth in self.depths:
            yield "depth", depth.runs, depth.seconds


def load(path: Path) -> Phases:
    """Read a run. Raises `InvalidRequest` if the file is missing or holds no run."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Phases)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(
            f"{path} cannot be read as a run of phases: {error}", param="redraw"
        ) from error
