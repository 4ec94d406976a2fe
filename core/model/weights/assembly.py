"""Assembly: reads all tensors of a decoder and packs them as its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.base import Ops
from ...ops.parallel import Comm
from ...ops.quantize import QuantizedStack, QuantizedWeight, StoredWeight
from ...ops.weights import DecoderWeights, LayerWeights, Norm, PackedLinear
from ..description.config import DecoderConfig
from ..description.fold import rounded, scaled
from ..description.page_layout import PageLayout
from ..description.tensors import (
    CENTROIDS,
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    MTP_EMBEDDING_NORM,
    MTP_HIDDEN_NORM,
    MTP_PROJECTION,
    POST_PROJECTION,
    PRE_PROJECTION,
    LayerPart,
    TensorSpec,
    linear_of,
)
from ..formats.checkpoint import Read
from .gemma4 import Gemma4Inputs
from .layer import Layer
from .packer import Packer, in_order, norm_of


class MtpInput(LayerPart):
    """Declared tensors that make the input of an MTP (multi-token prediction) layer."""

    def __init__(self, config: DecoderConfig) -> None:
        hidden = config.hidden_size
        self.embedding_norm = norm_of(config, MTP_EMBEDDING_NORM)
        self.hidden_norm = norm_of(config, MTP_HIDDEN_NORM)
        self.projection = linear_of(MTP_PROJECTION, hidden, 2 * hidden)


class MtpWeights(NamedTuple):
    """Packed weights of an MTP layer. ``decoder`` has the layer; the others make its input."""

    decoder: DecoderWeights
    embedding_norm: Norm
    hidden_norm: Norm
    projection: PackedLinear


class AssistantEnds(LayerPart):
    """Declared tensors of an assistant before and after its layers.

    An assistant is a small model that drafts for a target. ``width``: the target's hidden size.
    ``output``: name of the output matrix over the whole vocabulary. ``num_clusters``: number of
    clusters of the vocabulary; 0: no clusters.
    """

    def __init__(self, config: DecoderConfig, width: int, output: str, num_clusters: int) -> None:
        hidden = config.hidden_size
        self.output = TensorSpec(output, (config.vocab_size, hidden))
        self.pre_projection = linear_of(PRE_PROJECTION, hidden, 2 * width)
        self.post_projection = linear_of(POST_PROJECTION, width, hidden)
        centroids = linear_of(CENTROIDS, num_clusters, hidden, is_plain=True)
        self.centroids = centroids if num_clusters else None


class AssistantWeights(NamedTuple):
    """Packed weights of an assistant: its layers, and the projections from and to the target.

    ``table`` [vocab, hidden]: the output matrix over the whole vocabulary, if the decoder's own
    output scores clusters; otherwise None.
    """

    decoder: DecoderWeights
    pre_projection: PackedLinear
    post_projection: PackedLinear
    table: Tensor | None


class Assembly:
    """Reader of a whole model, which reads, casts and packs its weights layer by layer.

    So at most one layer is in memory twice. ``keeps_packed``: quantised weights stay as they are
    stored if the backend has kernels for them.
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
        """Prepare to read a model; nothing is read yet.

        ``read`` returns a stored tensor by name. ``layout``: page layout, if the decoder uses the
        pages of another model. ``comm``: connection to the other ranks, if ``config`` and ``read``
        describe one rank's shard. ``release`` is called after each layer, to free memory.
        """
        self._config, self._release = config, release
        layout = layout or PageLayout.of(config)
        self._packer = Packer(
            config, read, ops, dtype, device, keeps_packed=keeps_packed, layout=layout, comm=comm
        )
        self.linear_specs = self._packer.linear_specs

    def weights(self) -> DecoderWeights:
        """Read and pack the whole model.

        Only rank 0 computes logits, so the output matrix of other ranks is a placeholder.
        """
        config, fold, packer = self._config, self._config.fold, self._packer
        embedding, token_inputs = packer.read(EMBEDDING), None
        is_tied = config.tie_embeddings
        is_first = packer.comm is None or packer.comm.rank == 0
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
        if config.token_input_size:
            token_inputs = Gemma4Inputs(config).pack(packer)
        return DecoderWeights(
            embedding=table,
            layers=tuple(self._layers()),
            final_norm=packer.norm(norm_of(config, FINAL_NORM)),
            lm_head=lm_head,
            token_inputs=token_inputs,
            logit_cap=config.logit_cap,
        )

    def mtp(self, model: DecoderWeights, draft_ids: Tensor | None) -> MtpWeights:
        """Read and pack the MTP layer of ``model``, as core/model/drafting/mtp.py describes it.

        ``draft_ids``: the only token ids that its output matrix scores; None: the layer uses the
        output matrix of ``model``.
        """
        packer, given = self._packer, MtpInput(self._config)
        weights = DecoderWeights(
            embedding=model.embedding,
            layers=(self._layer(0),),
            final_norm=packer.norm(norm_of(self._config, FINAL_NORM)),
            lm_head=model.lm_head if draft_ids is None else self._output_of(draft_ids),
            logit_cap=model.logit_cap,
        )
        return MtpWeights(
            weights,
            packer.norm(given.embedding_norm),
            packer.norm(given.hidden_norm),
            packer.linear(given.projection),
        )

    def assistant(self, ends: AssistantEnds) -> AssistantWeights:
        """Read and pack an assistant, as core/model/drafting/assistant.py describes it."""
        config, packer = self._config, self._packer
        table, stored = None, packer.read(ends.output.name)
        if ends.centroids is None:
            lm_head = packer.ops.pack_linear(self._kept(stored, 1.0))
        else:
            table, lm_head = packer.cast(stored), packer.linear(ends.centroids)
        nothing = torch.zeros(1, config.hidden_size, dtype=packer.dtype, device=packer.device)
        weights = DecoderWeights(
            embedding=nothing,  # An assistant's inputs are vectors, not token ids.
            layers=tuple(self._layer(i) for i in range(config.num_layers)),
            final_norm=packer.norm(norm_of(config, FINAL_NORM)),
            lm_head=lm_head,
        )
        return AssistantWeights(
            weights,
            packer.linear(ends.pre_projection),
            packer.linear(ends.post_projection),
            table,
        )

    def _output_of(self, token_ids: Tensor) -> PackedLinear:
        """Return a packed output matrix with only the rows of ``token_ids``."""
        token_ids = token_ids.cpu()  # The stored tensor is on the CPU.
        stored = self._packer.read(EMBEDDING if self._config.tie_embeddings else LM_HEAD)
        assert not isinstance(stored, QuantizedStack)
        return self._output(in_order(stored, token_ids))

    def _output(self, stored: StoredWeight) -> PackedLinear:
        """Pack the stored output matrix, or some of its rows."""
        weight = self._kept(stored, self._config.fold.logit_scale)
        return self._packer.ops.pack_linear(weight)

    def _kept(self, stored: StoredWeight, factor: float) -> Tensor | QuantizedWeight:
        """Return a matrix as it is stored if kernels support it, otherwise cast and scaled.

        A matrix with a ``factor`` other than 1 is always cast.
        """
        if isinstance(stored, QuantizedWeight) and self._packer.keeps(stored) and factor == 1.0:
            return stored
        return scaled(self._packer.cast(stored), factor)

    def _layers(self) -> Iterator[LayerWeights]:
        for index in range(self._config.num_layers):
            yield self._layer(index)
            self._release()

    def _layer(self, index: int) -> LayerWeights:
        return Layer(self._config, index).pack(self._packer)
