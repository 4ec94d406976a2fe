"""Mamba-2 (arXiv 2405.21060): its tensors and their packing."""

from __future__ import annotations

import torch
from typing_extensions import override

from ...ops.mixers.recurrent import Mamba2Weights
from ..description.config import DecoderConfig, Mamba2Spec
from ..description.fold import mamba_orders, mamba_widths, scaled_rows
from ..description.tensors import MAMBA, TensorSpec, layer_prefix, linear_of
from .packer import Mixer, Packer, in_order, optional


class Mamba2(Mixer):
    """Declared tensors of a layer's Mamba-2, which is in place of attention or beside it."""

    def __init__(self, config: DecoderConfig, index: int, spec: Mamba2Spec) -> None:
        at, hidden, shape = layer_prefix(index) + MAMBA, config.hidden_size, spec.shape
        self._config, self._index, self._spec = config, index, spec
        heads, values, channels = shape.num_value_heads, shape.value_width, shape.conv_channels
        rows = values + channels + heads
        self.in_proj = linear_of(f"{at}in_proj", rows, hidden, bias=spec.has_bias)
        self.conv = TensorSpec(f"{at}conv1d.weight", (channels, 1, shape.conv_len))
        self.conv_bias = TensorSpec(f"{at}conv1d.bias", (channels,)) if spec.has_conv_bias else None
        self.a_log = TensorSpec(f"{at}A_log", (heads,))
        self.dt_bias = TensorSpec(f"{at}dt_bias", (heads,))
        self.skip = TensorSpec(f"{at}D", (heads,))
        self.norm = TensorSpec(f"{at}norm.weight", (values,)) if spec.num_norms else None
        factor = config.fold.residual_scale * config.fold.mixer_out_scale
        self.out = linear_of(f"{at}out_proj", hidden, values, factor, bias=spec.has_bias)

    @override
    def pack(self, packer: Packer) -> Mamba2Weights:
        """Read the tensors, and pack them for the kernels.

        The stored input matrix is packed as two matrices. The matrix with the rows of dt, the step
        size, is never quantised.
        """
        spec, shape = self._spec, self._spec.shape
        rows, gates, channels = mamba_orders(shape)
        weight_spec, *bias_spec = self.in_proj.tensors
        stored = packer.read(weight_spec.name)
        if spec.factors is None:
            weight = packer.stacked([stored], [1.0])
        else:
            weight = scaled_rows(packer.cast(stored), mamba_widths(shape), spec.factors)
        bias = packer.vector(*bias_spec) if bias_spec else None
        conv = packer.float32(self.conv).view(-1, shape.conv_len)
        conv_bias = None if self.conv_bias is None else packer.float32(self.conv_bias)[channels]
        return Mamba2Weights(
            in_proj=packer.ops.pack_linear(
                in_order(weight, rows), None if bias is None else bias[rows]
            ),
            gates=packer.ops.pack_linear(
                packer.cast(in_order(weight, gates)),
                None if bias is None else bias[gates],
                plain=True,
            ),
            conv=conv[channels],
            conv_bias=conv_bias,
            decay=-torch.exp(packer.float32(self.a_log)),
            dt_bias=packer.float32(self.dt_bias),
            skip=packer.float32(self.skip),
            norm=optional(packer.float32, self.norm),
            norm_eps=self._config.norm_eps,
            num_norms=spec.num_norms,
            out=packer.linear(self.out),
            shape=shape,
            layer=self._config.state_of(self._index),
        )
