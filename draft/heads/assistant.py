"""Proposer for Gemma 4's assistants, whose network is in core/model/drafting/assistant.py.

It drafts level by level. A feature is the output of the target's final norm. Drafts have no KV:
each token is computed from its own feature and the target's KV only, so a token
costs the same in a tree as in a chain.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ...core.config import format_size
from ...core.errors import InvalidRequest, ModelLoadError
from ...core.execution.proposer import PageRows
from ...core.model.decoder import Decoder, OwnDecoder
from ...core.model.drafting.assistant import Assistant, is_assistant, load_assistant
from ...core.model.formats.checkpoint import OnRead
from ...core.ops.batch import DeviceTokens, IntArray, SamplingPlan
from ...core.ops.kv_pool import KVPool
from ..proposers.kind import DrafterContext, LoadedDrafter, ProposerKind
from ..proposers.tree_grower import Scored
from .common.base import PackedHead
from .common.head_kv import Written
from .common.layers import MOST_PASSES, Head, TapConfig
from .common.packing import PassLayout, PassRows, filled, seen_kv
from .common.proposer import Drafting, DraftStart, HeadProposer, Query, features_of
from .joined import JoinedHead

logger = logging.getLogger(__name__)
_NO_SLOTS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class AssistantHeadConfig(TapConfig):
    """The configuration of an assistant that is used as a trained head."""

    kind: ClassVar[str] = "assistant"

    @property
    @override
    def tokens_per_pass(self) -> int:
        return 1

    @property
    @override
    def longest(self) -> int:
        return MOST_PASSES


class AssistantProposer(HeadProposer):
    """Drafts with an assistant, which reads the target's KV and its own previous output."""

    def __init__(
        self,
        assistant: Assistant,
        head: Head,
        pool: KVPool,
        target: OwnDecoder,
    ) -> None:
        """Make a proposer; ``pool``: the target's pool."""
        nothing = KVPool(
            pool.num_pages,
            **head.config.kv_shape._asdict(),
            page_size=pool.page_size,
            dtype=target.dtype,
            device=target.device,
        )
        super().__init__(head, nothing, target)
        self._assistant, self._read = assistant, pool
        self._layout = PassLayout(target.ops, target.device)
        self._final_norm = partial(target.ops.norm, norm=target.weights.final_norm)

    @property
    def stored(self) -> Sequence[PageRows]:
        """The data per page that KV tiers store: none, because the assistant has no pages."""
        return ()

    @override
    def warm_up(self, max_len: int, num_best: int) -> None:
        wanted = self.wanted(num_best)
        if self._assistant.clusters is not None:
            wanted = wanted._replace(draws=None)
        self._assistant.decoder.warm_up(self._read, max_len, wanted)

    def write_head_kv(self, written: Written) -> Tensor:
        """Return the target's last hidden states after its final norm; there is no KV to write."""
        return self._final_norm(written.taps.contiguous())

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """Start drafting with one pass per level of the trees."""
        del num_drafted
        return _AssistantDrafting(self._assistant, self._layout, self._read, starts)


class _AssistantDrafting(Drafting):
    """Computes a level of the trees, one row per token.

    All rows of a request have the position of its last token.
    """

    def __init__(
        self,
        assistant: Assistant,
        layout: PassLayout,
        pool: KVPool,
        starts: Sequence[DraftStart],
    ) -> None:
        self._assistant, self._layout, self._pool = assistant, layout, pool
        self._features = features_of(starts)  # [queries of the previous call, hidden]
        self._anchors = [len(start.scheduled.tokens) - 1 for start in starts]
        self._seen = [seen_kv(start.scheduled, 0, pool.page_size) for start in starts]

    def score(
        self,
        queries: Sequence[Query],
        draws: SamplingPlan | None,
        device_tokens: DeviceTokens | None = None,  # noqa: ARG002
    ) -> Scored:
        """Return the logits of the token after each token in ``queries``."""
        features = self._features
        if queries[0].level:
            parents = torch.tensor([each.parent for each in queries], device=features.device)
            features = features[parents]
        rows = [self._row(each) for each in queries]
        batch = self._layout.rows(self._pool.page_size, rows, wants_logits=True)
        before = filled(features, batch.num_rows)
        found = self._assistant.forward(batch, self._pool, before, draws)
        self._features = found.hidden[: len(queries)]
        return Scored.of(found)

    def _row(self, query: Query) -> PassRows:
        # The slot is a placeholder: an assistant writes no KV.
        anchor, seen = self._anchors[query.request], self._seen[query.request]
        return PassRows((query.token_id,), anchor, (0,), seen, _NO_SLOTS)


def join_assistant(
    path: Path, target: Decoder, *, keeps_packed: bool, on_read: OnRead | None = None
) -> JoinedHead:
    """Load the assistant in a folder and join it to its target.

    ``keeps_packed``: whether quantised matrices keep their stored format. ``on_read`` is called
    with every tensor. Raises `ModelLoadError` for an assistant that does not fit the target, and
    for a target that is not an `OwnDecoder`.
    """
    if not isinstance(target, OwnDecoder):
        raise ModelLoadError(
            f"{path}: an assistant reads keys and values of its target's own decoder, and "
            f"{target.config.model_type} is computed by transformers' modules"
        )
    assistant = load_assistant(path, target, keeps_packed=keeps_packed, on_read=on_read)
    config = target.config
    head = Head(
        AssistantHeadConfig(
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            hidden_size=config.hidden_size,
            taps=(config.num_layers,),
        )
    )
    layers = assistant.decoder.config.layers
    read = sorted({layer.kv_of for layer in layers if layer.kv_of is not None})
    logger.info(
        "assistant %s: %d layers that attend to the KV of target layers %s, with %s of weights",
        path.name, len(layers), read, format_size(assistant.num_bytes),
    )  # fmt: skip
    make = partial(AssistantProposer, assistant, head)
    return JoinedHead(head.config, target, PackedHead(make, reads_target=True))


def _load(context: DrafterContext) -> LoadedDrafter:
    found = context.found
    assert found is not None
    if context.config.tp > 1:
        why = f"draft {found.name} reads the target's whole KV and cannot be combined with --tp"
        raise InvalidRequest(why, param="draft")
    return join_assistant(
        found, context.target, keeps_packed=context.keeps_packed, on_read=context.on_read
    ).loaded


ASSISTANT = ProposerKind(name=AssistantHeadConfig.kind, recognises=is_assistant, load=_load)
