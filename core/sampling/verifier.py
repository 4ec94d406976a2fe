"""The one verifier: plain decoding is verification of an empty draft.

The target's token at an output position is the argmax of its processed log-probabilities plus
Gumbel noise keyed by (seed, position): an exact sample (Gumbel-max). At temperature 0 there is no
noise. A draft is compared with the target's tokens along its own path:

    accepted    a draft token equal to the target's token at its position, all before it accepted
    recovered   the target's own token at the first position where the draft differs
    bonus       the target's own token behind a draft that was accepted whole

So a step yields its accepted run and one recovered or bonus token, and since no token depends on
what was drafted, the output is the same for every drafter, depth and batch. A drafter that draws
with the same noise (`sample`) is accepted most often: Daliri, Musco, Suresh, arXiv 2408.07978.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ..interface.step import Refusal, SamplingMetadata, TokenLogprob
from .gumbel import gumbel_rows, vocabulary_hashes
from .logits_processors import SampleRow, apply_processors, argmax, has_truncation, scaled, truncate
from .logprobs import token_logprobs

NOT_FINITE = "the model's logits are not finite"
ALL_BANNED = Refusal("the request's parameters ban every token")
_CPU_BLOCK = 2**17  # logits handled at once: more would leave the core's cache
_DEVICE_BLOCK = 2**25


class VerifyRow(msgspec.Struct, frozen=True, gc=False):
    """One request's share: its prompt and output so far, and a draft of what follows."""

    tokens: array[int]
    draft: Sequence[int]
    sampling: SamplingMetadata


class Verified(msgspec.Struct, frozen=True, gc=False):
    """The accepted run and the recovered or bonus token behind it.

    With an ``error`` the run ends before the position that failed, and the request must end too.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()  # [len(token_ids)] where the request asks for them
    error: str | None = None


class Choice(NamedTuple):
    """The drawn token, or why there is none (``token_id`` is -1 then)."""

    token_id: int
    error: str | None = None


@torch.inference_mode()
def verify(logits: Tensor, rows: Sequence[VerifyRow]) -> list[Verified]:
    """Compare drafts with the target's own tokens.

    ``logits`` [sum of (len(draft) + 1), vocab] are the target's, unprocessed: for each row, those
    after its last token and after each draft token. They are only read. A draft token outside the
    vocabulary is never accepted. Logits that decide and are not finite are an error of that
    request alone.
    """
    return walk_drafts(logits, rows, lambda places: _sample(logits, places, 1.0))


def walk_drafts(
    logits: Tensor,
    rows: Sequence[VerifyRow],
    choose: Callable[[Sequence[LogitsRow]], Sequence[Choice]],
) -> list[Verified]:
    """Follow each draft for as long as ``choose`` decides for its tokens; `verify`'s skeleton."""
    starts = first_rows(logits, rows)
    walks = [_Walk(row, start) for row, start in zip(rows, starts, strict=True)]
    for wave in _waves(walks, logits.device):
        choices = choose([walk.place(depth) for walk, depth in wave])
        for (walk, _), choice in zip(wave, choices, strict=True):
            walk.take(choice)
    return [walk.verified(logits) for walk in walks]


def first_rows(logits: Tensor, rows: Sequence[VerifyRow]) -> list[int]:
    """Where each row's logits begin. Raises ValueError where they are not as many as it takes."""
    starts = list(accumulate((len(row.draft) + 1 for row in rows), initial=0))
    if starts.pop() != len(logits):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} drafts")
    return starts


def verified(
    logits: Tensor, row: VerifyRow, start: int, token_ids: Sequence[int], error: str | None
) -> Verified:
    """What a walk along a row's draft has come to; its logits begin at ``start``."""
    num_top = row.sampling.params.logprobs
    logprobs: tuple[TokenLogprob, ...] = ()
    if num_top is not None:
        decided = logits[start : start + len(token_ids)]
        logprobs = tuple(token_logprobs(decided, token_ids, num_top))
    return Verified(tuple(token_ids), len(token_ids) - (error is None), logprobs, error)


@torch.inference_mode()
def sample(
    logits: Tensor, rows: Sequence[SampleRow], *, temperature_scale: float = 1.0
) -> list[Choice]:
    """Draw one token per row of ``logits`` [num_rows, vocab], which are only read.

    For drafters: the same processors and the same noise as the target's. ``temperature_scale``
    divides the logits on top of the temperature, below 1 to sharpen.
    """
    return _sample(logits, list(enumerate(rows)), temperature_scale)


class _Walk:
    """One request's way along its own draft."""

    def __init__(self, row: VerifyRow, start: int) -> None:
        self._row = row
        self._start = start  # of its rows among the logits
        self._draft = tuple(row.draft)
        self._token_ids: list[int] = []
        self._error: str | None = None
        self.is_done = False

    @property
    def num_places(self) -> int:
        """Rows of logits that may decide."""
        return len(self._draft) + 1

    def place(self, depth: int) -> LogitsRow:
        tail = self._draft[:depth]
        return self._start + depth, SampleRow(self._row.tokens, self._row.sampling, tail)

    def take(self, choice: Choice) -> None:
        """The target's token at the next place; the walk ends where the draft differs from it."""
        if self.is_done:
            return
        if choice.error is None:
            depth = len(self._token_ids)
            self._token_ids.append(choice.token_id)
            self.is_done = self._draft[depth : depth + 1] != (choice.token_id,)
        else:
            self._error, self.is_done = choice.error, True

    def verified(self, logits: Tensor) -> Verified:
        return verified(logits, self._row, self._start, self._token_ids, self._error)


