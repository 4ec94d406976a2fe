"""NativeStep: all layers of a decoder in one call, during which the GIL is free."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..base import ForwardPlan, LayersOutput, Rope
from ..batch import NOTHING_MORE, Wanted
from ..kv_pool import KVPool
from ..lora import AdaptedRows, LoraWeights
from ..weights import (
    SILU,
    AttentionWeights,
    ConvWeights,
    DecoderWeights,
    ExpertsBeside,
    ExpertWeights,
    Gemma4Extras,
    HeadLayout,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    Norm,
    PackedLinear,
    RecurrentWeights,
    Table,
    TokenInputs,
    TokenInputWeights,
)
from .library import NativeLibrary
from .row_passes import NativeRowPasses
from .structs.declared import (
    ActivationStruct,
    NormStruct,
    RuleStruct,
    TurnStruct,
    activation_struct,
    norm_struct,
    rule_struct,
    turn_struct,
)
from .structs.experts import ExpertStructs
from .structs.gemma4 import BesideStruct, ExtrasStruct, TokenInputsStruct, TokenInputStruct
from .structs.latent import LatentStruct, latent_struct
from .structs.linear import LinearStruct, NativeLinear
from .structs.lora import AdaptedStructs, Addresses, updates_of
from .structs.plan import NativePlan, PartStruct
from .structs.state import ConvStruct, ConvStructs, RecurrentStruct, RecurrentStructs

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_LINEAR, _NORM = ctypes.POINTER(LinearStruct), ctypes.POINTER(NormStruct)


class LayerStruct(ctypes.Structure):
    """``ft_layer`` of step.c."""

    _fields_ = (
        ("first", _LINEAR),
        ("second", _LINEAR),
        ("gate_up", _LINEAR),
        ("down", _LINEAR),
        ("mixer_norm", _NORM),
        ("mixer_out_norm", _NORM),
        ("mlp_norm", _NORM),
        ("mlp_out_norm", _NORM),
        ("turn", TurnStruct),
        ("rule", RuleStruct),
        ("activation", ActivationStruct),
        ("is_parallel", _I64),
        ("experts", _PTR),
        ("part", _I64),
        ("kv_layer", _I64),
        ("extras", ctypes.POINTER(ExtrasStruct)),
        ("recurrent", ctypes.POINTER(RecurrentStruct)),
        ("conv", ctypes.POINTER(ConvStruct)),
        ("beside", ctypes.POINTER(RecurrentStruct)),
        ("latent", ctypes.POINTER(LatentStruct)),
    )


class DecoderStruct(ctypes.Structure):
    """``ft_decoder`` of step.c."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        ("num_layers", _I64),
        ("embedding", _PTR),
        ("packed_embedding", _LINEAR),
        ("embedding_factor", ctypes.c_float),
        ("final_norm", _NORM),
        ("hidden", _I64),
        ("width", _I64),
        ("mixed", _I64),
        ("gates", _I64),
        ("read", _I64),
        ("token_inputs", TokenInputsStruct),
        ("head", _LINEAR),
    )


