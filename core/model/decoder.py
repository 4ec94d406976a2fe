"""Decoder: the protocol of models over ragged batches; OwnDecoder: this engine's own decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from ..interface.kv_codec import KvDtype
from ..ops.adapted import adapted_ops
from ..ops.base import ChainedPasses, ForwardPlan, LayersOutput, Ops, RowPasses
from ..ops.batch import (
    NOTHING_MORE,
    DeviceTokens,
    ForwardOutput,
    RaggedBatch,
    Segment,
    Taps,
    Wanted,
    build_batch,
)
from ..ops.kv_pool import KVPool, KvShape, bytes_per_mixed_page, make_pool
from ..ops.layers import run_layers
from ..ops.lora import adapted_rows
from ..ops.machine.host_memory import MapBytes, map_zeros
from ..ops.rows.row_table import RowTable
from ..ops.rows.step_inputs import lay_out, rows_library
from ..ops.state_pool import LayerStates, StatePool
from ..ops.weights import DecoderWeights, HeadLayout, PackedLinear
from ..sampling.sampler import Sampler
from .description.config import DecoderConfig
from .description.page_layout import PageLayout
from .description.rope import RopeTable
from .description.tensors import LinearSpec

ModelPath: TypeAlias = Literal["own", "transformers"]


class Decoder(Protocol):
    """A model that computes logits from token ids and KV pages: a target or a draft model.

    ``path``: "own" if the backend's operations compute the layers, or "transformers" if
    transformers' modules do. ``exact``: whether a row's bits are the same in any batch. ``dtype``:
    dtype of activations. ``states``: shapes of the layers with a recurrent state, whose pools need
    a `StatePool`.
    """

    path: ModelPath
    config: DecoderConfig
    ops: Ops
    sampler: Sampler
    dtype: torch.dtype
    device: torch.device
    exact: bool
    states: tuple[LayerStates, ...]

    @property
    def identity(self) -> Mapping[str, str]:
        """Versions and variants of the operations, by name.

        The results of two decoders with different identities may differ in bits. The identity does
        not include config and weights.
        """

    def make_pool(
        self,
        num_pages: int,
        *,
        page_size: int,
        kv_dtype: KvDtype = "auto",
        states: StatePool | None = None,
    ) -> KVPool:
        """Return a KV pool of this decoder's shape and device, in its dtype by default.

        ``states``: a pool from `make_state_pool`, if the decoder has states.
        """

    def make_state_pool(self, num_slots: int, num_logs: int, *, page_size: int) -> StatePool:
        """Return a pool of recurrent states. Raises ValueError for an unsupported page size."""

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype = "auto") -> int:
        """Return the bytes of one page of a `make_pool` pool, over all layers."""

    def batch(
        self,
        segments: Sequence[Segment],
        *,
        page_size: int,
        device_tokens: DeviceTokens | None = None,
    ) -> RaggedBatch:
        """Lay out segments for this decoder's backend. Raises ValueError as `build_batch` does."""

    def row_batch(
        self, rows: RowTable, *, device_tokens: DeviceTokens | None = None
    ) -> RaggedBatch:
        """Lay out the requests of a step for this decoder's backend; this needs `rows_library`.

        Raises ValueError for rows without a page.
        """

    def warm_up(self, pool: KVPool, max_len: int, wanted: Wanted = NOTHING_MORE) -> None:
        """Prepare for passes over a pool, of up to ``max_len`` positions; the pool is not written.

        ``wanted``: the outputs that these passes will request. Of its input vectors and draws only
        the presence matters, not the values.
        """

    def forward(
        self, batch: RaggedBatch, pool: KVPool, wanted: Wanted = NOTHING_MORE
    ) -> ForwardOutput:
        """Compute every row's KV into the pool, and return the outputs in ``wanted``.

        The output is valid until the next pass. Raises ValueError for taps that do not exist, and
        for inputs of another shape than the batch.
        """

    def row_passes(self, pool: KVPool) -> RowPasses | None:
        """Return an object that computes draft passes over a pool; None if the backend has none."""

    def chained_passes(self, pool: KVPool) -> ChainedPasses | None:
        """Return an object that launches several passes at once; None if the backend has none."""


