"""A mixture of experts as the structs of experts.h."""

from __future__ import annotations

from ctypes import POINTER, Structure, pointer

from ....errors import ModelLoadError
from ...weights import ExpertWeights, MlpWeights, Routing
from ..declarations import STRUCTS
from ..library import address
from .declared import activation_struct
from .linear import linear_pointer, native

MAX_EXPERTS = 1024  # must be equal to FT_MAX_EXPERTS of experts.h


def experts_struct(weights: ExpertWeights) -> Structure:
    """Return the ``ft_experts`` of a layer; it must not outlive the weights.

    Raises `ModelLoadError` for more than `MAX_EXPERTS` experts.
    """
    count = native(weights.router).out_features
    if count > MAX_EXPERTS:
        raise ModelLoadError(f"the native kernels support {MAX_EXPERTS} experts, not {count}")
    array = POINTER(STRUCTS.ft_linear_weight) * count
    first, second = array(), array()  # NULL for experts of other ranks
    for number, mlp in enumerate(weights.experts, start=weights.first):
        first[number] = pointer(native(mlp.gate_up).struct)
        second[number] = pointer(native(mlp.down).struct)
    return STRUCTS.ft_experts(
        routing=_routing(weights.routing, count),
        router=linear_pointer(weights.router),
        choice_bias=address(weights.choice_bias),
        factors=address(weights.factors),
        first=first,
        second=second,
        activation=activation_struct(weights.experts[0].activation),
        shared=_mlp(weights.shared),
        shared_gate=linear_pointer(weights.shared_gate),
    )


def _routing(routing: Routing, num_experts: int) -> Structure:
    return STRUCTS.ft_routing(
        num_experts=num_experts,
        top_k=routing.top_k,
        num_groups=routing.num_groups,
        kept_groups=routing.kept_groups,
        is_sigmoid=routing.score == "sigmoid",
        of_chosen=routing.of_chosen,
        groups_by_two=routing.groups_by == "best two",
        renorms=routing.renorm is not None,
        least=routing.renorm or 0.0,
        factor=routing.factor,
    )


def _mlp(mlp: MlpWeights | None) -> Structure:
    if mlp is None:
        return STRUCTS.ft_mlp()
    first, second = map(linear_pointer, mlp.linears)
    return STRUCTS.ft_mlp(first=first, second=second, activation=activation_struct(mlp.activation))