class NativeStep:
    """The layers of one decoder; lends the C side its weights, which must stay as they are."""

    def __init__(self, library: NativeLibrary, weights: DecoderWeights) -> None:
        self._library = library
        self._weights = weights  # alive as long as the structs point into them
        self._structs: list[NormStruct | ExtrasStruct | LatentStruct] = []  # likewise
        self._experts: list[ExpertStructs] = []
        self._with_states: list[RecurrentStructs | ConvStructs] = []
        # Of each layer the four linears that adapters may change.
        self._places: list[PackedLinear | None] = []
        self._updates: WeakKeyDictionary[LoraWeights, Addresses] = WeakKeyDictionary()
        layers = (LayerStruct * len(weights.layers))(*map(self._layer, weights.layers))
        mlps = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MlpWeights)]
        width = max((_native(mlp.down).in_features for mlp in mlps), default=0)
        self._struct = DecoderStruct(
            layers,
            len(weights.layers),
            *_table(weights.embedding),
            self._lent(weights.final_norm),
            weights.embedding.shape[1],
            width,
            *_mixed_widths(weights),
            self._token_inputs(weights.token_inputs),
            _pointer(weights.lm_head),
        )
        self._vocab_size = _native(weights.lm_head).out_features

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        norms = (layer.mixer_norm, layer.mixer_out_norm, layer.mlp_norm, layer.mlp_out_norm)
        gate_up = down = experts = None
        activation = SILU
        if isinstance(layer.mlp, ExpertWeights):
            experts = self._mixture(layer.mlp)
        elif layer.mlp is not None:
            gate_up, down = layer.mlp.linears
            activation = layer.mlp.activation
        mixer = layer.mixer
        attention = mixer if isinstance(mixer, AttentionWeights) else None
        latent = mixer if isinstance(mixer, LatentWeights) else None
        mixing = (None, None) if mixer is None else mixer.linears
        if latent is not None:
            mixing = (latent.down, latent.o)
        linears = (*mixing, gate_up, down)
        self._places += linears
        placed = attention or latent
        return LayerStruct(
            *(None if each is None else _pointer(each) for each in linears),
            *map(self._lent, norms),
            TurnStruct() if placed is None else _turn(placed),
            RuleStruct() if attention is None else _rule(attention),
            activation_struct(activation),
            layer.is_parallel,
            experts,
            *((0, 0) if placed is None else placed.place),
            self._extras(layer.extras),
            self._recurrent(mixer) if isinstance(mixer, RecurrentWeights) else None,
            self._conv(mixer) if isinstance(mixer, ConvWeights) else None,
            None if layer.beside is None else self._recurrent(layer.beside),
            None if latent is None else self._latent(latent),
        )

    def _latent(self, weights: LatentWeights) -> object:
        self._structs.append(latent_struct(weights))
        return ctypes.pointer(self._structs[-1])

    def _recurrent(self, weights: RecurrentWeights) -> object:
        structs = RecurrentStructs(weights)
        self._with_states.append(structs)
        linears = (weights.in_proj, weights.gates, weights.out)
        return ctypes.pointer(structs.recurrent(*(_native(each).struct for each in linears)))

    def _conv(self, weights: ConvWeights) -> object:
        structs = ConvStructs(weights)
        self._with_states.append(structs)
        return ctypes.pointer(structs.struct)

    def _mixture(self, weights: ExpertWeights) -> int:
        self._experts.append(ExpertStructs(weights))
        return self._experts[-1].address

    def _extras(self, extras: Gemma4Extras | None) -> object:
        if extras is None:
            return None
        struct = ExtrasStruct(
            self._lent(extras.out_norm),
            extras.factor,
            self._beside(extras.beside),
            self._token_input(extras.token_input),
        )
        self._structs.append(struct)
        return ctypes.pointer(struct)

    def _beside(self, beside: ExpertsBeside | None) -> BesideStruct:
        if beside is None:
            return BesideStruct()
        norms = (beside.norm, beside.router_norm, beside.out_norm, beside.mlp_out_norm)
        return BesideStruct(self._mixture(beside.experts), *map(self._lent, norms))

    def _token_input(self, weights: TokenInputWeights | None) -> TokenInputStruct:
        if weights is None:
            return TokenInputStruct()
        return TokenInputStruct(
            _pointer(weights.gate),
            _pointer(weights.out),
            self._lent(weights.out_norm),
            activation_struct(weights.activation),
        )

    def _token_inputs(self, weights: TokenInputs | None) -> TokenInputsStruct:
        if weights is None:
            return TokenInputsStruct()
        return TokenInputsStruct(
            weights.table.data_ptr(),
            _pointer(weights.projection),
            self._lent(weights.norm),
            len(weights.norm.weight),
            weights.factor,
        )

    def _lent(self, norm: Norm | None) -> object:
        if norm is None:
            return None
        self._structs.append(norm_struct(norm))
        return ctypes.pointer(self._structs[-1])

    def __call__(
        self,
        token_ids: Tensor,
        plans: Sequence[ForwardPlan],
        wanted: Wanted,
        adapted: Sequence[AdaptedRows] = (),
    ) -> LayersOutput:
        """Compute token ids ``[T]``; writes KV to the pool. Raises MemoryError.

        Logits with a cap are left to the operations: its tanh here has other bits than theirs.
        """
        native = [plan for plan in plans if isinstance(plan, NativePlan)]
        assert len(native) == len(plans)
        assert native[0].states is not None or not self._with_states  # else C reads nothing
        plan, parts = native[0], (PartStruct * len(native))(*(plan.part for plan in native))
        token_ids = token_ids.contiguous()
        out = torch.empty((plan.num_rows, self._struct.hidden), dtype=plan.dtype)
        num_taps, at, tapped = len(wanted.taps), None, None
        if num_taps:
            at = (_I64 * num_taps)(*wanted.taps)
            tapped = torch.empty((plan.num_rows, num_taps * self._struct.hidden), dtype=plan.dtype)
        given = None if wanted.inputs is None else wanted.inputs.contiguous()
        behind = None if wanted.behind is None else wanted.behind.contiguous()
        changes = AdaptedStructs(adapted, self._updates_of) if adapted else None
        logits = None
        if self._weights.logit_cap is None and not wanted.hidden_alone:
            logits = torch.empty((plan.num_logits, self._vocab_size), dtype=torch.float32)
        wanted.tell_started()
        failed = self._library.c.ft_forward(
            ctypes.byref(self._struct), token_ids.data_ptr(), _address(given),
            0 if behind is None else len(behind), _address(behind), parts, len(parts),
            None if changes is None else changes.structs, len(adapted),
            out.data_ptr(), num_taps, at, _address(tapped), _address(plan.logit_rows),
            0 if logits is None else plan.num_logits, _address(logits),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the activations of a step")
        return LayersOutput(out, logits=logits, taps=tapped)

    def _updates_of(self, weights: LoraWeights) -> Addresses:
        """An adapter's updates of all places, made when it is first used."""
        if weights not in self._updates:
            self._updates[weights] = updates_of(weights, self._places)
        return self._updates[weights]

    def row_passes(
        self, pool: KVPool, parts: Sequence[tuple[HeadLayout, Sequence[Rope]]]
    ) -> NativeRowPasses | None:
        """Passes over a pool, with heads and tables of each of its parts.

        None of a decoder with recurrent layers: rows have no states there.
        """
        if self._with_states:
            return None
        cap = self._weights.logit_cap or 0.0
        return NativeRowPasses(self._library, self._struct, self._vocab_size, pool, parts, cap=cap)

    def warm_up(
        self,
        pool: KVPool,
        heads: HeadLayout,
        ropes: tuple[Rope, ...],
        wanted: Wanted = NOTHING_MORE,
    ) -> None:
        """Do nothing: the first call is as fast as any."""


def _turn(mixer: AttentionWeights | LatentWeights) -> TurnStruct:
    """The turning of rows; it writes if QKV has keys and values of its own beside the queries."""
    if isinstance(mixer, LatentWeights):
        return turn_struct(None, mixer.tables, writes=True)
    writes = _native(mixer.qkv).out_features > _native(mixer.o).in_features
    return turn_struct(mixer.head_norm, mixer.tables, writes=writes, gate=mixer.gate)


def _rule(mixer: AttentionWeights) -> RuleStruct:
    return rule_struct(mixer.window, mixer.cap, mixer.sinks, is_mutual=mixer.is_mutual)


def _mixed_widths(weights: DecoderWeights) -> tuple[int, int, int]:
    """The widest rows that layers with states, and gated ones, make, as step.c needs memory."""
    mixers = [mixer for layer in weights.layers for mixer in layer.mixers]
    recurrent = [mixer for mixer in mixers if isinstance(mixer, RecurrentWeights)]
    with_states = [*recurrent, *(mixer for mixer in mixers if isinstance(mixer, ConvWeights))]
    gated = [
        _native(mixer.qkv).out_features
        for mixer in mixers
        if isinstance(mixer, AttentionWeights) and mixer.gate
    ]
    mixed = max((*gated, *(_native(each.in_proj).out_features for each in with_states)), default=0)
    gates = max((_native(each.gates).out_features for each in recurrent), default=0)
    return mixed, gates, max((_native(each.out).in_features for each in with_states), default=0)


def _table(table: Table) -> tuple[object, ...]:
    """The embedding's tensor, or its packed weight and factor."""
    if isinstance(table, Tensor):
        return table.data_ptr(), None, 1.0
    return None, _pointer(table.weight), table.factor


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointer(weight: PackedLinear) -> ctypes._Pointer[LinearStruct]:
    return ctypes.pointer(_native(weight).struct)


def _native(weight: PackedLinear) -> NativeLinear:
    assert isinstance(weight, NativeLinear)
    return weight
