"""Bed: a decoder with its KV pool and runner, to run steps of any shape on made-up contexts.

No prompt is computed: the pages hold random keys and values, which cost as much to read as computed
ones.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ....api.types.sampling_params import SamplingParams
from ....core.config import EngineConfig
from ....core.execution.model_runner import ModelRunner
from ....core.interface.draft import NO_DRAFT, Draft, DraftPlan
from ....core.interface.plan import ScheduledRequest, StepPlan
from ....core.interface.sampling import SamplingMetadata
from ....core.model.decoder import Decoder
from ....core.ops.kv_pool import KVPool
from ...common.report import Spread
from .gauge import Gauge

PAGE_SIZE = EngineConfig().sizes("cuda").page_size  # Tokens of a page.
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Bed:
    """A decoder, its pool and runner; sequence ``i`` has ``pages_each`` pages of its own."""

    decoder: Decoder
    pool: KVPool
    runner: ModelRunner
    pages_each: int  # Pages of a sequence.

    @classmethod
    def make(cls, decoder: Decoder, num_sequences: int, num_tokens: int) -> Bed:
        """Make a bed for ``num_sequences`` of ``num_tokens`` tokens, warmed up like a server."""
        pages_each = -(-num_tokens // PAGE_SIZE)
        pool = decoder.make_pool(num_sequences * pages_each, page_size=PAGE_SIZE)
        fill(pool)
        decoder.warm_up(pool, pages_each * PAGE_SIZE)
        return cls(decoder, pool, ModelRunner(decoder, pool), pages_each)

    def plan(self, num_rows: int, start: int, *, length: int = 1, num_drafts: int = 0) -> StepPlan:
        """Plan a step of ``num_rows`` sequences.

        Each has ``length`` tokens from ``start`` on and ``num_drafts`` draft tokens.
        """
        rows = [self._row(index, start, length, num_drafts) for index in range(num_rows)]
        return StepPlan(requests=rows, newly_allocated_pages=array("q"), is_plain=num_drafts == 0)

    def _row(self, index: int, start: int, length: int, num_drafts: int) -> ScheduledRequest:
        drawn = np.random.default_rng(index).integers(
            self.decoder.config.vocab_size, size=start + length + num_drafts
        )
        tokens, first = array("q", drawn.tobytes()), index * self.pages_each
        guesses = tokens[start + length :]
        return ScheduledRequest(
            request_id=str(index),
            tokens=tokens[: start + length],
            start=start,
            stop=start + length,
            page_ids=array("q", range(first, first + self.pages_each)),
            sampling=SamplingMetadata(params=GREEDY, seed=index, prompt_len=start + length),
            draft_plan=DraftPlan(Draft.of(guesses, "made up") if num_drafts else NO_DRAFT),
        )

    def part(self, row: ScheduledRequest, start: int, stop: int) -> StepPlan:
        """Plan a chunk of a prompt; the prompt's last chunk yields a token."""
        rows = [replace(row, start=start, stop=stop)]
        return StepPlan(requests=rows, newly_allocated_pages=array("q"), is_plain=True)

    def seconds(self, plan: StepPlan, *, repeats: int) -> Spread:
        """Time a whole step: batch, forward pass, sampling and reading back the tokens."""
        for _ in range(2):
            self.runner.step(plan)
        return Spread.of(list(self._timed(plan, repeats)))

    def _timed(self, plan: StepPlan, repeats: int) -> Iterator[float]:
        for _ in range(repeats):
            began = time.perf_counter()
            # The step returns when its tokens are read, so no work is left on the device.
            self.runner.step(plan)
            yield time.perf_counter() - began

    def busy(self, gauge: Gauge, plan: StepPlan, *, repeats: int = 5) -> float:
        """Return the seconds of a step in which the device was busy."""
        with gauge.watch() as activity:
            for _ in range(repeats):
                self.runner.step(plan)
        return activity.busy_seconds / repeats


def fill(pool: KVPool) -> None:
    """Fill the pool with random keys and values; zeros would take less power and run faster."""
    if not pool.block.codec.is_scaled:
        pool.data.normal_()
        return
    pool.data.random_(0, 127)  # Bytes that are finite numbers in each codec.
    _, scales = pool.split(pool.blocks)
    if scales is not None:
        scales.fill_(1 / 64)
