"""Assembly: the weights of a decoder, from tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.base import Ops
from ...ops.parallel import Comm
from ...ops.quantize import QuantizedStack, QuantizedWeight, StoredWeight
from ...ops.weights import (
    DecoderWeights,
    ExpertsBeside,
    Gemma4Extras,
    LayerWeights,
    MixerWeights,
    Norm,
    PackedLinear,
    RecurrentWeights,
    TokenInputs,
    TokenInputWeights,
)
from ..description.config import BesideNames, DecoderConfig, ExpertsSpec, Mamba2Spec
from ..description.fold import rounded, scaled
from ..description.page_layout import PageLayout
from ..description.shapes import (
    CENTROIDS,
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    MTP_EMBEDDING_NORM,
    MTP_HIDDEN_NORM,
    MTP_PROJECTION,
    POST_PROJECTION,
    PRE_PROJECTION,
    TOKEN_GATE,
    TOKEN_NORM,
    TOKEN_OUT,
    TOKEN_OUT_NORM,
    TOKEN_PROJECTION,
    TOKEN_TABLE,
    layer_prefix,
)
from ..formats.checkpoint import Read
from .attention import AttentionPacker
from .mlp import MlpPacker
from .packer import Packer, in_order
from .recurrent import RecurrentPacker


class MtpWeights(NamedTuple):
    """A layer that predicts a further token: its decoder's weights, and what makes its input."""

    decoder: DecoderWeights
    embedding_norm: Norm
    hidden_norm: Norm
    projection: PackedLinear


class AssistantWeights(NamedTuple):
    """An assistant: its decoder's weights, and what joins these to the target.

    ``table`` [vocab, hidden]: of all tokens, where the decoder's output is that of clusters.
    """

    decoder: DecoderWeights
    pre_projection: PackedLinear
    post_projection: PackedLinear
    table: Tensor | None


