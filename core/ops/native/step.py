"""NativeStep: all layers of a decoder in one call without the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..base import ForwardPlan, LayersOutput, Rope
from ..batch import NOTHING_MORE, Wanted
from ..kv_pool import KVPool
from ..lora import AdaptedRows, LoraWeights
from ..mixers.mixer import MixerWeights
from ..weights import (
    DecoderWeights,
    ExpertWeights,
    Gemma4Extras,
    HeadLayout,
    LayerWeights,
    MlpWeights,
    PackedLinear,
    Table,
    TokenInputs,
)
from .declarations import STRUCTS
from .library import NativeLibrary
from .row_passes import NativeRowPasses
from .structs.declared import activation_struct, norm_pointer
from .structs.experts import experts_struct
from .structs.linear import linear_pointer, native
from .structs.lora import AdaptedStructs, Updates, updates_of
from .structs.mixers import NativeMixer, native_mixer
from .structs.plan import NativePlan

_I64 = ctypes.c_int64


class NativeStep:
    """The layers of one decoder as structs that point into its weights, which must not change."""

    def __init__(self, library: NativeLibrary, weights: DecoderWeights) -> None:
        self._library = library
        self._weights = weights  # kept alive while the structs point into it
        self._mixers: list[NativeMixer] = []  # kept alive, too: the structs point into them
        # Linears that adapters may change, four per layer; None: the layer does not have it.
        self._adaptable: list[PackedLinear | None] = []
        self._updates: WeakKeyDictionary[LoraWeights, Updates] = WeakKeyDictionary()
        layers = (STRUCTS.ft_layer * len(weights.layers))(*map(self._layer, weights.layers))
        mlps = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MlpWeights)]
        self._struct = STRUCTS.ft_decoder(
            layers=layers,
            num_layers=len(weights.layers),
            final_norm=norm_pointer(weights.final_norm),
            norms_stream=weights.layers[0].norms_stream,
            hidden=weights.embedding.shape[1],
            width=max((native(mlp.down).in_features for mlp in mlps), default=0),
            token_inputs=_token_inputs(weights.token_inputs),
            head=linear_pointer(weights.lm_head),
            mixed=max((mixer.mixed for mixer in self._mixers), default=0),
            gates=max((mixer.gates for mixer in self._mixers), default=0),
            read=max((mixer.read for mixer in self._mixers), default=0),
            **_table(weights.embedding),
        )
        self._has_states = any(mixer.owner is not None for mixer in self._mixers)
        self._vocab_size = native(weights.lm_head).out_features

    def _layer(self, layer: LayerWeights) -> Structure:
        struct = STRUCTS.ft_layer(
            mixer_norm=norm_pointer(layer.mixer_norm),
            mixer_out_norm=norm_pointer(layer.mixer_out_norm),
            mlp_norm=norm_pointer(layer.mlp_norm),
            mlp_out_norm=norm_pointer(layer.mlp_out_norm),
            is_parallel=layer.is_parallel,
            extras=_extras(layer.extras),
            mixer_factor=layer.factors[0],
            mlp_factor=layer.factors[1],
        )
        first = second = gate_up = down = None
        if layer.mixer is not None:
            struct.mixer = self._mixer(layer.mixer)
            first, second = layer.mixer.linears[0], layer.mixer.linears[-1]
        if layer.second_mixer is not None:
            struct.second_mixer = self._mixer(layer.second_mixer)
        if isinstance(layer.mlp, ExpertWeights):
            struct.experts = ctypes.pointer(experts_struct(layer.mlp))
        elif layer.mlp is not None:
            gate_up, down = layer.mlp.linears
            struct.gate_up, struct.down = linear_pointer(gate_up), linear_pointer(down)
            struct.activation = activation_struct(layer.mlp.activation)
        self._adaptable += (first, second, gate_up, down)
        return struct

    def _mixer(self, weights: MixerWeights) -> Structure:
        mixer = native_mixer(weights)
        self._mixers.append(mixer)
        return mixer.struct

    def __call__(
        self,
        token_ids: Tensor,
        plans: Sequence[ForwardPlan],
        wanted: Wanted,
        adapted: Sequence[AdaptedRows] = (),
    ) -> LayersOutput:
        """Compute token ids ``[T]`` and write their KV to the pool. Raises MemoryError.

        Logits with a cap are not computed: the tanh of `Ops.logits` rounds differently.
        """
        native_plans = [plan for plan in plans if isinstance(plan, NativePlan)]
        assert len(native_plans) == len(plans)
        # The kernels of recurrent layers read the pass's states.
        assert native_plans[0].states is not None or not self._has_states
        plan = native_plans[0]
        parts = (STRUCTS.ft_part * len(plans))(*(each.part for each in native_plans))
        token_ids = token_ids.contiguous()
        out = torch.empty((plan.num_rows, self._struct.hidden), dtype=plan.dtype)
        num_taps, at, tapped = len(wanted.taps), None, None
        if num_taps:
            at = (_I64 * num_taps)(*wanted.taps)
            tapped = torch.empty((plan.num_rows, num_taps * self._struct.hidden), dtype=plan.dtype)
        given = None if wanted.inputs is None else wanted.inputs.contiguous()
        vectors = None if wanted.layer_vectors is None else wanted.layer_vectors.contiguous()
        changes = AdaptedStructs(adapted, self._updates_of) if adapted else None
        logits = None
        if self._weights.logit_cap is None and not wanted.hidden_alone:
            logits = torch.empty((plan.num_logits, self._vocab_size), dtype=torch.float32)
        wanted.notify_started()
        failed = self._library.c.ft_forward(
            ctypes.byref(self._struct), token_ids.data_ptr(), _address(given),
            0 if vectors is None else len(vectors), _address(vectors), parts, len(parts),
            None if changes is None else changes.structs, len(adapted),
            out.data_ptr(), num_taps, at, _address(tapped), _address(plan.logit_rows),
            0 if logits is None else plan.num_logits, _address(logits),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the activations of a step")
        return LayersOutput(out, logits=logits, taps=tapped)

    def _updates_of(self, weights: LoraWeights) -> Updates:
        """Return an adapter's updates of all adaptable linears, made at its first use."""
        if weights not in self._updates:
            self._updates[weights] = updates_of(weights, self._adaptable)
        return self._updates[weights]

    def row_passes(
        self, pool: KVPool, parts: Sequence[tuple[HeadLayout, Sequence[Rope]]]
    ) -> NativeRowPasses | None:
        """Return passes over a pool, with heads and RoPE tables of each of its parts.

        Returns None for a decoder with recurrent layers: these passes have no recurrent states.
        """
        if self._has_states:
            return None
        cap = self._weights.logit_cap or 0.0
        return NativeRowPasses(self._library, self._struct, self._vocab_size, pool, parts, cap=cap)

    def chained_passes(
        self,
        pool: KVPool,
        parts: Sequence[tuple[HeadLayout, Sequence[Rope]]],
    ) -> None:
        """Return None: a pass has ended when it returns, so no tokens are on a device."""

    def warm_up(
        self,
        pool: KVPool,
        heads: HeadLayout,
        ropes: tuple[Rope, ...],
        wanted: Wanted = NOTHING_MORE,
    ) -> None:
        """Do nothing: the first call is as fast as later ones."""


