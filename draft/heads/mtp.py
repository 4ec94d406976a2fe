"""Proposer for MTP layers: a `ColumnProposer` with the layer of core/model/drafting/mtp.py.

A feature is the target's last hidden state after the final norm. The layer reads the feature of a
position and the token after it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ...core.config import format_size
from ...core.errors import InvalidRequest, ModelLoadError
from ...core.model.decoder import Decoder, OwnDecoder
from ...core.model.description.config import DecoderConfig
from ...core.model.drafting.mtp import MtpLayer, count_mtp_layers, load_mtp_layer
from ...core.model.formats.checkpoint import OnRead
from ...core.model.opening import open_model
from ...core.ops.base import RoughOps
from ...core.ops.batch import DeviceTokens, SamplingPlan
from ...core.ops.kv_pool import KVPool, KvShape
from ..proposers.kind import DrafterContext, LoadedDrafter, ProposerKind
from ..proposers.tree_grower import Scored
from .common.base import PackedHead
from .common.columns import ColumnProposer, Columns
from .common.head_kv import Written
from .common.layers import MOST_PASSES, Head, TapConfig
from .common.packing import PassLayout, PassRows, filled
from .joined import JoinedHead

logger = logging.getLogger(__name__)
LEAST_ROUGH_BYTES = 32 << 20  # minimum size of an output layer to round: caches hold smaller ones

# The layer drafts only `NUM_DRAFT_IDS` ids if the vocabulary has more than twice that number: its
# last `NUM_LAST_IDS` ids, which include the tokens of chat templates, and its first ids, which are
# the most frequent ones.
NUM_DRAFT_IDS, NUM_LAST_IDS = 32768, 1024


@dataclass(frozen=True, kw_only=True)
class MtpConfig(TapConfig):
    """The configuration of an MTP layer that is used as a trained head."""

    kind: ClassVar[str] = "mtp"
    first_position: ClassVar[int] = 1  # position 0 has no column
    keeps_page_features: ClassVar[bool] = True

    kv: KvShape

    @property
    @override
    def tokens_per_pass(self) -> int:
        return 1

    @property
    @override
    def longest(self) -> int:
        return MOST_PASSES

    @property
    @override
    def kv_shape(self) -> KvShape:
        return self.kv


class MtpProposer(ColumnProposer):
    """Drafts with the target's own MTP layer.

    After the first draft token, the layer reads its own output instead of the target's hidden
    states.
    """

    def __init__(self, layer: MtpLayer, head: Head, pool: KVPool, target: OwnDecoder) -> None:
        super().__init__(head, pool, target)
        self._layer = layer
        self._layout = PassLayout(target.ops, target.device)
        self._final_norm = partial(target.ops.norm, norm=target.weights.final_norm)
        self._min_rows = target.ops.min_rows

    @override
    def warm_up(self, max_len: int, num_best: int) -> None:
        self._layer.decoder.warm_up(self.pool, max_len, self.wanted(num_best))

    def features(self, taps: Tensor) -> Tensor:
        """Return the target's last hidden states after its final norm."""
        return self._final_norm(taps.contiguous())

    def write_columns(self, before: Tensor, written: Written) -> None:
        """Write the keys and values of columns, without computing the rest of the layer."""
        batch = self._layout.writing(self.pool.page_size, written)
        token_ids = filled(written.token_ids, self._min_rows)
        inputs = self._layer.inputs(token_ids, filled(before, self._min_rows))
        self._layer.write_kv(batch, self.pool, inputs)

    def compute(
        self,
        features: Tensor,
        rows: Sequence[PassRows],
        draws: SamplingPlan | None,
        device_tokens: DeviceTokens | None,  # noqa: ARG002
    ) -> Columns:
        """Compute columns with the MTP layer and its output matrix."""
        batch = self._layout.rows(self.pool.page_size, rows, wants_logits=True)
        before = filled(features, batch.num_rows)
        found = self._layer.forward(batch, self.pool, before, draws)
        return Columns(Scored.of(found), found.hidden[: len(rows)])


