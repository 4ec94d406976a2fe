"""MixerWeights: the base class of all mixers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from ..weights import PackedLinear

if TYPE_CHECKING:
    from ..base import ForwardPlan, Ops
    from ..kv_pool import KvLayer
    from ..parallel import Comm


class MixerWeights(ABC):
    """A layer's mixer of the rows of a sequence: weights in a backend's layout.

    `compute` consists of operations of `Ops`, so every backend can run every mixer.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def linears(self) -> tuple[PackedLinear, ...]:
        """Every packed matrix that may be quantised.

        The first one reads the mixer's input and the last one computes its output; adapters may
        change these two.
        """

    @abstractmethod
    def compute(self, ops: Ops, x: Tensor, plan: ForwardPlan) -> Tensor:
        """Return what rows ``[T, hidden]`` add to the residual stream, ``[T, hidden]``."""

    @property
    def kv_layer(self) -> KvLayer | None:
        """Location of the layer's keys in the pool, or None for a mixer without keys."""
        return None

    @property
    def kv_window(self) -> int | None:
        """Number of positions that a row sees, its own included; None: all before it."""
        return None

    @property
    def is_divided(self) -> bool:
        """Whether each rank has a part of the mixer."""
        return False

    def write_kv(self, ops: Ops, x: Tensor, plan: ForwardPlan) -> None:  # noqa: ARG002
        """Write the keys and values of rows ``[T, hidden]``; compute no output.

        Raises TypeError for a mixer without keys.
        """
        raise TypeError(f"{type(self).__name__} has no keys and values")


def linear_of_ranks(ops: Ops, x: Tensor, weight: PackedLinear, comm: Comm | None) -> Tensor:
    """Compute ``[T, in_features] -> [T, out_features]``, summed over ranks if there is a ``comm``.

    Each rank then has some of the columns. A rank's output is float32, so that only the sum is
    rounded.
    """
    if comm is None:
        return ops.linear(x, weight)
    return comm.sum(ops.logits(x, weight), x.dtype)
