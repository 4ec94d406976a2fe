"""Weights of MLPs, of one or of many experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...ops.parallel import Comm
from ...ops.weights import Activation, ExpertWeights, MlpWeights
from ..description.config import ExpertsSpec, MlpNames
from ..description.shapes import FUSED_GATE_UP
from .packer import Packer, in_order


class MlpPacker:
    """Packs the MLP or the experts of a layer. ``comm``: of a rank's part."""

    def __init__(self, packer: Packer, comm: Comm | None) -> None:
        self._packer, self._comm = packer, comm
        self._config = packer.config

    def weights(self, prefix: str, experts: ExpertsSpec | None) -> MlpWeights | ExpertWeights:
        """Read and pack the MLP of a layer, or its experts."""
        if experts is None or experts.beside is not None:
            return self._mlp(f"{prefix}mlp.")
        return self.experts(prefix, experts)

    def _mlp(self, prefix: str) -> MlpWeights:
        config = self._config
        mlp = self._mlp_of(
            prefix,
            config.mlp_names,
            config.activation,
            fused=config.fold.fused_gate_up,
            bias=config.mlp_bias,
            factor=config.fold.residual_scale * config.fold.mlp_out_scale,
        )
        return mlp if self._comm is None else replace(mlp, comm=self._comm)

    def experts(self, prefix: str, spec: ExpertsSpec) -> ExpertWeights:
        """Read and pack experts and their router."""
        names = spec.names
        experts = (
            self._stacked_experts(prefix, spec)
            if names.stacked != "none"
            else tuple(
                self._mlp_of(prefix + names.expert.format(number), names.mlp, spec.activation)
                for number in spec.numbers
            )
        )
        shared = gate = None
        if spec.shared_width:
            shared = self._mlp_of(
                prefix + names.shared,
                names.shared_mlp,
                spec.activation,
                fused=self._config.fold.fused_gate_up,
                factor=self._config.fold.residual_scale,
            )
            if names.shared_gate is not None:
                gate = self._packer.plain(prefix + names.shared_gate, bias=False)
        return ExpertWeights(
            router=self._packer.plain(prefix + names.router, bias=spec.router_bias),
            routing=spec.routing,
            experts=experts,
            choice_bias=None
            if names.choice_bias is None
            else self._packer.float32(prefix + names.choice_bias),
            factors=None if names.factors is None else self._packer.float32(prefix + names.factors),
            shared=shared,
            shared_gate=gate,
            comm=self._comm,
            first=spec.numbers.start,
        )

    def _mlp_of(
        self,
        prefix: str,
        names: MlpNames,
        activation: Activation,
        *,
        fused: bool = False,
        bias: bool = False,
        factor: float = 1.0,
    ) -> MlpWeights:
        """``factor``: of its output."""
        fold = self._config.fold
        first = [names.up] if names.gate is None else [names.gate, names.up]
        if fused:
            first = [FUSED_GATE_UP]
        factors = [fold.gate_scale, 1.0] if len(first) == 2 else []
        return MlpWeights(
            self._packer.linear([prefix + name for name in first], bias=bias, factors=factors),
            self._packer.linear([prefix + names.down], bias=bias, factors=[factor]),
            activation,
        )

    def _stacked_experts(self, prefix: str, spec: ExpertsSpec) -> tuple[MlpWeights, ...]:
        """Pack experts whose matrices are stored as one tensor.

        gpt-oss stores each matrix transposed, with rows of gate and factor in turn.
        """
        at, stacked = prefix + spec.names.expert, spec.names.stacked
        is_turned = stacked in ("gpt-oss", "columns")
        first, second = (
            self._packer.stack(at + name, len(spec.numbers), is_turned=is_turned)
            for name in ("gate_up_proj", "down_proj")
        )
        if stacked != "gpt-oss":
            pack = self._packer.ops.pack_linear
            pairs = zip(first, second, strict=True)
            return tuple(MlpWeights(pack(a), pack(b), spec.activation) for a, b in pairs)
        biases = [
            self._packer.vector(at + name) for name in ("gate_up_proj_bias", "down_proj_bias")
        ]
        apart = torch.arange(2 * spec.width, device=self._packer.device).view(-1, 2).T.flatten()
        return tuple(
            MlpWeights(
                self._packer.ops.pack_linear(in_order(gate_up, apart), bias[apart]),
                self._packer.ops.pack_linear(down, down_bias),
                spec.activation,
            )
            for gate_up, down, bias, down_bias in zip(first, second, *biases, strict=True)
        )