class PagedDecoder(Decoder):
    """The pools and batches of a `Decoder`, by the KV ``shapes`` of its layers."""

    shapes: Sequence[KvShape]
    states: tuple[LayerStates, ...] = ()

    @property
    def identity(self) -> dict[str, str]:
        """Path and operations of the decoder."""
        return {"path": self.path, "ops": type(self.ops).__name__, **self.ops.identity}

    def make_pool(
        self,
        num_pages: int,
        *,
        page_size: int,
        kv_dtype: KvDtype = "auto",
        states: StatePool | None = None,
    ) -> KVPool:
        """Return a KV pool of the layers' shapes, in the weights' dtype unless another is given."""
        return self.pool_over(
            map_zeros, num_pages, page_size=page_size, kv_dtype=kv_dtype, states=states
        )

    def pool_over(
        self,
        map_bytes: MapBytes,
        num_pages: int,
        *,
        page_size: int,
        kv_dtype: KvDtype,
        states: StatePool | None = None,
    ) -> KVPool:
        """Return a pool as `make_pool` does; ``map_bytes`` allocates its memory on the host."""
        return make_pool(
            num_pages,
            self.shapes,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=kv_dtype,
            states=states,
            map_bytes=map_bytes,
        )

    def make_state_pool(self, num_slots: int, num_logs: int, *, page_size: int) -> StatePool:
        """Return a pool of the layers' states; inputs of convolutions have the weights' dtype."""
        return StatePool(
            num_slots,
            num_logs,
            self.states,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )

    @override
    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype = "auto") -> int:
        return bytes_per_mixed_page(
            self.shapes, page_size=page_size, dtype=self.dtype, kv_dtype=kv_dtype
        )

    @override
    def batch(
        self,
        segments: Sequence[Segment],
        *,
        page_size: int,
        device_tokens: DeviceTokens | None = None,
    ) -> RaggedBatch:
        return build_batch(
            segments,
            page_size=page_size,
            device=self.ops.batch_device or self.device,
            min_rows=self.ops.min_rows,
            device_tokens=device_tokens,
        )

    @override
    def row_batch(
        self, rows: RowTable, *, device_tokens: DeviceTokens | None = None
    ) -> RaggedBatch:
        library = rows_library()
        assert library is not None, "the caller asks"
        return lay_out(
            rows,
            library,
            device=self.ops.batch_device or self.device,
            min_rows=self.ops.min_rows,
            device_tokens=device_tokens,
        )

    def row_passes(self, pool: KVPool) -> RowPasses | None:  # noqa: ARG002
        """Return None: this decoder has no special draft passes."""
        return None

    def chained_passes(self, pool: KVPool) -> ChainedPasses | None:  # noqa: ARG002
        """Return None: this decoder's passes are launched one by one."""
        return None


