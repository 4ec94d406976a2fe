"""SelfProposer: a 4-bit copy of the target drafts for it, on the target's own KV pages.

The copy reads the target's own KV, which the target computed with its unrounded weights. It writes
the KV of the last token and of draft tokens only, to slots of the request's own pages that the
verification pass writes again: the slots of their positions, or slots of spare pages for nodes off
the trunk. So the copy computes no prompt, keeps no KV and moves no KV.

For recurrent layers, the copy writes entries to the request's log. The verification pass writes
them again unless they were folded into the state, which happens at the end of a page. So a draft
must not go beyond the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest, ModelLoadError
from ...core.execution.proposer import VerifiedRequest
from ...core.interface.draft import Draft
from ...core.interface.plan import ScheduledRequest
from ...core.interface.protocols import ProposerTraits
from ...core.model.decoder import Decoder, sequence_pool
from ...core.model.drafting.rough_copy import NoRoughCopyError, rough_decoder
from ...core.ops.batch import ForwardOutput, RaggedBatch, Taps
from ..control.cost_model import StepProfile, best_chain_speedup
from ..control.profiler import guess_pass, profile_proposer
from .kind import DrafterContext, LeftOutError, LoadedDrafter, ProposerKind
from .tree_grower import DecoderProposer
from .tree_growth import ROOT

SOURCE = "self"
LEAST_BYTES = 64 << 20  # minimum size of the weights: in caches, 4 bits are read as fast as 16
MEMORY_SHARE = 0.2  # maximum share of the free memory for a rough copy with `auto`
LIKELY = 0.7  # assumed acceptance probability of a token; every measured model exceeds it
LEAST_GAIN = 1.05  # minimum speed-up over steps without drafts
NUM_TRIED_PAGES = 5


class SelfProposer(DecoderProposer):
    """Drafts with ``decoder``, a rough copy of the target, on the target's ``pool``."""

    source = SOURCE
    taps: Taps = ()
    traits = ProposerTraits(tokens_per_pass=1, catches_up=False, weighs=True)

    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """Draft for requests whose tokens all have KV, except for the last one."""
        self._grower.begin()
        trees = [self._grower.tree(scheduled) for scheduled in requests]
        begun = [tree for tree in trees if self._may_draft(tree.scheduled)]
        if begun:
            first = self._grower.compute([(tree, ROOT) for tree in begun])
            self._grower.grow(begun, first)
        return self._grower.drafts(trees)

    def _may_draft(self, scheduled: ScheduledRequest) -> bool:
        return self._grower.has_room(scheduled) and scheduled.start == len(scheduled.tokens) - 1

    def observe(
        self,
        batch: RaggedBatch,  # noqa: ARG002
        output: ForwardOutput,  # noqa: ARG002
        verified: Sequence[VerifiedRequest],
    ) -> None:
        """Learn from verified trees; the runner has already moved the target's KV."""
        self._grower.judge(verified)


# -- loading --------------------------------------------------------------------------------------


def _load(context: DrafterContext) -> LoadedDrafter:
    """Round the target to 4 bits.

    Raises `LeftOutError` for an optional drafter that is unavailable or would not speed up
    decoding.
    """
    return LoadedDrafter(partial(SelfProposer, _rough_copy(context)))


def _rough_copy(context: DrafterContext) -> Decoder:
    target = context.target
    if not context.is_optional:
        try:
            return rough_decoder(target)
        except NoRoughCopyError as reason:
            raise ModelLoadError(
                f"draft '{SOURCE}' {reason}; use look-ups, a draft model or a trained head instead"
            ) from None
    try:
        copy = rough_decoder(
            target, least_item=2, least_bytes=LEAST_BYTES, memory_share=MEMORY_SHARE
        )
    except NoRoughCopyError as reason:
        raise LeftOutError(str(reason)) from None
    pass_s, gain = self_draft_price(target, copy)
    if gain < LEAST_GAIN:
        raise LeftOutError(
            f"would not be faster: its pass takes {pass_s:.2f} of the time of a step"
        )
    return copy


def self_draft_price(target: Decoder, copy: Decoder) -> tuple[float, float]:
    """Return how long a pass of a rough copy takes, and the speed-up by drafting with it.

    The time is a share of the time of the target's pass. Both passes are measured for one request
    with a short context. The speed-up assumes that the target accepts a token of a chain with the
    probability `LIKELY`.
    """
    # The default page size has specialised kernels.
    page_size = EngineConfig().sizes(target.device.type).page_size
    pool = sequence_pool(target, NUM_TRIED_PAGES, 1, page_size=page_size)
    forward, _ = guess_pass(target, pool)
    draft = profile_proposer(SelfProposer(copy, pool), (1,))
    return draft[1] / forward[1], best_chain_speedup(StepProfile(forward, draft), LIKELY)


def _check(config: EngineConfig) -> None:
    if config.quantize == "int4":
        message = f"draft '{SOURCE}' rounds weights of 8 bits or more, not int4 (--quantize)"
        raise InvalidRequest(message, param="draft")


SELF = ProposerKind(name=SOURCE, load=_load, check=_check)
