"""Random mixtures of experts, the same for any operations, and every kind of routing."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.core.ops.base import Ops
from foretoken.core.ops.weights import Activation, ExpertWeights, MlpWeights, Routing

HIDDEN, WIDTH, COUNT = 50, 37, 12
CLOSE = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-4},
    torch.float16: {"atol": 6e-3, "rtol": 6e-3},
    torch.bfloat16: {"atol": 4e-2, "rtol": 4e-2},
}
ROUTINGS = {
    "softmax": Routing(3),
    "renormed": Routing(3, renorm=0.0),
    "of the chosen": Routing(3, of_chosen=True),
    "sigmoid": Routing(4, score="sigmoid", renorm=1e-20, factor=1.7),
    "sigmoid of the chosen": Routing(1, score="sigmoid", of_chosen=True),
    "groups": Routing(3, score="sigmoid", num_groups=4, kept_groups=2, renorm=1e-20),
    "groups by their best": Routing(3, num_groups=3, kept_groups=1, groups_by="best"),
}


def make_experts(
    ops: Ops,
    routing: Routing,
    dtype: torch.dtype,
    *,
    activation: Activation = Activation(),  # noqa: B008 - immutable
    bias: bool = False,
) -> ExpertWeights:
    """The same random weights for any operations."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cpu") / shape[-1] ** 0.5
        return drawn.to(torch.get_default_device())

    def mlp(width: int) -> MlpWeights:
        first, second = draw(2 * width, HIDDEN).to(dtype), draw(HIDDEN, width).to(dtype)
        biases = (draw(2 * width).to(dtype), draw(HIDDEN).to(dtype)) if bias else (None, None)
        packed = (ops.pack_linear(w, b) for w, b in zip((first, second), biases, strict=True))
        return MlpWeights(*packed, activation)

    return ExpertWeights(
        router=ops.pack_linear((draw(COUNT, HIDDEN) * 3).to(dtype), plain=True),
        routing=routing,
        experts=tuple(mlp(WIDTH) for _ in range(COUNT)),
        choice_bias=draw(COUNT) if routing.score == "sigmoid" and not routing.of_chosen else None,
        shared=mlp(WIDTH + 8) if routing.renorm is not None else None,
        shared_gate=ops.pack_linear(draw(1, HIDDEN).to(dtype), plain=True)
        if routing.renorm == 0.0
        else None,
    )
