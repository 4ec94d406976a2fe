"""Tensors that only Gemma 4 has: for experts beside an MLP, and for per-layer token inputs.

A per-layer input is a vector made from a token's id and embedding. Each layer gates its input and
adds it to the residual stream.
"""

from __future__ import annotations

from ...ops.weights import (
    ExpertWeights,
    Gemma4Extras,
    Norm,
    ParallelExperts,
    TokenInputs,
    TokenInputWeights,
)
from ..description.config import DecoderConfig, ExpertsSpec
from ..description.tensors import (
    TOKEN_NORM,
    TOKEN_PROJECTION,
    TOKEN_TABLE,
    LayerPart,
    NormSpec,
    TensorSpec,
    linear_of,
)
from .packer import Packer, norm_of


class Gemma4Layer(LayerPart):
    """Declared tensors of a layer that only Gemma 4 has, and their packing.

    ``experts``: the experts that run beside the layer's MLP; None: the layer has none.
    """

    def __init__(self, config: DecoderConfig, prefix: str, experts: ExpertsSpec | None) -> None:
        self._config, size = config, config.token_input_size
        names = None if experts is None else experts.beside
        self.beside_norms: list[NormSpec] = []
        self.router_norm = None
        if names is not None:
            beside = (names.norm, names.out_norm, names.mlp_out_norm)
            self.beside_norms = [norm_of(config, f"{prefix}{name}.weight") for name in beside]
            self.router_norm = TensorSpec(prefix + names.router_norm, (config.hidden_size,))
        self.gate = self.out = self.out_norm = None
        if size:
            hidden = config.hidden_size
            self.gate = linear_of(f"{prefix}per_layer_input_gate", size, hidden)
            self.out = linear_of(f"{prefix}per_layer_projection", hidden, size)
            self.out_norm = norm_of(config, f"{prefix}post_per_layer_input_norm.weight")

    def pack(self, packer: Packer, out_norm: Norm, experts: ExpertWeights | None) -> Gemma4Extras:
        """Read and pack the tensors.

        ``out_norm``: norm of the output of the MLP, or of the sum of MLP and experts. ``experts``:
        the packed experts beside the MLP, if any.
        """
        return Gemma4Extras(
            out_norm=out_norm,
            experts=self._beside(packer, experts),
            token_input=self._token_input(packer),
        )

    def _beside(self, packer: Packer, experts: ExpertWeights | None) -> ParallelExperts | None:
        if experts is None or self.router_norm is None:
            return None
        config = self._config
        router_norm = packer.float32(self.router_norm) * config.hidden_size**-0.5
        norm, out_norm, mlp_out_norm = map(packer.norm, self.beside_norms)
        return ParallelExperts(
            experts, norm, Norm(router_norm, config.norm_eps), out_norm, mlp_out_norm
        )

    def _token_input(self, packer: Packer) -> TokenInputWeights | None:
        if self.gate is None or self.out is None or self.out_norm is None:
            return None
        gate, out = packer.linear(self.gate), packer.linear(self.out)
        return TokenInputWeights(gate, self._config.activation, out, packer.norm(self.out_norm))


class Gemma4Inputs(LayerPart):
    """Declared tensors that make the per-layer inputs of each token, and their packing."""

    def __init__(self, config: DecoderConfig) -> None:
        width = config.num_layers * config.token_input_size
        self._config = config
        self.table = TensorSpec(TOKEN_TABLE, (config.vocab_size, width))
        self.projection = linear_of(TOKEN_PROJECTION, width, config.hidden_size)
        self.norm = TensorSpec(TOKEN_NORM, (config.token_input_size,))

    def pack(self, packer: Packer) -> TokenInputs:
        """Read and pack the tensors.

        A token's input to a layer is ``(norm(c * projected) * w + s * row) / sqrt(2)``. Here
        ``projected`` is made from the token's embedding, ``row`` is the token's row of the table,
        and w is the norm's weight; c is hidden_size ** -0.5, and s is token_input_size ** 0.5. Both
        factors are folded into the norm, c into its eps and s into w, so that no matrix is rounded
        a second time.
        """
        config = self._config
        scale = config.token_input_size**0.5
        weight, eps = packer.float32(self.norm) / scale, config.norm_eps * config.hidden_size
        return TokenInputs(
            table=packer.vector(self.table),
            projection=packer.linear(self.projection),
            norm=Norm(weight, eps),
            factor=scale * 0.5**0.5,
        )
