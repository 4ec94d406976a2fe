"""Drafter: the model or head that drafts, loaded in addition to the target."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...core.config import EngineConfig
from ...core.execution.proposer import Proposer
from ...core.model.decoder import Decoder
from ...core.model.formats.checkpoint import OnRead
from ...core.ops.kv_pool import KVPool
from ...core.startup import timed
from ...draft.heads.joined import JoinedHead
from ...draft.heads.mtp import MTP, has_mtp
from ...draft.proposers.kind import DrafterContext, LeftOutError, LoadedDrafter, Pooled
from .drafts import DraftSpec, proposer_kind, texts_between
from .target import load_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """The drafters of a `DraftSpec`, with the draft model or head loaded.

    ``model``: None if the drafts need no weights. ``left_out``: why ``--draft auto`` does not use
    the model; empty if it does.
    """

    spec: DraftSpec
    model: LoadedDrafter | None = None
    left_out: str = ""

    @property
    def with_pool(self) -> list[Pooled]:
        """A list of the draft model or head, if it needs its own KV pool; else an empty list."""
        pooled = None if self.model is None else self.model.pooled
        return [] if pooled is None else [pooled]

    @property
    def stored_head(self) -> JoinedHead | None:
        """The draft head whose KV is stored with the target's KV; None for another drafter."""
        return next((each for each in self.with_pool if isinstance(each, JoinedHead)), None)

    def make_proposer(self, pool: KVPool, own_pools: Sequence[KVPool]) -> Proposer | None:
        """Return the proposer that drafts with the model; None if there is no model.

        ``pool`` is the target's KV pool; ``own_pools`` has the model's own KV pool, if it needs
        one.
        """
        if self.model is None:
            return None
        return self.model.make_proposer(own_pools[0] if own_pools else pool)


@timed("drafter")
def load_drafter(
    path: Path,
    spec: DraftSpec,
    found: Path | None,
    config: EngineConfig,
    target: Decoder,
    on_read: OnRead | None,
) -> Drafter:
    """Load the draft model or head for a target, on the target's device.

    ``path``: folder or file of the target. ``found``: folder or file of the draft model or head.
    ``on_read`` is called with the tensors of a head or MTP layer. Raises `ModelLoadError`, and
    `InvalidRequest` for a drafter that is incompatible with the target or with an option.
    """
    if spec.may_lack_model and config.load_format == "auto" and has_mtp(path, target):
        spec = replace(spec, model=MTP.name, may_lack_model=False)
    if spec.model is None:
        return Drafter(spec=spec)
    beside = DrafterContext(
        path=path,
        target=target,
        config=config,
        found=found,
        is_optional=spec.may_lack_model,
        on_read=on_read,
        load_decoder=partial(load_model, config=config, device=target.device),
        texts_between=partial(texts_between, target_path=path, target=target, config=config),
    )
    try:
        return Drafter(spec=spec, model=proposer_kind(spec.model, found).load(beside))
    except LeftOutError as reason:
        logger.info("draft auto does not use '%s': it %s", spec.model, reason)
        return Drafter(spec=spec, left_out=str(reason))
