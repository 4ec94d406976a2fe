"""Lightning attention (arXiv 2501.08313): its tensors and their packing."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from ...ops.mixers.recurrent import LightningWeights
from ..description.config import DecoderConfig, LightningSpec
from ..description.fold import qkv_order
from ..description.tensors import LinearSpec, MatrixSpec, TensorSpec, layer_prefix, linear_of
from .packer import Mixer, Packer


class Lightning(Mixer):
    """Declared tensors of a layer's lightning attention, and their packing."""

    def __init__(self, config: DecoderConfig, index: int, spec: LightningSpec) -> None:
        at, hidden, shape = f"{layer_prefix(index)}self_attn.", config.hidden_size, spec.shape
        self._config, self._index, self._spec = config, index, spec
        channels, values = shape.conv_channels, shape.value_width
        gate = torch.arange(channels, channels + values)
        self.in_proj = LinearSpec(
            (MatrixSpec(f"{at}qkv_proj", channels), MatrixSpec(f"{at}output_gate", values)),
            hidden,
            order=torch.cat((qkv_order(shape), gate)),
            adapts=True,
        )
        self.norm = TensorSpec(f"{at}norm.weight", (values,))
        factor = config.fold.mixer_out_scale
        self.out = linear_of(f"{at}out_proj", hidden, values, factor, adapts=True)

    @override
    def pack(self, packer: Packer) -> LightningWeights:
        config, shape = self._config, self._spec.shape
        norm = packer.float32(self.norm)
        return LightningWeights(
            in_proj=packer.linear(self.in_proj),
            conv=norm.new_ones(shape.conv_channels, 1),
            decay=-slopes(self._index, config.num_layers, shape.num_value_heads).to(norm.device),
            dt_bias=norm.new_empty(0),
            norm=norm,
            norm_eps=RMS_EPS,
            num_norms=1,
            out=packer.linear(self.out),
            shape=shape,
            layer=config.state_of(self._index),
        )


RMS_EPS = 1e-6  # eps of the norm within lightning attention, independent of the config


def slopes(layer: int, num_layers: int, num_heads: int) -> Tensor:
    """Return the decay rate of each head's state per token, [num_heads] float32.

    The state is multiplied by exp(-rate). Later layers have lower rates.
    """
    base = 1 / 2 ** (8 / num_heads)
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return base ** torch.arange(1, num_heads + 1) * factor
