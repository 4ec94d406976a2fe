"""Results of `foretoken bench phases`: one JSON, from which plots and report are drawn."""

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
    """First token of a prompt, cold and with the prompt in the cache; seconds."""

    prompt_len: int
    num_cached: int  # tokens of the second one's prompt that were found
    runs: int
    cold: Spread
    cached: Spread

    @property
    def ratio(self) -> float:
        """Factor by which the cached one comes sooner."""
        return self.cold.median / self.cached.median


class DecodePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a token about some position, one request alone."""

    position: int
    runs: int
    seconds: Spread


class BatchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that decode together."""

    size: int
    position: int  # of the token in the middle of their answers
    runs: int
    rate: Spread  # tokens a second, all together
    seconds: Spread  # of one token of one request


class DepthPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One request alone, so many draft tokens a step."""

    depth: Depth
    runs: int
    tokens_per_step: float  # the tokens are the same in all runs, so are the steps but for "auto"
    acceptance: float | None  # of the draft tokens; None where there were none
    seconds: Spread  # of one token


class Phases(msgspec.Struct, kw_only=True):
    """One run of the benchmark."""

    command: str
    machine: dict[str, object]
    model: str
    settings: dict[str, object]  # the engine's options, and its own choices
    text: str  # what the prompts are made of
    draft: str
    simulated: bool  # whether acceptance is
    cache_bytes: int  # of the processor's largest cache; 0: unknown
    shape: Shape
    limits: Limits
    depth_position: int = 0  # of the token in the middle of the answers of ``depths``
    prefill: list[PrefillPoint] = []
    decode: list[DecodePoint] = []
    batches: list[BatchPoint] = []
    depths: list[DepthPoint] = []

    @property
    def cached(self) -> list[PrefillPoint]:
        """Points with a cached prefix: a prompt shorter than a page leaves nothing in the cache."""
        return [p for p in self.prefill if p.num_cached]

    def spreads(self) -> Iterator[tuple[str, int, Spread]]:
        """Phase, runs and spread of everything that was timed."""
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
    """Read a run. Raises `InvalidRequest` for a file that is not there or holds no run."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Phases)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{path} is no run to draw: {error}", param="redraw") from error
