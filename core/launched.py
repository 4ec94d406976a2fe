"""LaunchedStep: a step that the device was asked for, and which nobody has waited for yet."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from .batch import Ahead, Draws, Segment, Wanted
from .kv_pool import KVPool
from .model.decoder import Decoder
from .ops.device import make_stopwatch
from .sampler import DeviceSampler
from .sampling import SampleRow
from .step import AheadTokens, PlanRow, RowOutput, StepOutput, StepPlan
from .verify import Choice

_UNKNOWN = array("q", [0])  # in place of a token that the device knows


def check_steady(plan: StepPlan) -> None:
    """Raise ValueError for a plan that is more than a token for each row, by its logits alone."""
    if not plan.is_plain:
        raise ValueError("a plan with drafts cannot be launched")
    for row in plan.rows:
        if row.stop - row.start != 1 or not row.samples:
            raise ValueError(f"row {row.request_id} has more than one token to compute")
        if row.sampling.reads_text:
            raise ValueError(f"row {row.request_id} cannot be launched: its tokens must be known")


class LaunchedStep:
    """`Launched` of a `ModelRunner`.

    All that the host may still write or read while the device works is its own: the words on their
    way to the host, and the clocks. The rest the device uses in the order in which it was asked.
    """

    def __init__(
        self, rows: Sequence[PlanRow], decoder: Decoder, pool: KVPool, after: LaunchedStep | None
    ) -> None:
        """Ask for a forward pass and a token for each row; nothing here waits for the device."""
        assert isinstance(decoder.sampler, DeviceSampler)
        self._request_ids = [row.request_id for row in rows]
        self._computing, self._deciding = (make_stopwatch(decoder.device) for _ in range(2))
        ahead = None if after is None else after._lend(rows, decoder.config.vocab_size)
        segments = [_segment(row, after) for row in rows]
        batch = decoder.batch(segments, page_size=pool.page_size, ahead=ahead)
        draws = Draws([SampleRow(row.tokens, row.sampling) for row in rows], [1] * len(rows))
        self._computing.start()
        output = decoder.forward(batch, pool, Wanted(draws))
        self._computing.stop()
        self._deciding.start()
        self._drawing = output.tokens or decoder.sampler.begin(output.logits, draws.rows)
        self._deciding.stop()

    def _lend(self, rows: Sequence[PlanRow], vocab_size: int) -> Ahead:
        """What the rows of the next step go on from."""
        index_of = {request_id: index for index, request_id in enumerate(self._request_ids)}
        sources = [index_of[row.request_id] if _is_ahead(row) else -1 for row in rows]
        return Ahead(self._drawing.words, np.array(sources, np.int32), vocab_size)

    def finish(self) -> StepOutput:
        """Wait for its words, and not for what was launched since. Raises the device's errors."""
        choices = self._drawing.choices()
        pairs = zip(self._request_ids, choices, strict=True)
        rows = [_output(request_id, choice) for request_id, choice in pairs]
        times = {
            "draft": 0.0,
            "forward": self._computing.seconds(),
            "verify": self._deciding.seconds(),
        }
        return StepOutput(rows=rows, times=times, num_rows=len(rows))


def _is_ahead(row: PlanRow) -> bool:
    return isinstance(row.tokens, AheadTokens)


def _segment(row: PlanRow, after: LaunchedStep | None) -> Segment:
    """The row's one token, if the host has it."""
    is_unknown = after is not None and _is_ahead(row)
    tokens = _UNKNOWN if is_unknown else row.tokens[row.start : row.stop]
    return Segment(tokens, row.start, row.page_ids, 1)


def _output(request_id: str, choice: Choice) -> RowOutput:
    if choice.error is not None:
        return RowOutput(request_id=request_id, error=choice.error)
    return RowOutput(request_id=request_id, token_ids=(choice.token_id,))
