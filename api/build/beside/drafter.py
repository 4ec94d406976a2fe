"""Drafter: the model or head that drafts, loaded beside the target."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from ....core.config import EngineConfig
from ....core.errors import InvalidRequest
from ....core.execution.proposer import Proposer
from ....core.model.decoder import Decoder
from ....core.model.description.shapes import LM_HEAD
from ....core.model.drafting.assistant import is_assistant
from ....core.model.formats.checkpoint import OnRead
from ....core.model.opening import open_model
from ....core.ops.kv_pool import KVPool
from ....core.startup import timed
from ....draft.control.profiler import TriedProposer
from ....draft.heads.assistant import join_assistant
from ....draft.heads.joined import JoinedHead, load_head
from ....draft.heads.kinds import head_kind
from ....draft.proposers.lm_proposer import LmProposer
from ....draft.proposers.self_draft import SelfProposer
from ....draft.proposers.text_proposer import TextProposer
from ...text.token_text import TokenText
from ..drafts import (
    MTP,
    SELF,
    DraftSpec,
    has_mtp,
    keeps_packed,
    mtp_head,
    rough_copy,
    texts_between,
)
from ..target import load_model

logger = logging.getLogger(__name__)
Model: TypeAlias = tuple[Decoder, KVPool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """The model or head of a `DraftSpec`; none where look-ups alone draft, or nothing does.

    ``no_self_draft``: why `auto` leaves out the self-draft. ``texts``: of the tokens of the target
    and of a draft model whose tokens are others.
    """

    spec: DraftSpec
    model: Decoder | JoinedHead | None
    no_self_draft: str
    texts: tuple[TokenText, TokenText] | None

    @property
    def with_pool(self) -> list[Decoder | JoinedHead]:
        """The model if it has a KV pool of its own: other drafters read the target's, or none."""
        model = self.model
        reads_target = (
            model.reads_target if isinstance(model, JoinedHead) else self.spec.model == SELF
        )
        return [] if model is None or reads_target else [model]

    @property
    def stored_head(self) -> JoinedHead | None:
        """The head whose KV is stored beside the target's."""
        return next((each for each in self.with_pool if isinstance(each, JoinedHead)), None)

    def make_proposer(
        self, pool: KVPool, own_pools: Sequence[KVPool]
    ) -> tuple[Proposer | None, Model | TriedProposer | None]:
        """Make the proposer, and name what to measure the price of its passes by.

        ``own_pools``: that of `with_pool`; none if it drafts on the target's ``pool``.
        """
        draft = self.model
        if draft is None:
            return None, None
        own_pool = own_pools[0] if own_pools else pool
        if isinstance(draft, JoinedHead):
            head = draft.proposer(own_pool)
            return head, head
        if own_pool is pool:
            return SelfProposer(draft, pool), (draft, pool)
        if self.texts is not None:
            theirs, own = self.texts
            return TextProposer(draft, own_pool, target=theirs, own=own), (draft, own_pool)
        return LmProposer(draft, own_pool), (draft, own_pool)


@timed("drafter")
def load_drafter(
    path: Path,
    spec: DraftSpec,
    found: Path | None,
    config: EngineConfig,
    target: Decoder,
    on_read: OnRead | None,
) -> Drafter:
    """Load what drafts for a target, on its device.

    ``path``: of the target. ``found``: where a draft model or head is. ``on_read`` is called with
    the tensors of a head, or of an MTP layer. Raises `ModelLoadError`, or `InvalidRequest` for a
    draft that the target or an option does not go with.
    """
    if spec.may_lack_model and config.load_format == "auto" and has_mtp(path, target):
        spec = replace(spec, model=MTP, may_lack_model=False)
    draft, no_self_draft = _load_draft(path, spec, found, config, target, on_read)
    texts = None
    if found is not None and draft is not None and not isinstance(draft, JoinedHead):
        texts = texts_between(found, draft, path, target, config)
    return Drafter(spec=spec, model=draft, no_self_draft=no_self_draft, texts=texts)


def _load_draft(
    path: Path,
    spec: DraftSpec,
    found: Path | None,
    config: EngineConfig,
    target: Decoder,
    on_read: OnRead | None,
) -> tuple[Decoder | JoinedHead | None, str]:
    """The model that drafts, and why `auto` leaves out the self-draft."""
    if spec.model == SELF:
        copy = rough_copy(target, spec)
        if not isinstance(copy, str):
            return copy, ""
        logger.info("auto drafts without '%s': it %s", SELF, copy)
        return None, copy
    if spec.model == MTP:
        return mtp_head(path, target, config, on_read), ""
    if found is None:
        return None, ""
    if is_assistant(found):
        if config.tp > 1:
            why = f"draft {found.name} reads the target's KV, of which --tp leaves a part here"
            raise InvalidRequest(why, param="draft")
        return join_assistant(found, target, keeps_packed=keeps_packed(config), on_read=on_read), ""
    if head_kind(found) is not None:
        return load_head(found, target, partial(_output_matrix, path), on_read), ""
    return load_model(found, config, target.device), ""


def _output_matrix(path: Path) -> torch.Tensor:
    """The output layer of a checkpoint, [vocab, hidden]."""
    found = open_model(path).checkpoint.read(LM_HEAD)
    return found if isinstance(found, torch.Tensor) else found.dequantize()
