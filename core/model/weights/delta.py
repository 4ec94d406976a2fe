"""The gated delta rule (arXiv 2412.06464): its tensors, and how they are packed."""

from __future__ import annotations

import torch
from typing_extensions import override

from ...ops.weights import DeltaWeights
from ..description.config import DecoderConfig, DeltaSpec
from ..description.fold import ba_order, qkvz_order
from ..description.tensors import DELTA, LinearSpec, MatrixSpec, TensorSpec, layer_prefix, linear_of
from .packer import Mixer, Packer


class Delta(Mixer):
    """The delta rule of a layer."""

    def __init__(self, config: DecoderConfig, index: int, spec: DeltaSpec) -> None:
        at, hidden, shape = layer_prefix(index) + DELTA, config.hidden_size, spec.shape
        self._config, self._index, self._shape = config, index, shape
        heads, mixed, values = shape.num_value_heads, shape.conv_channels, shape.value_width
        rows = {"qkvz": mixed + values} if spec.fused_qkvz else {"qkv": mixed, "z": values}
        self.in_proj = LinearSpec(
            tuple(MatrixSpec(f"{at}in_proj_{name}", count) for name, count in rows.items()),
            hidden,
            order=qkvz_order(shape) if spec.fused_qkvz else None,
            adapts=not shape.is_tiled,
        )
        rows = {"ba": 2 * heads} if spec.fused_ba else {"b": heads, "a": heads}
        self.gates = LinearSpec(
            tuple(MatrixSpec(f"{at}in_proj_{name}", count) for name, count in rows.items()),
            hidden,
            order=ba_order(shape) if spec.fused_ba else None,
            is_plain=True,
        )
        self.conv = TensorSpec(f"{at}conv1d.weight", (mixed, 1, shape.conv_len))
        self.a_log = TensorSpec(f"{at}A_log", (heads,))
        self.dt_bias = TensorSpec(f"{at}dt_bias", (heads,))
        self.norm = TensorSpec(f"{at}norm.weight", (shape.value_dim,))
        self.out = linear_of(f"{at}out_proj", hidden, values, adapts=not shape.is_tiled)

    @override
    def pack(self, packer: Packer) -> DeltaWeights:
        return DeltaWeights(
            in_proj=packer.linear(self.in_proj),
            gates=packer.linear(self.gates),
            conv=packer.float32(self.conv).view(-1, self._shape.conv_len),
            decay=-torch.exp(packer.float32(self.a_log)),
            dt_bias=packer.float32(self.dt_bias),
            norm=packer.float32(self.norm),
            norm_eps=self._config.norm_eps,
            out=packer.linear(self.out),
            shape=self._shape,
            layer=self._config.state_of(self._index),
        )
