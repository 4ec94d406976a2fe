"""The MTP layer, which predicts one token more than its model (arXiv 2412.19437, section 2.2).

For token p and h, the output of the model's final norm at position p - 1, it computes
``projection([norm(embedding of the token), norm(h)])``, a layer of the model's own kind, its own
final norm, and the model's output, which predicts the token after p. At positions that the model
has not computed, its own output replaces h. Checkpoints store it after the model's last layer or
beside the model; of several MTP layers only the first is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...ops.batch import ForwardOutput, RaggedBatch, SamplingPlan, Wanted
from ...ops.kv_pool import KVPool
from ...ops.layers import write_kv
from ...ops.weights import Norm, PackedLinear
from ..decoder import OwnDecoder
from ..description.config import DecoderConfig, MtpNames
from ..description.tensors import (
    FINAL_NORM,
    MTP_EMBEDDING_NORM,
    MTP_HIDDEN_NORM,
    MTP_PROJECTION,
    Shapes,
    layer_prefix,
)
from ..formats.checkpoint import Checkpoint, OnRead, check_tensors, observed
from ..opening import open_model
from ..weights.assembly import Assembly, MtpInput
from ..weights.layer import further_tensors, tensor_shapes

# -- what a checkpoint has ------------------------------------------------------------------------


def count_mtp_layers(config: DecoderConfig, checkpoint: Checkpoint) -> int:
    """Return the number of MTP layers of a checkpoint; 0 if it has no MTP layer of a known kind.

    Raises `ModelLoadError` if the first of them lacks tensors or has other shapes.
    """
    further = further_tensors(config, checkpoint.shapes)
    if config.mtp is None or not further:
        return 0
    names, shapes = _stored_names(config, config.mtp), mtp_shapes(config)
    expected = {names[name]: shape for name, shape in shapes.items()}
    check_tensors(checkpoint, expected, ignored=set(checkpoint.shapes) - set(expected))
    return max(1, len({_layer_number(name) for name in further} - {None}))


def mtp_config(config: DecoderConfig) -> DecoderConfig:
    """Return the config of the MTP layer alone, which is like the model's last attention layer."""
    last = next(layer for layer in reversed(config.layers) if layer.has_attention)
    return replace(config, num_layers=1, layers=(last,), mtp=None)


def mtp_shapes(config: DecoderConfig) -> Shapes:
    """Return the shapes of the MTP layer's tensors, by their names in `mtp_config`'s decoder."""
    return {
        name: shape
        for name, shape in tensor_shapes(mtp_config(config)).items()
        if name == FINAL_NORM or name.startswith(layer_prefix(0))
    } | MtpInput(config).shapes


def _stored_names(config: DecoderConfig, names: MtpNames) -> dict[str, str]:
    """Return the stored name of each tensor of `mtp_shapes`."""
    found = {
        FINAL_NORM: names.final_norm,
        MTP_EMBEDDING_NORM: names.embedding_norm,
        MTP_HIDDEN_NORM: names.hidden_norm,
        f"{MTP_PROJECTION}.weight": f"{names.projection}.weight",
    }
    first = layer_prefix(0)
    found |= {
        name: names.layer + name.removeprefix(first)
        for name in mtp_shapes(config)
        if name.startswith(first)
    }
    return {name: stored.format(config.num_layers) for name, stored in found.items()}


def _layer_number(name: str) -> str | None:
    """Return the number of the layer that a tensor belongs to; None outside the layers."""
    parts = name.split(".")
    return parts[parts.index("layers") + 1] if "layers" in parts[:-1] else None


# -- its weights ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class MtpLayer:
    """An MTP layer of a model.

    ``decoder`` computes the layer on given input rows. Its logits cover the whole vocabulary, or
    only ``draft_ids`` [num_draft_ids].
    """

    decoder: OwnDecoder
    embedding_norm: Norm
    hidden_norm: Norm
    projection: PackedLinear
    draft_ids: Tensor | None
    has_own_output: bool = False  # whether the output matrix belongs to this layer alone

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the matrices that belong to the MTP layer alone."""
        weights = self.decoder.weights
        linears = [self.projection, *(each for layer in weights.layers for each in layer.linears)]
        if self.has_own_output or self.draft_ids is not None:
            linears.append(weights.lm_head)
        return sum(each.weight.nbytes for each in linears)

    def inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input [n, hidden] for ``token_ids`` [n].

        ``hidden`` [n, hidden]: for each token, the hidden state of the position before it. The
        result may have more rows, if the operations need a minimum.
        """
        ops = self.decoder.ops
        embedded = ops.embedding(token_ids, self.decoder.weights.embedding)
        normed = (ops.norm(embedded, self.embedding_norm), ops.norm(hidden, self.hidden_norm))
        return ops.linear(torch.cat(normed, dim=-1), self.projection)

    def write_kv(self, batch: RaggedBatch, pool: KVPool, inputs: Tensor) -> None:
        """Compute and write the KV of rows, without the rest of the layer."""
        (layer,), (plan,) = self.decoder.weights.layers, self.decoder.plans(batch, pool)
        write_kv(self.decoder.ops, layer, inputs, plan)

    def forward(
        self,
        batch: RaggedBatch,
        pool: KVPool,
        hidden: Tensor,
        draws: SamplingPlan | None = None,
    ) -> ForwardOutput:
        """Compute the tokens of a batch.

        ``hidden`` [num_rows, hidden]: the states before the tokens.
        """
        inputs = self.inputs(batch.token_ids.to(self.decoder.device), hidden)
        given = replace(batch, token_ids=torch.full_like(batch.token_ids, -1))
        return self.decoder.forward(given, pool, Wanted(draws, inputs=inputs))


def load_mtp_layer(
    path: Path,
    target: OwnDecoder,
    *,
    keeps_packed: bool,
    draft_ids: Tensor | None = None,
    on_read: OnRead | None = None,
) -> MtpLayer:
    """Read the MTP layer of a target's checkpoint. ``draft_ids``: the only tokens that it predicts.

    ``keeps_packed``: quantised weights stay as they are stored, as the target's do. ``on_read`` is
    called with every tensor. Raises `ModelLoadError` if the checkpoint has no such layer.
    """
    config, checkpoint = open_model(path)
    if config.mtp is None or not count_mtp_layers(config, checkpoint):
        raise ModelLoadError(f"{path} has no layers for multi-token prediction (MTP)")
    names = _stored_names(config, config.mtp)
    read = checkpoint.read if on_read is None else observed(checkpoint.read, on_read)
    one, ops = mtp_config(config), target.ops
    assembly = Assembly(
        one, lambda name: read(names.get(name, name)), ops, target.dtype, target.device,
        keeps_packed=keeps_packed,
    )  # fmt: skip
    found = assembly.mtp(target.weights, draft_ids)
    return MtpLayer(
        OwnDecoder(one, found.decoder, ops),
        found.embedding_norm,
        found.hidden_norm,
        found.projection,
        draft_ids,
    )
