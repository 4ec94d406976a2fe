"""A gated short convolution (arXiv 2511.23404): its tensors and their packing."""

from __future__ import annotations

from typing_extensions import override

from ...ops.mixers.conv import ConvWeights
from ..description.config import ConvSpec, DecoderConfig
from ..description.tensors import CONV, TensorSpec, layer_prefix, linear_of
from .packer import Mixer, Packer, optional


class Conv(Mixer):
    """Declared tensors of a layer's short convolution, and their packing."""

    def __init__(self, config: DecoderConfig, index: int, spec: ConvSpec) -> None:
        at, hidden, bias = layer_prefix(index) + CONV, config.hidden_size, spec.has_bias
        channels, conv_len = spec.shape
        self._config, self._index, self._spec = config, index, spec
        self.in_proj = linear_of(f"{at}in_proj", 3 * channels, hidden, bias=bias, adapts=True)
        self.conv = TensorSpec(f"{at}conv.weight", (channels, 1, conv_len))
        self.conv_bias = TensorSpec(f"{at}conv.bias", (channels,)) if bias else None
        self.out = linear_of(f"{at}out_proj", hidden, channels, bias=bias, adapts=True)

    @override
    def pack(self, packer: Packer) -> ConvWeights:
        return ConvWeights(
            in_proj=packer.linear(self.in_proj),
            conv=packer.float32(self.conv).view(self._spec.shape),
            bias=optional(packer.float32, self.conv_bias),
            out=packer.linear(self.out),
            layer=self._config.state_of(self._index),
        )