class Assembly:
    """Reads, casts and packs layer by layer, so that at most one layer exists twice.

    ``keeps_packed``: quantised weights stay as they are stored where the ops have kernels for them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        read: Read,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_packed: bool,
        layout: PageLayout | None = None,
        comm: Comm | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """``layout``: of the pages, where they are another model's. ``comm``: of one rank's part of
        a model, whose config and tensors these are. ``release`` is called behind each layer.
        """
        self._config, self._comm, self._release = config, comm, release
        packer = Packer(config, read, ops, dtype, device, keeps_packed=keeps_packed)
        self._packer, self.recipes = packer, packer.recipes
        self._attention = AttentionPacker(packer, layout or PageLayout.of(config), comm)
        self._recurrent = RecurrentPacker(packer)
        self._mlp = MlpPacker(packer, comm)

    def weights(self) -> DecoderWeights:
        """Read and pack the whole model; the output matrix of ranks but the first is void."""
        config, fold, packer = self._config, self._config.fold, self._packer
        embedding = packer.read(EMBEDDING)
        is_tied = config.tie_embeddings
        is_first = self._comm is None or self._comm.rank == 0
        if is_first:
            output = embedding if is_tied else packer.read(LM_HEAD)
            lm_head = self._output(output)
        else:
            nothing = torch.zeros(1, config.hidden_size, dtype=packer.dtype, device=packer.device)
            lm_head = packer.ops.pack_linear(nothing)
        embed_scale = fold.embed_scale
        if fold.rounds_embed_scale:
            embed_scale = rounded(embed_scale, packer.dtype)
        is_shared = is_tied and is_first and fold.logit_scale == 1.0
        table = packer.table(embedding, lm_head if is_shared else None, embed_scale)
        del embedding
        self._release()
        return DecoderWeights(
            embedding=table,
            layers=tuple(self._layers()),
            final_norm=packer.norm(FINAL_NORM),
            lm_head=lm_head,
            token_inputs=self._token_inputs() if config.token_input_size else None,
            logit_cap=config.logit_cap,
        )

    def mtp(self, model: DecoderWeights, draft_ids: Tensor | None) -> MtpWeights:
        """Read a layer beside the ``model`` that it predicts a further token of; see mtp.py.

        ``draft_ids``: those that its output has; None: the model's output serves.
        """
        weights = DecoderWeights(
            embedding=model.embedding,
            layers=(self._layer(0),),
            final_norm=self._packer.norm(FINAL_NORM),
            lm_head=model.lm_head if draft_ids is None else self._output_of(draft_ids),
            logit_cap=model.logit_cap,
        )
        return MtpWeights(
            weights,
            self._packer.norm(MTP_EMBEDDING_NORM),
            self._packer.norm(MTP_HIDDEN_NORM),
            self._packer.linear([MTP_PROJECTION], bias=False),
        )

    def assistant(self, output: str, *, is_clustered: bool) -> AssistantWeights:
        """Read an assistant, whose matrix of all tokens is named ``output``; see assistant.py."""
        table, stored = None, self._packer.read(output)
        if is_clustered:
            table = self._packer.cast(stored)
            lm_head = self._packer.plain(CENTROIDS, bias=False)
        else:
            lm_head = self._packer.ops.pack_linear(self._kept(stored, 1.0))
        config = self._config
        nothing = torch.zeros(
            1, config.hidden_size, dtype=self._packer.dtype, device=self._packer.device
        )
        weights = DecoderWeights(
            embedding=nothing,  # all rows are given
            layers=tuple(self._layer(i) for i in range(config.num_layers)),
            final_norm=self._packer.norm(FINAL_NORM),
            lm_head=lm_head,
        )
        return AssistantWeights(
            weights,
            self._packer.linear([PRE_PROJECTION], bias=False),
            self._packer.linear([POST_PROJECTION], bias=False),
            table,
        )

    def _output_of(self, token_ids: Tensor) -> PackedLinear:
        """The rows of the output for some ids."""
        token_ids = token_ids.cpu()  # where tensors are read
        stored = self._packer.read(EMBEDDING if self._config.tie_embeddings else LM_HEAD)
        assert not isinstance(stored, QuantizedStack)
        return self._output(in_order(stored, token_ids))

    def _output(self, stored: StoredWeight) -> PackedLinear:
        """Pack the output matrix, or rows of it."""
        weight = self._kept(stored, self._config.fold.logit_scale)
        return self._packer.ops.pack_linear(weight)

    def _kept(self, stored: StoredWeight, factor: float) -> Tensor | QuantizedWeight:
        """A matrix as it is stored where it is kept so, else cast and multiplied."""
        if isinstance(stored, QuantizedWeight) and self._packer.keeps(stored) and factor == 1.0:
            return stored
        return scaled(self._packer.cast(stored), factor)

    def _layers(self) -> Iterator[LayerWeights]:
        for index in range(self._config.num_layers):
            yield self._layer(index)
            self._release()

    def _layer(self, index: int) -> LayerWeights:
        config, prefix, names = self._config, layer_prefix(index), self._config.norms
        spec, experts = config.layers[index], config.layers[index].experts
        extras = self._extras(prefix, experts)
        return LayerWeights(
            mixer_norm=self._packer.layer_norm(prefix, names.attention),
            mixer=self._mixer(index),
            mixer_out_norm=self._packer.layer_norm(prefix, names.attention_out),
            mlp_norm=self._packer.layer_norm(prefix, names.mlp),
            mlp_out_norm=self._packer.layer_norm(prefix, names.mlp_out) if extras is None else None,
            mlp=None if spec.parts == "mixer" else self._mlp.weights(prefix, experts),
            is_parallel=config.is_parallel,
            extras=extras,
            beside=self._beside_attention(index),
        )

    def _mixer(self, index: int) -> MixerWeights | None:
        spec = self._config.layers[index]
        if spec.has_attention:
            return self._attention.weights(index)
        return None if spec.mixer is None else self._recurrent.weights(index, spec.mixer)

    def _beside_attention(self, index: int) -> RecurrentWeights | None:
        spec = self._config.layers[index]
        if not spec.beside_attention:
            return None
        assert isinstance(spec.mixer, Mamba2Spec)
        return self._recurrent.mamba(index, spec.mixer)

    def _extras(self, prefix: str, experts: ExpertsSpec | None) -> Gemma4Extras | None:
        """The parts of a layer that only Gemma 4 has; it alone has a factor on the stream."""
        config = self._config
        if config.layer_factor is None:
            return None
        return Gemma4Extras(
            out_norm=self._packer.norm(f"{prefix}{config.norms.mlp_out}.weight"),
            factor=self._packer.vector(prefix + config.layer_factor).item(),
            beside=None
            if experts is None or experts.beside is None
            else self._beside(prefix, experts, experts.beside),
            token_input=self._token_input(prefix) if config.token_input_size else None,
        )

    def _beside(self, prefix: str, spec: ExpertsSpec, names: BesideNames) -> ExpertsBeside:
        config = self._config
        router_norm = self._packer.float32(prefix + names.router_norm) * config.hidden_size**-0.5
        return ExpertsBeside(
            self._mlp.experts(prefix, spec),
            norm=self._packer.norm(f"{prefix}{names.norm}.weight"),
            router_norm=Norm(router_norm, config.norm_eps),
            out_norm=self._packer.norm(f"{prefix}{names.out_norm}.weight"),
            mlp_out_norm=self._packer.norm(f"{prefix}{names.mlp_out_norm}.weight"),
        )

    def _token_input(self, prefix: str) -> TokenInputWeights:
        return TokenInputWeights(
            gate=self._packer.linear([prefix + TOKEN_GATE], bias=False),
            activation=self._config.activation,
            out=self._packer.linear([prefix + TOKEN_OUT], bias=False),
            out_norm=self._packer.norm(f"{prefix}{TOKEN_OUT_NORM}.weight"),
        )

    def _token_inputs(self) -> TokenInputs:
        """``(norm(c * projected) * w + s * row) / sqrt(2)``: c is hidden ** -0.5 and goes into the
        norm's eps, s is width ** 0.5 and divides w. So no matrix is rounded once more.
        """
        config = self._config
        scale = config.token_input_size**0.5
        return TokenInputs(
            table=self._packer.vector(TOKEN_TABLE),
            projection=self._packer.linear([TOKEN_PROJECTION], bias=False),
            norm=Norm(
                self._packer.float32(TOKEN_NORM) / scale, config.norm_eps * config.hidden_size
            ),
            factor=scale * 0.5**0.5,
        )