def _waves(walks: Sequence[_Walk], device: torch.device) -> Iterator[list[tuple[_Walk, int]]]:
    """What to sample together, as (walk, depth).

    On a CPU one depth after the other: rows behind a mismatch cost time and decide nothing.
    Elsewhere all at once: asking how far each walk got costs more.
    """
    num_depths = max((walk.num_places for walk in walks), default=0)
    every = [[(w, depth) for w in walks if depth < w.num_places] for depth in range(num_depths)]
    if device.type != "cpu":
        every = [[step for wave in every for step in wave]]
    for wave in every:
        yield [(walk, depth) for walk, depth in wave if not walk.is_done]


def _sample(logits: Tensor, places: Sequence[LogitsRow], temperature_scale: float) -> list[Choice]:
    choices = [Choice(-1)] * len(places)
    for indices, edited, draw in _blocks(places, logits):
        block = [places[i][1] for i in indices]
        values = _take(logits, [places[i][0] for i in indices])
        values, errors = processed(values, block, edited)
        drawn = _draw_sound(draw, values, block, errors, temperature_scale)
        for i, token_id, error in zip(indices, drawn, errors, strict=True):
            choices[i] = Choice(token_id, error)
    return choices


def _blocks(places: Sequence[LogitsRow], logits: Tensor) -> Iterator[tuple[list[int], bool, _Draw]]:
    """Indices of places that the same operations serve: (indices, whether edited, draw)."""
    vocab_size = logits.shape[-1]
    kinds = [(row.is_edited, _kind(row, vocab_size)) for _, row in places]
    most = _CPU_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, most // vocab_size)
    by_kind = sorted(range(len(places)), key=kinds.__getitem__)
    for (edited, kind), group in groupby(by_kind, key=kinds.__getitem__):
        indices = list(group)
        for start in range(0, len(indices), step):
            yield indices[start : start + step], edited, _DRAWS[kind]


def _take(logits: Tensor, indices: list[int]) -> Tensor:
    """Those rows in float32; without a copy where they lie side by side."""
    first, after = indices[0], indices[0] + len(indices)
    adjacent = indices == list(range(first, after))
    return (logits[first:after] if adjacent else logits[indices]).to(torch.float32)


def processed(
    values: Tensor, rows: Sequence[SampleRow], edited: bool
) -> tuple[Tensor, list[str | None]]:
    """Logits ready for the temperature (a copy where edited), and what is wrong with each row.

    ``values`` [num_rows, vocab] are float32 and only read.
    """
    errors = _unfit(values, NOT_FINITE)
    if not edited:
        return values, errors
    values = values.clone()
    refusals = apply_processors(values, rows)
    banned = _unfit(values, ALL_BANNED)
    return values, [a or b or c for a, b, c in zip(errors, refusals, banned, strict=True)]


def _unfit(values: Tensor, message: str) -> list[str | None]:
    return [None if math.isfinite(top) else message for top in values.amax(-1).tolist()]


def _draw_sound(
    draw: _Draw,
    values: Tensor,
    rows: Sequence[SampleRow],
    errors: Sequence[str | None],
    temperature_scale: float,
) -> list[int]:
    """Tokens of the rows without an error; -1 for the others, which never meet the arithmetic."""
    sound = [i for i, error in enumerate(errors) if error is None]
    drawn = [-1] * len(rows)
    if sound:
        values = values if len(sound) == len(rows) else values[sound]
        ids = draw(values, [rows[i] for i in sound], temperature_scale).tolist()
        for i, token_id in zip(sound, ids, strict=True):
            drawn[i] = token_id
    return drawn


def _kind(row: SampleRow, vocab_size: int) -> int:
    if row.sampling.params.temperature == 0.0:
        return 0
    return 2 if has_truncation(row, vocab_size) else 1


def _draw_best(values: Tensor, rows: Sequence[SampleRow], temperature_scale: float) -> Tensor:  # noqa: ARG001
    return argmax(values)


def _draw_gumbel(values: Tensor, rows: Sequence[SampleRow], temperature_scale: float) -> Tensor:
    noise = _noise(rows, vocabulary_hashes(values.shape[-1], values.device))
    return argmax(noise.add_(scaled(values, rows, temperature_scale)))


def _draw_cut(values: Tensor, rows: Sequence[SampleRow], temperature_scale: float) -> Tensor:
    kept, ids = truncate(scaled(values, rows, temperature_scale), rows)
    noise = _noise(rows, vocabulary_hashes(values.shape[-1], values.device)[ids])
    return ids.gather(-1, argmax(noise.add_(kept))[:, None])[:, 0]


def _noise(rows: Sequence[SampleRow], hashes: Tensor) -> Tensor:
    return gumbel_rows([(row.sampling.seed, row.position) for row in rows], hashes)


LogitsRow = tuple[int, SampleRow]  # (row of the logits, what it decides)
_Draw = Callable[[Tensor, Sequence[SampleRow], float], Tensor]
_DRAWS: tuple[_Draw, ...] = (_draw_best, _draw_gumbel, _draw_cut)  # in the order of `_kind`
