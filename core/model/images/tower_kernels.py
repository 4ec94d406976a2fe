"""Attention and activations of an image tower, computed by the backend's kernels.

torch has only one thread beside the native kernels, because OpenMP threads spin while they wait; in
torch this work would take longer than the tower's linears. Attention has its own pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from ...ops.base import ForwardPlan, Ops
from ...ops.batch import Segment, build_batch
from ...ops.kv_pool import KVPool
from ...ops.row_extras import RowExtras
from ...ops.weights import Activation, HeadLayout
from ..description.rope import Still

PAGE_SIZE = 16  # number of rows in a page
LEAST_ROWS = 128  # shortest sequence, in rows, for the kernels; torch computes short windows
_SILU, _GELU = Activation("silu", gated=False), Activation("gelu_tanh", gated=False)
_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.SiLU: _SILU,
    SiLUActivation: _SILU,
    GELUTanh: _GELU,
    NewGELUActivation: _GELU,
}


class _Shape(NamedTuple):
    """Sizes of an attention call, which determine the pages and the plan for it."""

    num_sequences: int
    num_rows: int  # number of rows of each sequence
    heads: HeadLayout
    dtype: torch.dtype


class TowerAttention(TorchFunctionMode):
    """A mode in which the kernels compute `F.scaled_dot_product_attention` where they support it.

    They support attention of every row to all rows of its sequence, without a mask or causality. A
    row's bits depend only on the rows of its sequence. The pages of the last shape are kept until
    the mode is left.
    """

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._shape: _Shape | None = None
        self._plan: ForwardPlan | None = None

    def __exit__(self, *failure: Any) -> None:  # noqa: ANN401 - as torch's
        """Leave the mode and free the pages."""
        self._shape = self._plan = None
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the kernels if they support this call of ``func``; otherwise call ``func``."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and len(args) == 3:
            shape = self._shape_of(*args, **kwargs)
            if shape is not None:
                return self._attention(shape, *args)
        return func(*args, **kwargs)

    def _shape_of(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> _Shape | None:
        """Return the shape to plan for; None if the kernels do not support it."""
        if attn_mask is not None or dropout_p or is_causal or query.dim() != 4:
            return None
        num_sequences, num_heads, num_rows, head_dim = query.shape
        kv_heads = key.shape[1]
        if key.shape != value.shape or key.shape != (num_sequences, kv_heads, num_rows, head_dim):
            return None
        if num_rows < LEAST_ROWS or head_dim % 2 or (kv_heads != num_heads and not enable_gqa):
            return None
        scale = head_dim**-0.5 if scale is None else scale
        heads = HeadLayout(num_heads, kv_heads, head_dim, scale)
        if self._ops.unsuited(heads):
            return None
        return _Shape(num_sequences, num_rows, heads, query.dtype)

    def _attention(self, shape: _Shape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention over ``[sequences, heads, rows, head_dim]`` of one layer."""
        if shape != self._shape or self._plan is None:
            self._shape, self._plan = shape, _plan(self._ops, shape)
        rows = shape.num_sequences * shape.num_rows
        parts = [each.transpose(1, 2).reshape(rows, -1) for each in (query, key, value)]
        scaled = self._ops.rope_write(torch.cat(parts, 1), 0, self._plan, None)
        out = self._ops.attention(scaled, 0, self._plan, None, is_mutual=True)
        heads = (shape.num_sequences, shape.num_rows, shape.heads.num_heads, -1)
        return out.view(*heads).transpose(1, 2)


def _plan(ops: Ops, shape: _Shape) -> ForwardPlan:
    """Return a plan with pages for one layer, and a fully attending segment per sequence."""
    pages = -(-shape.num_rows // PAGE_SIZE)
    device = torch.device("cpu")
    pool = KVPool(
        shape.num_sequences * pages,
        num_layers=1,
        num_kv_heads=shape.heads.num_kv_heads,
        head_dim=shape.heads.head_dim,
        page_size=PAGE_SIZE,
        dtype=shape.dtype,
        device=device,
    )
    segments = [
        Segment(
            array("q", bytes(8 * shape.num_rows)),
            0,
            array("q", range(first, first + pages)),
            0,
            extras=RowExtras(reaches=np.full(shape.num_rows, shape.num_rows, np.int64)),
        )
        for first in range(0, pool.num_pages, pages)
    ]
    batch = build_batch(segments, page_size=PAGE_SIZE, device=device, min_rows=1)
    return ops.plan(batch, pool, shape.heads, Still(shape.heads.head_dim, device))


class _Activated(nn.Module):
    """An activation module that the backend's kernels compute."""

    def __init__(self, ops: Ops, activation: Activation) -> None:
        super().__init__()
        self._ops, self._activation = ops, activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of ``[.., width]`` in the same shape."""
        return self._ops.activate(x.reshape(-1, x.shape[-1]), self._activation).view(x.shape)


def use_kernels(model: nn.Module, ops: Ops) -> None:
    """Let the kernels compute a tower's activations, and pass its layers contiguous rows."""
    for name, module in list(model.named_modules()):
        if type(module) in _ACTIVATIONS:
            parent, _, own = name.rpartition(".")
            made = _Activated(ops, _ACTIVATIONS[type(module)])
            setattr(model.get_submodule(parent), own, made)
        elif isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(_lay_out_rows)


def _lay_out_rows(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a layer with contiguous rows.

    A patch embedding returns columns of a convolution's output, and sums keep that layout: all
    layers would read and write with a stride.
    """
    return (args[0].contiguous(), *args[1:]) if args else args
