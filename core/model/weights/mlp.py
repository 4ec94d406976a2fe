"""MLPs and mixtures of experts: their tensors and their packing."""

from __future__ import annotations

import torch

from ...ops.parallel import Comm
from ...ops.weights import Activation, ExpertWeights, MlpWeights
from ..description.config import DecoderConfig, ExpertsSpec, MlpNames
from ..description.tensors import (
    COLUMNS,
    ROWS,
    Cut,
    Held,
    LayerPart,
    LinearSpec,
    MatrixSpec,
    Shapes,
    Share,
    TensorSpec,
    linear_of,
)
from .packer import Packer, in_order, optional

_FUSED = "gate_up_proj"  # name of a tensor with the matrices of gate and up, of one or all experts


class Mlp(LayerPart):
    """Declared tensors of an MLP, and their packing.

    ``fused``: the files store gate and up as one matrix. ``factor`` is multiplied into the output
    matrix. ``is_cut``: whether each rank has only a share of the inner columns.
    """

    def __init__(
        self,
        config: DecoderConfig,
        prefix: str,
        names: MlpNames,
        width: int,
        activation: Activation,
        *,
        fused: bool = False,
        bias: bool = False,
        factor: float = 1.0,
        is_cut: bool = True,
        adapts: bool = False,
    ) -> None:
        self._activation, hidden = activation, config.hidden_size
        matrices: tuple[MatrixSpec, ...] = (MatrixSpec(prefix + names.up, width),)
        if fused:
            matrices = (MatrixSpec(prefix + _FUSED, 2 * width),)
        elif names.gate is not None:
            matrices = (MatrixSpec(prefix + names.gate, width, config.fold.gate_scale), *matrices)
        rows: Share = Cut(0, (1, 1)) if fused else ROWS
        columns: Share = COLUMNS
        if not is_cut:
            rows = columns = "whole"
        self.gate_up = LinearSpec(matrices, hidden, bias, share=rows, adapts=adapts)
        self.down = linear_of(
            prefix + names.down, hidden, width, factor, bias=bias, share=columns, adapts=adapts
        )

    @classmethod
    def of_layer(cls, config: DecoderConfig, prefix: str, width: int) -> Mlp:
        """Return the declared MLP of a layer. ``width``: number of its inner columns."""
        return cls(
            config,
            f"{prefix}mlp.",
            config.mlp_names,
            width,
            config.activation,
            fused=config.fold.fused_gate_up,
            bias=config.mlp_bias,
            factor=config.fold.residual_scale * config.fold.mlp_out_scale,
            adapts=True,
        )

    def pack(self, packer: Packer, comm: Comm | None = None) -> MlpWeights:
        """Read and pack the tensors.

        ``comm``: connection to the other ranks, if the outputs of all ranks must be summed.
        """
        first, second = packer.linear(self.gate_up), packer.linear(self.down)
        return MlpWeights(first, second, self._activation, comm)


