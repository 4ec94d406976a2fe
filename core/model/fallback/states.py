"""Recurrent states of transformers' modules: their tensors, and the passes of a sequence.

Modules continue only from the state after their last row, and return only the state after the new
rows. So a log has two whole states: one before and one after a request's last rows. If all these
rows were committed, the next pass continues from the second state. If drafts among them were
rejected, it continues from the first one and computes the accepted rows again.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from typing_extensions import override

from ...ops.batch import IntArray, RaggedBatch
from ...ops.state_pool import StatePool, TensorKind

_RECURRENT = frozenset(("linear_attention", "conv", "hybrid", "hybrid_sliding"))


def has_states(config: PreTrainedConfig) -> bool:
    """Whether some layers of a model keep a recurrent state in transformers' cache."""
    return not _RECURRENT.isdisjoint(getattr(config, "layer_types", None) or ())


def pass_arguments(model: nn.Module, cache: PagedCache | None, token_ids: Tensor) -> dict[str, Any]:
    """Return the arguments of a model's pass over ``token_ids`` that concern mask and cache."""
    if cache is None:
        # A mask of ones means "not packed"; otherwise the row would be split by its positions.
        return {"attention_mask": torch.ones_like(token_ids), "use_cache": False}
    is_old = "cache_params" in inspect.signature(model.forward).parameters
    return {"cache_params" if is_old else "past_key_values": cache, "use_cache": True}


class PagedCache(DynamicCache):
    """transformers' cache of one sequence's states; pages hold its keys and values.

    A first pass creates its tensors; afterwards they are in a pool's memory.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Return the keys and values unchanged, because attention reads earlier ones from pages."""
        return key_states, value_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's state before the pass's rows.

        The scans that follow are taken to belong to this layer.
        """
        found: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        self._scanned = None if found is None else found
        self._num_scans = 0
        return found

    def next_scanned(self) -> Tensor | None:
        """Return the part of the last requested state that a scan continues from; None: no state.

        The part is [1, channels, state_size]; a state of several heads has one part per scan.
        """
        if self._scanned is None or self._scanned.dim() == 3:
            return self._scanned
        self._num_scans += 1
        return self._scanned[:, self._num_scans - 1]

    def _places(self) -> list[tuple[dict[int, Tensor], int]]:
        """Return the dictionaries and keys of the tensors, inputs of convolutions first."""
        return [
            (by_index, index)
            for kind in ("conv_states", "recurrent_states")
            for by_index in (getattr(layer, kind) for layer in self._recurrent_layers)
            for index, tensor in by_index.items()
            if tensor is not None
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the state, inputs of convolutions first."""
        return [by_index[index] for by_index, index in self._places()]

    @property
    def num_conv_tensors(self) -> int:
        """Number of tensors with inputs of convolutions."""
        by_layer = (layer.conv_states.values() for layer in self._recurrent_layers)
        return sum(tensor is not None for tensors in by_layer for tensor in tensors)

    def lend(self, tensors: Sequence[Tensor], *, is_begun: bool) -> None:
        """Let passes read and write ``tensors`` as the state.

        ``is_begun``: whether they hold a state already; otherwise their values are ignored.
        """
        for (by_index, index), tensor in zip(self._places(), tensors, strict=True):
            by_index[index] = tensor
        for layer in self._recurrent_layers:
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, is_begun)

    @property
    def _recurrent_layers(self) -> list[Any]:
        return [each for each in self.layers if isinstance(each, LinearAttentionCacheLayerMixin)]


class ModuleStates(NamedTuple):
    """Kinds of the state tensors that all modules of a model keep of one sequence.

    A pool treats them as one layer. The first ``num_conv`` tensors hold inputs of convolutions.
    """

    tensors: tuple[TensorKind, ...]
    num_conv: int

    @classmethod
    def of(cls, cache: PagedCache) -> ModuleStates:
        """Return the tensor kinds of a cache that a pass has filled."""
        kinds = ((tuple(each.shape), each.dtype) for each in cache.tensors)
        return cls(tuple(kinds), cache.num_conv_tensors)

    def slot_tensors(self, dtype: torch.dtype) -> list[TensorKind]:  # noqa: ARG002
        """Return the kinds of the tensors in one slot, which holds one state."""
        return list(self.tensors)

    def log_tensors(self, dtype: torch.dtype, ring: int) -> list[TensorKind]:  # noqa: ARG002
        """Return the kinds of the tensors in one log, which holds two states."""
        return [*self.tensors, *self.tensors]


@dataclass(slots=True, eq=False)
class _Log:
    """The log of a request: two states, and the tokens of the rows between them."""

    before: list[Tensor]
    after: list[Tensor]
    start: int = -1  # position of the state before the rows
    stop: int = -1  # position of the state after the rows; -1: the log has no valid state
    rows: list[int] = field(default_factory=list)  # token ids of the rows between the states