def load_mtp(
    path: Path, target: Decoder, *, keeps_packed: bool, on_read: OnRead | None = None
) -> JoinedHead:
    """Load the MTP layer of a target's checkpoint and join it to the target.

    ``keeps_packed``: whether quantised matrices keep their stored format. ``on_read`` is called
    with every tensor. Raises `ModelLoadError` if the checkpoint has no MTP layer, or if the target
    is not an `OwnDecoder`.
    """
    if not isinstance(target, OwnDecoder):
        raise ModelLoadError(
            f"{path}: MTP layers need this engine's own decoder, and "
            f"{target.config.model_type} is computed by transformers' modules"
        )
    draft_ids = frequent_ids(target.config)
    if draft_ids is not None:
        draft_ids = draft_ids.to(target.device)
    layer = load_mtp_layer(
        path, target, keeps_packed=keeps_packed, draft_ids=draft_ids, on_read=on_read
    )
    layer = with_rough_output(layer)
    joined = join_mtp(layer, target)
    logger.info(
        "MTP: 1 layer of %s drafts %d of %d token ids, with %s of weights and %d bytes of KV per "
        "token", path.name, joined.config.draft_vocab_size, target.config.vocab_size,
        format_size(layer.num_bytes), joined.bytes_per_page(page_size=1),
    )  # fmt: skip
    return joined


def with_rough_output(layer: MtpLayer, least_bytes: int = LEAST_ROUGH_BYTES) -> MtpLayer:
    """Round the layer's output matrix to 4 bits, if it has 16-bit weights and enough of them.

    ``least_bytes``: minimum size of a matrix to round. Most of the memory traffic of a pass comes
    from the output matrix, because a pass reads only one layer besides it.
    """
    decoder, output = layer.decoder, layer.decoder.weights.lm_head
    size = output.weight.nbytes
    if not isinstance(decoder.ops, RoughOps) or size < max(least_bytes, 2 * output.num_weights):
        return layer
    weights = replace(decoder.weights, lm_head=decoder.ops.rough_copy(output, decoder.dtype))
    own = OwnDecoder(decoder.config, weights, decoder.ops)
    return replace(layer, decoder=own, has_own_output=True)


def join_mtp(layer: MtpLayer, target: OwnDecoder) -> JoinedHead:
    """Return a head that drafts with an MTP layer of its target."""
    config, (kv,) = target.config, layer.decoder.shapes
    head = Head(
        MtpConfig(
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size if layer.draft_ids is None else len(layer.draft_ids),
            target_hidden_size=config.hidden_size,
            hidden_size=config.hidden_size,
            taps=(config.num_layers,),
            kv=kv,
        )
    )
    head.draft_ids = layer.draft_ids
    return JoinedHead(head.config, target, PackedHead(partial(MtpProposer, layer, head)))


def frequent_ids(config: DecoderConfig) -> Tensor | None:
    """Return the ids to draft, [NUM_DRAFT_IDS], or None to draft all ids of a small vocabulary."""
    if config.vocab_size <= 2 * NUM_DRAFT_IDS:
        return None
    first = torch.arange(NUM_DRAFT_IDS - NUM_LAST_IDS)
    return torch.cat((first, torch.arange(config.vocab_size - NUM_LAST_IDS, config.vocab_size)))


def has_mtp(path: Path, target: Decoder) -> bool:
    """Whether the target's checkpoint has an MTP layer with which `--draft auto` can draft.

    Logs a warning for an incomplete layer.
    """
    if not isinstance(target, OwnDecoder) or target.config.mtp is None:
        return False
    try:
        return count_mtp_layers(*open_model(path)) > 0
    except ModelLoadError as problem:
        logger.warning("draft auto does not use '%s': %s", MTP.name, problem)
        return False


def _load(context: DrafterContext) -> LoadedDrafter:
    """Load the MTP layer of the target's checkpoint.

    Raises `InvalidRequest` if the checkpoint has no usable MTP layer.
    """
    try:
        return load_mtp(
            context.path, context.target, keeps_packed=context.keeps_packed, on_read=context.on_read
        ).loaded
    except ModelLoadError as problem:
        raise InvalidRequest(f"draft '{MTP.name}': {problem}", param="draft") from None


MTP = ProposerKind(name=MtpConfig.kind, load=_load)