class Experts(LayerPart):
    """Declared tensors of a layer's experts and their router, and their packing.

    If each expert is stored separately, ``experts`` has an MLP for each. Otherwise ``stacks`` has
    the tensors that hold all experts: gate and up, down, and for gpt-oss the biases of both.
    """

    def __init__(self, config: DecoderConfig, prefix: str, spec: ExpertsSpec) -> None:
        names, hidden, count = spec.names, config.hidden_size, spec.count
        self._spec = spec
        self.router = linear_of(
            prefix + names.router, count, hidden, bias=spec.router_bias, is_plain=True
        )
        self.choice_bias, self.factors = (
            None if name is None else TensorSpec(prefix + name, (count,))
            for name in (names.choice_bias, names.factors)
        )
        self.experts: list[Mlp] = []
        self.stacks: list[TensorSpec] = []
        if names.stacked == "none":
            self.experts = [
                Mlp(
                    config,
                    prefix + names.expert.format(number),
                    names.mlp,
                    spec.width,
                    spec.activation,
                    is_cut=spec.held is None,
                )
                for number in range(count)
            ]
        else:
            self.stacks = _stacks(prefix + names.expert, hidden, spec)
        self.shared = self.shared_gate = None
        if spec.shared_width:
            self.shared = Mlp(
                config,
                prefix + names.shared,
                names.shared_mlp,
                spec.shared_width,
                spec.activation,
                fused=config.fold.fused_gate_up,
                factor=config.fold.residual_scale,
            )
            if names.shared_gate is not None:
                self.shared_gate = linear_of(prefix + names.shared_gate, 1, hidden, is_plain=True)

    @property
    def first_down(self) -> TensorSpec:
        """The tensor with the down matrix of the first expert, or of all experts in a stack."""
        return self.stacks[1] if self.stacks else next(self.experts[0].down.tensors)

    def of(self, number: int) -> list[TensorSpec]:
        """Return the tensors of expert ``number``; empty if the experts are stored in stacks."""
        return list(self.experts[number].tensors) if self.experts else []

    def pack(self, packer: Packer) -> ExpertWeights:
        """Read and pack the router, the shared expert, and the experts that this rank has."""
        spec = self._spec
        held = [self.experts[number] for number in spec.numbers] if self.experts else []
        experts = (
            self._stacked(packer) if self.stacks else tuple(each.pack(packer) for each in held)
        )
        return ExpertWeights(
            router=packer.linear(self.router),
            routing=spec.routing,
            experts=experts,
            choice_bias=optional(packer.float32, self.choice_bias),
            factors=optional(packer.float32, self.factors),
            shared=None if self.shared is None else self.shared.pack(packer),
            shared_gate=optional(packer.linear, self.shared_gate),
            comm=packer.comm,
            first=spec.numbers.start,
        )

    def _stacked(self, packer: Packer) -> tuple[MlpWeights, ...]:
        """Read and pack the experts from tensors that hold all experts.

        gpt-oss stores each matrix transposed, with alternating rows of gate and up.
        """
        spec, pack = self._spec, packer.ops.pack_linear
        is_transposed = spec.names.stacked != "rows"
        first, second = (
            packer.stack(tensor, len(spec.numbers), is_transposed=is_transposed)
            for tensor in self.stacks[:2]
        )
        if spec.names.stacked != "gpt-oss":
            pairs = zip(first, second, strict=True)
            return tuple(MlpWeights(pack(a), pack(b), spec.activation) for a, b in pairs)
        biases = [packer.vector(tensor) for tensor in self.stacks[2:]]
        apart = torch.arange(2 * spec.width, device=packer.device).view(-1, 2).T.flatten()
        return tuple(
            MlpWeights(
                pack(in_order(gate_up, apart), bias[apart]),
                pack(down, down_bias),
                spec.activation,
            )
            for gate_up, down, bias, down_bias in zip(first, second, *biases, strict=True)
        )


def _stacks(prefix: str, hidden: int, spec: ExpertsSpec) -> list[TensorSpec]:
    """Return the tensors that hold all experts: gate and up, down, and for gpt-oss their biases.

    Their shapes follow the layout `ExpertNames.stacked`.
    """
    count, width, stacked = spec.count, spec.width, spec.names.stacked
    shapes: Shapes = {_FUSED: (count, hidden, 2 * width), "down_proj": (count, width, hidden)}
    if stacked == "rows":
        shapes = {_FUSED: (count, 2 * width, hidden), "down_proj": (count, hidden, width)}
    # Rows of gate and up alternate in gpt-oss; in the other layouts all rows of gate come first.
    blocks = (1,) if stacked == "gpt-oss" else (1, 1)
    middle = (1, 2) if stacked == "rows" else (2, 1)  # axis of the inner width in each tensor
    shares: dict[str, Share] = {
        _FUSED: Cut(middle[0], blocks, of_one=0),
        "down_proj": Cut(middle[1], of_one=1),
    }
    if stacked == "gpt-oss":
        shapes |= {f"{_FUSED}_bias": (count, 2 * width), "down_proj_bias": (count, hidden)}
        shares |= {f"{_FUSED}_bias": COLUMNS, "down_proj_bias": "first"}
    if spec.held is not None:
        shares = dict.fromkeys(shapes, Held(*spec.held))
    return [TensorSpec(prefix + name, shape, shares[name]) for name, shape in shapes.items()]
