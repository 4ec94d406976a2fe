"""Logits of a transformers model in float64, and how far rounding may lead from them.

Logits of two programs in float32 differ by the rounding of both, which other instruction sets,
libraries and blockings change. In float64 that side of the comparison is exact.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_UNIT = 2.0**-24  # rounding a number to float32 changes it by up to this part of it
_DRAWS = 3
_ALLOWED = 32


class _Widened(TorchDispatchMode):
    """Gives float64 to a model that asks for float32 by name, as norms and recurrences do."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        def wide(value: object) -> object:
            return torch.float64 if value is torch.float32 else value

        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


def _logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad(), _Widened():
        found: Tensor = model(torch.tensor([ids])).logits[0]
    assert found.dtype == torch.float64
    return found


@dataclass
class Exact:
    """Logits of every position in float64, and the rounding noise of each position.

    ``noise`` is the largest change of a position's logits when each weight is off by as much as its
    rounding to float32 could be, the largest of some draws. A model may amplify that: where a
    recurrent layer's output is small, its norm enlarges the noise by as much as the output. Sums
    round in more places than the weights, so `assert_near` allows 32 times the noise. On 14 random
    models foretoken's torch and native backends needed up to 10 times, with any instruction set of
    oneDNN, MKL and torch, and transformers' own float32 up to 30.
    """

    logits: Tensor  # [positions, vocab]
    noise: Tensor  # [positions]

    @classmethod
    def of(cls, model: Any, ids: list[int]) -> Exact:
        """Compute both of a float32 model, which stays as it is."""
        wide = copy.deepcopy(model).double()
        wide.set_experts_implementation("eager")  # the default has no float64
        exact, noise = _logits(wide, ids), torch.zeros(len(ids), dtype=torch.float64)
        given = {name: value.clone() for name, value in wide.named_parameters()}
        generator = torch.Generator().manual_seed(0)
        for _ in range(_DRAWS):
            for name, parameter in wide.named_parameters():
                errors = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data.copy_(given[name] * (1 + _UNIT * (2 * errors - 1)))
            noise = torch.maximum(noise, (_logits(wide, ids) - exact).abs().amax(1))
        return cls(exact, noise)

    def assert_near(self, logits: Tensor) -> None:
        """Fail where logits of float32 are further off than rounding explains."""
        times = (logits - self.logits).abs().amax(1) / self.noise
        worst = int(times.argmax())
        assert times[worst] <= _ALLOWED, f"position {worst}: {times[worst]:.1f} times the noise"
