"""TritonStep: all layers of a decoder as one graph per number of rows.

With few rows the graph also chooses tokens (lm_head.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import functional as F

from ....sampling.sampler import DraftVocab
from ...base import ForwardPlan, LayersOutput, Ops, Rope
from ...batch import NOTHING_MORE, Taps, Wanted
from ...kv_pool import KVPool
from ...layers import run_layers
from ...lora import AdaptedRows
from ...rows.step_inputs import rows_library
from ...weights import DecoderWeights, HeadLayout
from ..attention.tile_schedule import NARROW_LEN, SPLIT
from ..graph_inputs import NUM_BUFFERS, GraphInputs, HostFields
from ..recurrent.pass_states import record_positions
from ..sampling.sampler import TritonSampler
from .adapters import PassAdapters, StepAdapters, room_for
from .chained import TakeWords, TritonChainedPasses
from .graphs import Graph, MakeGraph
from .input_fields import (
    ITEM_WORDS,
    NarrowTarget,
    Windows,
    fields,
    fill,
    fill_idle,
    fill_narrow,
    narrow_target,
    words_needed,
)
from .lm_head import MAX_ROWS, FusedLmHead, GraphOutputs
from .plan import (
    DevicePlan,
    Geometry,
    Kinds,
    PartialSums,
    TritonPlan,
    device_plan,
    max_partials,
    take_device_tokens,
    warm_up_device_tokens,
)

logger = logging.getLogger(__name__)
BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows
MAX_WORDS = 2**20 - 2**13  # words of a graph's inputs, 4 MiB with the other fields


class _Shape(NamedTuple):
    """The kind of pass that a graph computes.

    ``has_wide``: whether rows may belong to long chunks. ``is_given``: whether rows may begin with
    given vectors (`Wanted.inputs`). ``num_best``: number of tokens to choose per draw; 0: the
    graph ends with the layers. ``draft_vocab``: `SamplingPlan.draft_vocab`.
    """

    bucket: int  # rows
    has_wide: bool
    taps: Taps
    is_given: bool = False
    num_best: int = 1
    draft_vocab: DraftVocab | None = None

    @classmethod
    def of(cls, bucket: int, wanted: Wanted, *, has_wide: bool) -> _Shape:
        """Return the kind of a pass.

        The graph chooses no tokens of more than `MAX_ROWS` rows, of long chunks, of passes without
        logits, and of given vectors without draws.
        """
        is_given, draws = wanted.inputs is not None, wanted.draws
        is_bare = wanted.hidden_alone or (is_given and draws is None)
        if bucket > MAX_ROWS or has_wide or is_bare:
            return cls(bucket, has_wide, wanted.taps, is_given, 0)
        if draws is None:
            return cls(bucket, has_wide, wanted.taps, is_given)
        return cls(bucket, has_wide, wanted.taps, is_given, draws.num_best, draws.draft_vocab)


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """A graph, its inputs and its outputs."""

    graph: Graph
    graph_inputs: GraphInputs
    head: FusedLmHead | None  # output layer and sampler after the layers
    outcome: GraphOutputs
    num_positions: int  # positions of the RoPE tables
    num_partials: int  # capacity of the buffers of partial sums
    windows: Windows
    tile_rows: int  # rows of a narrow tile
    given: Tensor | None = None  # [bucket, hidden] vectors that replace embeddings of rows

    def fill(self, to: HostFields, plan: TritonPlan) -> int | None:
        """Write a pass and return the used words, or None if the buffers have no room for it."""
        if plan.last_stop > self.num_positions:
            return None
        batch, geometry = plan.batch, plan.geometry
        if not plan.has_wide:
            num_words = fill_narrow(to, batch, self._target(to))
            if num_words is not None:
                return num_words
        works = plan.work_lists(self.windows)
        num_partials = max(work.num_partials for work in works)
        if num_partials > self.num_partials or words_needed(batch, works) > len(to["words"]):
            return None
        return fill(to, batch, works, geometry.pool.states)

    def _target(self, to: HostFields) -> NarrowTarget:
        if to.narrow_target is None:
            limits = {"tile_rows": self.tile_rows, "max_partials": self.num_partials}
            to.narrow_target = narrow_target(to, self.windows, **limits)
        return to.narrow_target

    def run(
        self,
        plan: TritonPlan,
        wanted: Wanted,
        adapters: PassAdapters | None = None,
    ) -> LayersOutput | None:
        """Compute a pass; its outputs are valid until the next replay. None if it does not fit.

        Two launches use the same buffers of the device without an event: in the stream, the second
        one's copy, tokens and replay come after all work of the first, the copy of its tokens to
        the host included.
        """
        batch, to = plan.batch, self.graph_inputs.open()
        states = plan.geometry.pool.states
        num_words = self.fill(to, plan)
        if num_words is None:
            return None
        if adapters is not None:  # graphs without adapters do not read these fields
            adapters.fill(to)
        has_chosen = self.head is not None and self.head.fill(to, wanted.draws, batch.num_logits)
        self.graph_inputs.upload(num_words)
        if self.given is not None and wanted.inputs is not None:
            self.given[: len(wanted.inputs)].copy_(wanted.inputs)
        take_device_tokens(batch, self.graph_inputs.device)
        self.graph.replay()
        if states is not None:
            record_positions(batch, states)
        wanted.notify_started()  # after the launch: woken threads would take the GIL
        logit_rows = self.graph_inputs.device["logit_rows"][: len(batch.logit_rows)]
        return self.outcome.of_pass(batch.num_rows, logit_rows, has_chosen=has_chosen)

    def run_chained(
        self, arguments: Sequence[object], num_rows: int, take: TakeWords | None
    ) -> Tensor | None:
        """Compute a chained pass (`ChainedGraph`); None if the graph has no room for it."""
        library, winners = rows_library(), self.outcome.winners
        if library is None or winners is None:
            return None
        works, room = self._target(self.graph_inputs.open())
        num_words = int(library.ft_fill_chained(*arguments, works, len(works), room))
        if num_words < 0:
            return None
        self.graph_inputs.upload(num_words)
        if take is not None:
            take(num_rows, self.graph_inputs.device)
        self.graph.replay()
        return winners[:num_rows].flatten()


class _PoolGraphs:
    """The graphs over one pool, and their shared buffers. Does not keep the pool alive."""

    def __init__(self, geometry: Geometry) -> None:
        pool, heads = geometry.pool, geometry.heads
        self.cos_sin = geometry.cos_sin(1)
        self.num_positions = _num_positions(geometry)
        self.num_splits = -(-self.num_positions // SPLIT)
        num_partials = min(BUCKETS[-1] * self.num_splits, max_partials(heads))
        self.partial_sums = PartialSums.of(num_partials, heads, pool.data.device)
        self.captured: dict[_Shape, _Captured] = {}
        # The int is a graph's capacity of adapters. None: the graph could not be captured.
        self.adapted: dict[tuple[_Shape, int], _Captured | None] = {}
        self.growth = 0  # `AdapterTables.growth` for which ``adapted`` is valid
        self._taps: dict[Taps, Tensor] = {}
        self._given: Tensor | None = None

    def given(self, bucket: int, embedding: Tensor) -> Tensor:
        """Return the buffer for given vectors, [bucket, hidden], which all graphs share."""
        if self._given is None:
            self._given = embedding.new_zeros((BUCKETS[-1], embedding.shape[1]))
        return self._given[:bucket]

    def tapped(self, taps: Taps, bucket: int, embedding: Tensor) -> Tensor | None:
        """Return the buffer for taps, [bucket, num_taps * hidden], or None without taps.

        It is outside the memory that graphs share, because taps are read after a replay.
        """
        if not taps:
            return None
        if taps not in self._taps:
            self._taps[taps] = embedding.new_empty((BUCKETS[-1], len(taps) * embedding.shape[1]))
        return self._taps[taps][:bucket]

    def num_words(self, bucket: int, page_size: int, num_windows: int) -> int:
        """Return the words that rows of maximum length need without sharing, or `MAX_WORDS`."""
        row_words = -(-self.num_positions // page_size)
        row_words += num_windows * self.num_splits * (1 + ITEM_WORDS)
        return min(MAX_WORDS, bucket * row_words)


def _num_positions(geometry: Geometry) -> int:
    """Return the number of positions in the pool, at most the length of the RoPE tables."""
    pool = geometry.pool
    return min(len(geometry.cos_sin(1)[0][0]), pool.num_pages * pool.page_size)


class TritonStep:
    """`CompiledForward` for the Triton kernels.

    A graph computes a fixed number of rows, a *bucket*; a pass may leave some of them empty. Long
    chunks have separate kernels, so a bucket that may have them has two graphs. A pass that fits no
    graph runs with the same kernels, launched one by one: it has more rows than the largest bucket,
    or more pages, partial sums or positions than the graph has room for. Passes with adapters have
    separate graphs, which use the inputs of the graphs without adapters; a number per row selects
    the adapter whose update is added.
    """

    def __init__(
        self,
        ops: Ops,
        weights: DecoderWeights,
        sampler: TritonSampler,
        *,
        one_tile: bool,
        make_graph: MakeGraph | None,
    ) -> None:
        self._ops = ops
        self._weights = weights
        self._sampler = sampler
        mixers = [mixer for layer in weights.layers for mixer in layer.mixers]
        attending = [mixer for mixer in mixers if mixer.kv_layer is not None]
        self._windows = tuple(dict.fromkeys(mixer.kv_window for mixer in attending))
        self._one_tile = one_tile
        self._make_graph = make_graph
        self._graphs: WeakKeyDictionary[KVPool, _PoolGraphs] = WeakKeyDictionary()
        self._adapters = StepAdapters(ops, weights.embedding.device)
        self._has_logged = False  # whether a pass that fits no graph was logged

    def __call__(
        self,
        token_ids: Tensor,
        plans: Sequence[ForwardPlan],
        wanted: Wanted,
        adapted: Sequence[AdaptedRows] = (),
    ) -> LayersOutput:
        """Compute the plan's token ids ``[T]`` and write their KV to the pool."""
        (plan,) = plans  # all layers have heads of one shape
        assert isinstance(plan, TritonPlan)
        num_rows = len(token_ids)
        bucket = next((bucket for bucket in BUCKETS if bucket >= num_rows), None)
        adapters = self._adapters.of_pass(adapted)
        if bucket is not None:
            shape = _Shape.of(bucket, wanted, has_wide=plan.has_wide)
            captured = self._captured(plan.geometry, shape)
            if captured is not None and adapters is not None:
                captured = self._adapted(plan.geometry, shape, captured, len(adapted))
            if captured is not None:
                output = captured.run(plan, wanted, adapters)
                if output is not None:
                    return output
                self._warn_no_graph(plan)
        wanted.notify_started()
        shared = self._graphs.get(plan.geometry.pool)
        partial_sums = None if shared is None else shared.partial_sums
        device = plan.on_device(self._windows, bucket or num_rows, partial_sums)
        given = wanted.inputs
        if given is not None:  # the device plan may have more rows, which are empty
            given = F.pad(given, (0, 0, 0, len(device.token_ids) - len(given)))
        ops = self._adapters.ops_of_pass(adapters, device)
        found = GraphOutputs.of(self._layers(device, wanted.taps, given=given, ops=ops))
        logit_rows = device.logit_rows[: len(plan.batch.logit_rows)]
        return found.of_pass(num_rows, logit_rows, has_chosen=False)

    def row_passes(self, pool: KVPool, parts: Sequence[tuple[HeadLayout, Sequence[Rope]]]) -> None:
        """Return None: the host waits only once for several passes on the device."""

    def chained_passes(
        self, pool: KVPool, parts: Sequence[tuple[HeadLayout, Sequence[Rope]]]
    ) -> TritonChainedPasses | None:
        """Return chained passes over a pool; None if its pages or its states do not allow them."""
        if len(parts) != 1 or pool.states is not None or rows_library() is None:
            return None
        ((heads, ropes),) = parts
        geometry = Geometry(pool, heads, tuple(ropes), self._one_tile)

        def find(num_rows: int, num_best: int) -> _Captured | None:
            bucket = next((bucket for bucket in BUCKETS if bucket >= num_rows), MAX_ROWS + 1)
            shape = _Shape(bucket, False, (), num_best=num_best)
            captured = self._captured(geometry, shape) if bucket <= MAX_ROWS else None
            return None if captured is None or captured.head is None else captured

        return TritonChainedPasses(find, pool.page_size, len(self._weights.embedding))

    def warm_up(
        self,
        pool: KVPool,
        heads: HeadLayout,
        ropes: tuple[Rope, ...],
        wanted: Wanted = NOTHING_MORE,
    ) -> None:
        """Capture every graph over a pool, the largest first, whose memory the others reuse."""
        warm_up_device_tokens(len(self._weights.embedding), pool.data.device)
        geometry = Geometry(pool, heads, ropes, self._one_tile)
        known = self._graphs.get(pool)
        if known is not None and known.num_positions < _num_positions(geometry):
            del self._graphs[pool]  # the graphs read RoPE tables that have become too short
        for bucket in reversed(BUCKETS):
            for has_wide in (True, False) if bucket > NARROW_LEN else (False,):
                self._captured(geometry, _Shape.of(bucket, wanted, has_wide=has_wide))

    def _warn_no_graph(self, plan: TritonPlan) -> None:
        """Log once that a pass fits no graph; such passes take longer."""
        if not self._has_logged:
            self._has_logged = True
            batch = plan.batch
            logger.warning(
                "no CUDA graph fits %d rows, %d pages, %d positions: kernels are launched one "
                "by one", batch.num_rows, len(batch.pages), plan.last_stop,
            )  # fmt: skip

    def _captured(self, geometry: Geometry, shape: _Shape) -> _Captured | None:
        """Return the graph of a shape, captured at its first use, or None if that fails."""
        shared = self._graphs.get(geometry.pool)
        if shared is not None and shape in shared.captured:
            return shared.captured[shape]
        if self._make_graph is None:
            return None
        try:
            shared = shared or _PoolGraphs(geometry)
            captured = self._capture(self._make_graph, geometry, shared, shape)
        except Exception:
            logger.exception(
                "cannot capture a CUDA graph of %d rows: no CUDA graphs are captured any more",
                shape.bucket,
            )
            self._make_graph = None
            return None
        self._graphs[geometry.pool] = shared
        shared.captured[shape] = captured
        return captured

    def _adapted(
        self, geometry: Geometry, shape: _Shape, base: _Captured, num_adapters: int
    ) -> _Captured | None:
        """Return the graph for passes with ``num_adapters`` adapters, captured at its first use.

        ``base``: the graph without adapters. Returns None if capturing fails.
        """
        shared, room = self._graphs[geometry.pool], room_for(num_adapters, shape.bucket)
        if shared.growth != self._adapters.growth:  # the graphs have an outdated layout
            shared.adapted.clear()
            shared.growth = self._adapters.growth
        if (shape, room) not in shared.adapted and self._make_graph is not None:
            try:
                graph = self._make_graph()
                captured = self._record(
                    graph, geometry, shared, shape, base.head, base=base, num_adapters=room
                )
            except Exception:
                logger.warning(
                    "cannot capture a CUDA graph of %d rows with adapters",
                    shape.bucket,
                    exc_info=True,
                )
                captured = None
            shared.adapted[shape, room] = captured
        return shared.adapted.get((shape, room))

    def _capture(
        self, make_graph: MakeGraph, geometry: Geometry, shared: _PoolGraphs, shape: _Shape
    ) -> _Captured:
        """Capture a graph, with the output layer if the shape has it and memory suffices."""
        if shape.num_best:
            try:
                head = FusedLmHead(
                    self._ops, self._weights, self._sampler, shape.num_best, shape.draft_vocab
                )
                return self._record(make_graph(), geometry, shared, shape, head)
            except Exception:
                logger.warning(
                    "cannot capture a CUDA graph of %d rows with sampling",
                    shape.bucket,
                    exc_info=True,
                )
        return self._record(make_graph(), geometry, shared, shape, None)

    def _record(
        self,
        graph: Graph,
        geometry: Geometry,
        shared: _PoolGraphs,
        shape: _Shape,
        head: FusedLmHead | None,
        *,
        base: _Captured | None = None,
        num_adapters: int = 0,
    ) -> _Captured:
        """Capture a graph, with the inputs of ``base`` if there is one."""
        pool, windows, (bucket, has_wide, taps, is_given, *_) = geometry.pool, self._windows, shape
        if base is not None:
            graph_inputs = base.graph_inputs
        else:
            num_words = shared.num_words(bucket, pool.page_size, len(windows))
            # A segment has at least one row, and keeps at most one state per row.
            states = geometry.state_fields(bucket, bucket, bucket)
            room = fields(bucket, len(windows), num_words, bucket if head else 0, states)
            graph_inputs = GraphInputs(room, pool.data.device, num_hosts=NUM_BUFFERS)
        graph_inputs.upload(fill_idle(graph_inputs.open()))
        kinds = dict.fromkeys(windows, (Kinds(narrow=True, wide=has_wide, partial_sums=True),))
        plan = device_plan(geometry, graph_inputs, kinds, shared.partial_sums, shared.cos_sin)
        embedding = self._weights.embedding
        assert isinstance(embedding, Tensor), "the Triton backend does not pack embeddings"
        tapped = shared.tapped(taps, bucket, embedding)
        given = shared.given(bucket, embedding) if is_given else None
        ops = self._adapters.ops(graph_inputs, num_adapters) if num_adapters else self._ops

        def work() -> GraphOutputs:
            found = self._layers(plan, taps, tapped, given, ops=ops)
            return GraphOutputs.of(found) if head is None else head.compute(found, graph_inputs)

        outcome = graph.capture(work)
        positions, partials = shared.num_positions, shared.partial_sums.num_partials
        tile_rows = geometry.narrow_tile // geometry.heads.group_size
        return _Captured(
            graph, graph_inputs, head, outcome, positions, partials, windows, tile_rows, given
        )

    def _layers(
        self,
        plan: DevicePlan,
        taps: Taps,
        tapped: Tensor | None = None,
        given: Tensor | None = None,
        *,
        ops: Ops,
    ) -> LayersOutput:
        return run_layers(
            ops, self._weights, plan.token_ids, (plan,), taps, tapped=tapped, given=given
        )
