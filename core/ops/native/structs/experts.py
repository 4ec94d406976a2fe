"""ExpertStructs: a mixture of experts as the structs of experts.h."""

from __future__ import annotations

import ctypes

from ....errors import ModelLoadError
from ...weights import SILU, ExpertWeights, MlpWeights, PackedLinear, Routing
from .declared import ActivationStruct, activation_struct
from .linear import LinearStruct, NativeLinear

MAX_EXPERTS = 1024  # as in experts.h
_I32, _I64, _PTR, _F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_LINEAR = ctypes.POINTER(LinearStruct)


class RoutingStruct(ctypes.Structure):
    """``ft_routing``."""

    _fields_ = (
        ("num_experts", _I64),
        ("top_k", _I64),
        ("num_groups", _I64),
        ("kept_groups", _I64),
        ("is_sigmoid", _I32),
        ("of_chosen", _I32),
        ("groups_by_two", _I32),
        ("renorms", _I32),
        ("least", _F32),
        ("factor", _F32),
    )


class MlpStruct(ctypes.Structure):
    """``ft_mlp``."""

    _fields_ = (("first", _LINEAR), ("second", _LINEAR), ("activation", ActivationStruct))


class MixtureStruct(ctypes.Structure):
    """``ft_experts``; lends the weights' memory."""

    _fields_ = (
        ("routing", RoutingStruct),
        ("router", _LINEAR),
        ("choice_bias", _PTR),
        ("factors", _PTR),
        ("first", ctypes.POINTER(_LINEAR)),
        ("second", ctypes.POINTER(_LINEAR)),
        ("activation", ActivationStruct),
        ("shared", MlpStruct),
        ("shared_gate", _LINEAR),
    )


class ExpertStructs:
    """Lends the C side a layer's experts; keeps alive what it points to.

    Raises `ModelLoadError` for more experts than the kernels have room for.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        assert isinstance(weights.router, NativeLinear)
        count = weights.router.out_features
        if count > MAX_EXPERTS:
            raise ModelLoadError(f"the native kernels support {MAX_EXPERTS} experts, not {count}")
        array = _LINEAR * count
        first, second = array(), array()  # NULL: of those that another rank has
        for number, mlp in enumerate(weights.experts, start=weights.first):
            first[number], second[number] = _lent(mlp.gate_up), _lent(mlp.down)
        vectors = (weights.choice_bias, weights.factors)
        self._struct = MixtureStruct(
            _routing(weights.routing, count),
            _lent(weights.router),
            *(None if each is None else each.data_ptr() for each in vectors),
            first,
            second,
            activation_struct(weights.experts[0].activation),
            _mlp(weights.shared),
            None if weights.shared_gate is None else _lent(weights.shared_gate),
        )
        self._lends = (weights, first, second)

    @property
    def pointer(self) -> object:
        """Pointer for an argument of a C function."""
        return ctypes.byref(self._struct)

    @property
    def address(self) -> int:
        """Address for a field of another struct."""
        return ctypes.addressof(self._struct)


def _routing(routing: Routing, num_experts: int) -> RoutingStruct:
    return RoutingStruct(
        num_experts,
        routing.top_k,
        routing.num_groups,
        routing.kept_groups,
        routing.score == "sigmoid",
        routing.of_chosen,
        routing.groups_by == "best two",
        routing.renorm is not None,
        routing.renorm or 0.0,
        routing.factor,
    )


def _mlp(mlp: MlpWeights | None) -> MlpStruct:
    if mlp is None:
        return MlpStruct(None, None, activation_struct(SILU))
    return MlpStruct(*map(_lent, mlp.linears), activation_struct(mlp.activation))


def _lent(weight: PackedLinear) -> ctypes._Pointer[LinearStruct]:
    assert isinstance(weight, NativeLinear)
    return ctypes.pointer(weight.struct)