class ModuleStatePool(StatePool):
    """A `StatePool` with one shape for all modules of a model. ``tails``: the requests' logs."""

    def __init__(
        self,
        num_slots: int,
        num_logs: int,
        shape: ModuleStates,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Make the pool. Raises ValueError as `StatePool` does."""
        super().__init__(
            num_slots, num_logs, [shape], page_size=page_size, dtype=dtype, device=device
        )
        count = len(shape.tensors)
        views = [self.log_views(index, 0) for index in range(num_logs)]
        self.tails = [_Log(each[:count], each[count:]) for each in views]

    @override
    def set_position(self, slot: int, log: int, position: int) -> None:
        super().set_position(slot, log, position)
        tail = self.tails[log]
        tail.start, tail.stop, tail.rows = position, position, []


class Piece(NamedTuple):
    """Rows of a sequence that modules compute in one pass."""

    token_ids: list[int]
    start: int
    state: list[Tensor]  # state before its rows; the pass advances it past them

    @property
    def stop(self) -> int:
        """First position after the rows of the piece."""
        return self.start + len(self.token_ids)


class SequenceRun:
    """The passes that compute one segment, and the slots that get states between the passes."""

    def __init__(self, pool: ModuleStatePool, batch: RaggedBatch, index: int) -> None:
        """Prepare the passes of segment ``index`` of a batch with states.

        Raises ValueError if the segment has no state from which its rows can continue.
        """
        states = batch.states
        assert states is not None
        row, count = int(batch.first_rows[index]), int(batch.lens[index])
        page, keep = int(batch.first_pages[index]), int(states.keep_counts[:index].sum())
        wanted = batch.logit_rows[: batch.num_logits]
        self.start, self.stop = int(batch.starts[index]), int(batch.stops[index])
        self.page_ids = array("q", batch.pages[page : page + int(batch.page_counts[index])])
        self.num_logits = int(((row <= wanted) & (wanted < row + count)).sum())
        self._final_stop = int(states.final_stops[index])
        self._pool, self._slot = pool, int(states.slots[index])
        self._log = pool.tails[int(states.logs[index])]
        self._saved = self._find_saved(states.keeps[keep : keep + int(states.keep_counts[index])])
        self._begin()
        self._rows = self._log.rows + batch.token_ids[row : row + count].tolist()

    def pieces(self, *, row_by_row: bool) -> Iterator[Piece]:
        """Yield the passes; the caller computes each before it takes the next.

        ``row_by_row``: the modules can compute only one row at a time after a state.
        """
        log, first = self._log, self._log.start
        log.stop = -1
        _copy(log.before, log.after)
        position = first
        for stop in self._stops():
            while position < stop:
                upto = position + 1 if row_by_row and position else stop
                rows = self._rows[position - first : upto - first]
                yield Piece(rows, position, log.after)
                position = upto
            self._save(stop)
            if first < stop < self._final_stop:
                _copy(log.after, log.before)
                log.start, log.rows = stop, self._rows[stop - first : self.start - first]
        log.stop, log.rows = self.stop, self._rows[log.start - first :]

    def _find_saved(self, keeps: IntArray) -> dict[int, list[int]]:
        """Return the slots to save states to, by position.

        They are the slots of kept states, and the request's own slot, which gets the state at the
        last page end before the last row that is not a draft.
        """
        page_size = self._pool.page_size
        end = (self._final_stop - 1) // page_size * page_size
        saved = {end: [self._slot]} if end > self._at else {}
        for position, slot in keeps.tolist():
            saved.setdefault(position, []).append(slot)
        return saved

    @property
    def _at(self) -> int:
        """Position of the state in the request's slot."""
        return int(self._pool.at[self._slot, 0])

    def _begin(self) -> None:
        """Set the log's ``before`` to the state from which the passes begin."""
        log = self._log
        if self._at == self.start:  # The request has no rows before these.
            _copy(self._pool.slot_views(self._slot, 0), log.before)
            log.start, log.rows = self.start, []
        elif log.stop == self.start and not any(end < self.start for end in self._saved):
            log.before, log.after = log.after, log.before
            log.start, log.rows = self.start, []
        elif log.start <= self.start <= log.start + len(log.rows):
            del log.rows[self.start - log.start :]
        else:
            raise ValueError(
                f"the state in slot {self._slot} is at {self._at} and cannot be advanced to "
                f"position {self.start}: its log does not reach it"
            )

    def _stops(self) -> list[int]:
        """Return the positions at which passes end.

        Passes end at each saved state, at the end of the rows and, if drafts follow, at the end of
        the rows that are computed again.
        """
        stops = {*self._saved, self.stop}
        if self._log.start < self.start and self._final_stop < self.stop:
            stops.add(self.start)
        return sorted(stops)

    def _save(self, position: int) -> None:
        for slot in self._saved.get(position, ()):
            _copy(self._log.after, self._pool.slot_views(slot, 0))
            self._pool.at[slot] = position


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
