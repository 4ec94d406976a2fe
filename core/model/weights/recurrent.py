"""Weights of layers that keep a state in the place of keys and values."""

from __future__ import annotations

import torch

from ...ops.weights import ConvWeights, DeltaWeights, Mamba2Weights, RecurrentWeights
from ..description.config import ConvSpec, DeltaSpec, Mamba2Spec, MixerSpec
from ..description.fold import ba_order, mamba_orders, mamba_widths, qkvz_order, scaled_rows
from ..description.shapes import CONV, DELTA, MAMBA, layer_prefix
from .packer import Packer, in_order


class RecurrentPacker:
    """Packs a delta rule, a Mamba-2 or a convolution."""

    def __init__(self, packer: Packer) -> None:
        self._packer, self._config = packer, packer.config

    def weights(self, index: int, spec: MixerSpec) -> RecurrentWeights | ConvWeights:
        """Read and pack the mixer of a layer."""
        if isinstance(spec, DeltaSpec):
            return self._delta(index, spec)
        if isinstance(spec, ConvSpec):
            return self._conv(index, spec)
        return self.mamba(index, spec)

    def _delta(self, index: int, spec: DeltaSpec) -> DeltaWeights:
        at, shape = layer_prefix(index) + DELTA, spec.shape
        qkvz = ["in_proj_qkvz"] if spec.fused_qkvz else ["in_proj_qkv", "in_proj_z"]
        ba = ["in_proj_ba"] if spec.fused_ba else ["in_proj_b", "in_proj_a"]
        of_steps = torch.cat([self._packer.vector(f"{at}{name}.weight") for name in ba])
        if spec.fused_ba:
            of_steps = of_steps[ba_order(shape)]
        return DeltaWeights(
            in_proj=self._packer.linear(
                [at + name for name in qkvz],
                bias=False,
                order=qkvz_order(shape) if spec.fused_qkvz else None,
            ),
            gates=self._packer.ops.pack_linear(of_steps, plain=True),
            conv=self._packer.float32(f"{at}conv1d.weight").view(-1, shape.conv_len),
            decay=-torch.exp(self._packer.float32(f"{at}A_log")),
            dt_bias=self._packer.float32(f"{at}dt_bias"),
            norm=self._packer.float32(f"{at}norm.weight"),
            norm_eps=self._config.norm_eps,
            out=self._packer.linear([f"{at}out_proj"], bias=False),
            shape=shape,
            layer=self._config.state_of(index),
        )

    def mamba(self, index: int, spec: Mamba2Spec) -> Mamba2Weights:
        """Read and pack a Mamba-2, which may stand beside attention."""
        at, shape, fold = layer_prefix(index) + MAMBA, spec.shape, self._config.fold
        rows, gates, channels = mamba_orders(shape)
        stored = self._packer.read(f"{at}in_proj.weight")
        if spec.factors is None:
            weight = self._packer.stacked([stored], [1.0])
        else:
            weight = scaled_rows(self._packer.cast(stored), mamba_widths(shape), spec.factors)
        bias = self._packer.vector(f"{at}in_proj.bias") if spec.has_bias else None
        conv = self._packer.float32(f"{at}conv1d.weight").view(-1, shape.conv_len)
        conv_bias = (
            self._packer.float32(f"{at}conv1d.bias")[channels] if spec.has_conv_bias else None
        )
        return Mamba2Weights(
            in_proj=self._packer.ops.pack_linear(
                in_order(weight, rows), None if bias is None else bias[rows]
            ),
            gates=self._packer.ops.pack_linear(
                self._packer.cast(in_order(weight, gates)),
                None if bias is None else bias[gates],
                plain=True,
            ),
            conv=conv[channels],
            conv_bias=conv_bias,
            decay=-torch.exp(self._packer.float32(f"{at}A_log")),
            dt_bias=self._packer.float32(f"{at}dt_bias"),
            skip=self._packer.float32(f"{at}D"),
            norm=self._packer.float32(f"{at}norm.weight") if spec.num_norms else None,
            norm_eps=self._config.norm_eps,
            num_norms=spec.num_norms,
            out=self._packer.linear(
                [f"{at}out_proj"],
                bias=spec.has_bias,
                factors=[fold.residual_scale * fold.mixer_out_scale],
            ),
            shape=shape,
            layer=self._config.state_of(index),
        )

    def _conv(self, index: int, spec: ConvSpec) -> ConvWeights:
        at, has_bias = layer_prefix(index) + CONV, spec.has_bias
        return ConvWeights(
            in_proj=self._packer.linear([f"{at}in_proj"], bias=has_bias),
            conv=self._packer.float32(f"{at}conv.weight").view(spec.shape),
            bias=self._packer.float32(f"{at}conv.bias") if has_bias else None,
            out=self._packer.linear([f"{at}out_proj"], bias=has_bias),
            layer=self._config.state_of(index),
        )