class OwnDecoder(PagedDecoder):
    """A `Decoder` with packed weights, which the backend's operations compute layer by layer."""

    path: ModelPath = "own"

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        ops: Ops,
        layout: PageLayout | None = None,
        *,
        linear_specs: Mapping[PackedLinear, LinearSpec] | None = None,
        compiles: bool = True,
    ) -> None:
        """Wrap packed ``weights``.

        ``layout``: page layout, if the pages are another model's. ``linear_specs``: declarations of
        the packed linears. ``compiles``: whether the backend may compute all layers in one call.
        """
        self.config = config
        self.linear_specs = linear_specs or {}
        self.weights = weights
        self.ops = ops
        self.sampler = ops.sampler
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.layout = layout or PageLayout.of(config)
        self.shapes = self.layout.shapes
        self.states = config.states
        self.exact = getattr(ops, "exact", "spec") != "off"
        self._compiled = ops.compile_forward(weights) if compiles else None
        self.ropes = tuple(
            tuple(RopeTable(spec, part.heads.rope_dim, self.device) for spec in part.ropes)
            for part in self.layout.parts
        )

    @torch.inference_mode()
    def warm_up(self, pool: KVPool, max_len: int, wanted: Wanted = NOTHING_MORE) -> None:
        """Compute the RoPE tables. On a GPU also capture the graphs.

        Capturing takes seconds, and memory in addition to the pool.
        """
        for rope in (rope for ropes in self.ropes for rope in ropes):
            rope.table(max_len)
        if self._compiled is not None and len(pool.parts) == 1:
            heads, ropes = self.layout.parts[0].heads, self.ropes[0]
            self._compiled.warm_up(pool, heads, ropes, wanted)

    @torch.inference_mode()
    @override
    def forward(
        self, batch: RaggedBatch, pool: KVPool, wanted: Wanted = NOTHING_MORE
    ) -> ForwardOutput:
        check_taps(wanted.taps, self.config.num_layers)
        check_inputs(wanted.inputs, (batch.num_rows, self.config.hidden_size))
        check_layer_vectors(wanted, self.config.num_layers, self.device)
        plans = self.plans(batch, pool)
        adapted = adapted_rows(batch) if batch.adapters else ()
        if self._compiled is None:
            wanted.notify_started()
            ops = adapted_ops(self.ops, adapted, self.device)
            found = run_layers(
                ops,
                self.weights,
                batch.token_ids,
                plans,
                wanted.taps,
                given=wanted.inputs,
                layer_vectors=wanted.layer_vectors,
            )
        else:
            found = self._compiled(batch.token_ids, plans, wanted, adapted)
        logits = self._logits(batch, found) if found.logits is None else found.logits
        return ForwardOutput(found.hidden, logits, found.tokens, found.taps, found.best)

    def row_passes(self, pool: KVPool) -> RowPasses | None:
        """Return the backend's draft passes over a pool; None if it has none."""
        return None if self._compiled is None else self._compiled.row_passes(pool, self._heads())

    def chained_passes(self, pool: KVPool) -> ChainedPasses | None:
        """Return the backend's chained passes over a pool; None if it has none."""
        if self._compiled is None:
            return None
        return self._compiled.chained_passes(pool, self._heads())

    def _heads(self) -> list[tuple[HeadLayout, tuple[RopeTable, ...]]]:
        """Return head layout and RoPE tables of each part of the pages."""
        heads = [part.heads for part in self.layout.parts]
        return list(zip(heads, self.ropes, strict=True))

    def plans(self, batch: RaggedBatch, pool: KVPool) -> tuple[ForwardPlan, ...]:
        """Return the backend's plans of a pass, one for each part of the pool."""
        parts = zip(pool.parts, self.layout.parts, self.ropes, strict=True)
        return tuple(self.ops.plan(batch, part, own.heads, *ropes) for part, own, ropes in parts)

    def part_heads(self, part: int) -> HeadLayout:
        """Return the head layout of the layers of a pool part."""
        return self.layout.parts[part].heads

    def _logits(self, batch: RaggedBatch, found: LayersOutput) -> Tensor:
        """Return the logits of the batch's logit rows, [num_logits, vocab] float32."""
        hidden = found.hidden
        if batch.num_logits == 0:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        if batch.num_logits < len(hidden):
            rows = batch.logit_rows if found.logit_rows is None else found.logit_rows
            hidden = hidden.index_select(0, rows)
        weights = self.weights
        return self.ops.logits(hidden, weights.lm_head, weights.logit_cap)[: batch.num_logits]


def sequence_pool(
    decoder: Decoder, num_pages: int, num_sequences: int, *, page_size: int
) -> KVPool:
    """Return a KV pool, with states of ``num_sequences`` sequences if the decoder has states."""
    states = None
    if decoder.states:
        states = decoder.make_state_pool(num_sequences, num_sequences, page_size=page_size)
    return decoder.make_pool(num_pages, page_size=page_size, states=states)


def check_inputs(inputs: Tensor | None, shape: tuple[int, int]) -> None:
    """Raise ValueError for input vectors of another shape than the batch's rows."""
    if inputs is not None and inputs.shape != shape:
        raise ValueError(
            f"inputs have shape {list(inputs.shape)}, but the batch needs {list(shape)}"
        )


def check_layer_vectors(wanted: Wanted, num_layers: int, device: torch.device) -> None:
    """Raise ValueError if `Wanted.layer_vectors` have the wrong shape or are not on a CPU."""
    vectors = wanted.layer_vectors
    if vectors is None:
        return
    inputs = wanted.inputs
    if inputs is None or vectors.shape[1:] != inputs.shape or len(vectors) > num_layers:
        raise ValueError(
            f"layer vectors have shape {list(vectors.shape)}: each layer needs the inputs' shape"
        )
    if device.type != "cpu":
        raise ValueError("layer vectors are supported on the CPU only")


def check_taps(taps: Taps, num_layers: int) -> None:
    """Raise ValueError for layer boundaries that do not exist or repeat."""
    if taps and (len(set(taps)) < len(taps) or min(taps) < 0 or max(taps) > num_layers):
        raise ValueError(f"taps {taps} must be distinct layer boundaries from 0 to {num_layers}")