def _table(table: Table) -> dict[str, object]:
    """Return the embedding, or its packed weight and factor, as fields of ``ft_decoder``."""
    if isinstance(table, Tensor):
        return {"embedding": table.data_ptr()}
    return {
        "packed_embedding": linear_pointer(table.weight),
        "embedding_factor": table.factor,
    }


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _extras(extras: Gemma4Extras | None) -> ctypes._Pointer[Structure] | None:
    if extras is None:
        return None
    struct = STRUCTS.ft_extras(out_norm=norm_pointer(extras.out_norm))
    if (parallel := extras.experts) is not None:
        struct.experts = STRUCTS.ft_parallel_experts(
            experts=ctypes.pointer(experts_struct(parallel.experts)),
            norm=norm_pointer(parallel.norm),
            router_norm=norm_pointer(parallel.router_norm),
            out_norm=norm_pointer(parallel.out_norm),
            mlp_out_norm=norm_pointer(parallel.mlp_out_norm),
        )
    if (inputs := extras.token_input) is not None:
        struct.token_input = STRUCTS.ft_token_input(
            gate=linear_pointer(inputs.gate),
            out=linear_pointer(inputs.out),
            out_norm=norm_pointer(inputs.out_norm),
            activation=activation_struct(inputs.activation),
        )
    return ctypes.pointer(struct)


def _token_inputs(inputs: TokenInputs | None) -> Structure:
    if inputs is None:
        return STRUCTS.ft_token_inputs()
    return STRUCTS.ft_token_inputs(
        table=inputs.table.data_ptr(),
        projection=linear_pointer(inputs.projection),
        norm=norm_pointer(inputs.norm),
        width=len(inputs.norm.weight),
        factor=inputs.factor,
    )
