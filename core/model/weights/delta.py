"""The gated delta rule (arXiv 2412.06464): its tensors and their packing."""

from __future__ import annotations

import torch
from typing_extensions import override

from ...ops.mixers.recurrent import DeltaWeights
from ..description.config import DecoderConfig, DeltaSpec
from ..description.fold import ba_order, qkvz_order
from ..description.tensors import DELTA, LinearSpec, MatrixSpec, TensorSpec, layer_prefix, linear_of
from .packer import Mixer, Packer


class Delta(Mixer):
    """Declared tensors of a layer's gated delta rule, and their packing."""

    def __init__(self, config: DecoderConfig, index: int, spec: DeltaSpec) -> None:
        at, hidden, shape = layer_prefix(index) + DELTA, config.hidden_size, spec.shape
        self._config, self._index, self._spec = config, index, spec
        heads, values = shape.num_value_heads, shape.value_width
        keys = shape.num_key_heads * shape.key_dim
        rows = {"q": keys, "k": keys, "v": values, "z": values}
        self.in_proj = LinearSpec(
            tuple(
                MatrixSpec(f"{at}in_proj_{kinds}", sum(rows[kind] for kind in kinds))
                for kinds in spec.matrices
            ),
            hidden,
            order=qkvz_order(shape) if spec.matrices == ("qkvz",) else None,
            adapts=not shape.is_tiled,
        )
        gates = {"ba": 2 * heads} if spec.fused_ba else {"b": heads, "a": heads}
        self.gates = LinearSpec(
            tuple(MatrixSpec(f"{at}in_proj_{name}", count) for name, count in gates.items()),
            hidden,
            order=ba_order(shape) if spec.fused_ba else None,
            is_plain=True,
        )
        convs = zip(("q_", "k_", "v_"), spec.conv_rows, strict=True) if spec.conv_rows else None
        self.convs = [
            TensorSpec(f"{at}{kind}conv1d.weight", (channels, 1, shape.conv_len))
            for kind, channels in convs or [("", shape.conv_channels)]
        ]
        self.a_log = TensorSpec(f"{at}A_log", (heads,))
        self.dt_bias = TensorSpec(f"{at}dt_bias", (heads,))
        self.norm = TensorSpec(f"{at}norm.weight", (shape.value_dim,))
        self.out = linear_of(f"{at}out_proj", hidden, values, adapts=not shape.is_tiled)

    @override
    def pack(self, packer: Packer) -> DeltaWeights:
        spec, config, convs = self._spec, self._config, map(packer.float32, self.convs)
        return DeltaWeights(
            in_proj=packer.linear(self.in_proj),
            gates=packer.linear(self.gates),
            conv=torch.cat(list(convs)).view(-1, spec.shape.conv_len),
            decay=-torch.exp(packer.float32(self.a_log)),
            dt_bias=packer.float32(self.dt_bias),
            norm=packer.float32(self.norm),
            norm_eps=config.norm_eps if spec.norm_eps is None else spec.norm_eps,
            out=packer.linear(self.out),
            shape=spec.shape,
            layer=config.state_of(self._index),
            most_beta=spec.most_beta,
        )
