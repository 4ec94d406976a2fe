"""SelfProposer: the target in 4 bits drafts for itself, on the target's own KV pages.

The pending token and the nodes of a draft write KV into slots that the verification pass writes
again: those of their positions, and for a tree's side nodes those of spare pages, all of them the
request's own. The history is the target's own KV, of full precision. So a draft has no prompt to
compute, no KV to keep, and nothing to move. Of recurrent layers the same holds for entries of the
request's log, as long as none of them is folded into its state: drafts end with the page.
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
from ..control.cost_model import StepProfile, best_chain
from ..control.profiler import guess_pass, profile_proposer
from .kind import Beside, LeftOutError, LoadedDrafter, ProposerKind
from .tree_grower import DecoderProposer
from .tree_growth import ROOT

SOURCE = "self"
LEAST_BYTES = 64 << 20  # of weights: fewer stay in caches, and 4 bits are read as fast as 16
MEMORY_SHARE = 0.2  # of the free memory, that `auto` may take for a rough copy
LIKELY = 0.7  # odds of its tokens: less than any model is known to have
LEAST_GAIN = 1.05  # over steps without drafts
NUM_TRIED_PAGES = 5


class SelfProposer(DecoderProposer):
    """Drafts with ``decoder``, a rough copy of the target, on the target's ``pool``."""

    source = SOURCE
    taps: Taps = ()
    traits = ProposerTraits(tokens_per_pass=1, catches_up=False, weighs=True)

    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """Grow the drafts of requests of which all but the last token has KV."""
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
        """Learn from verified trees; the runner has moved the KV, which is the target's."""
        self._grower.judge(verified)


# -- loading --------------------------------------------------------------------------------------


def _load(beside: Beside) -> LoadedDrafter:
    """Round the target to 4 bits; one that is optional only where that pays."""
    return LoadedDrafter(partial(SelfProposer, _rough_copy(beside)))


def _rough_copy(beside: Beside) -> Decoder:
    target = beside.target
    if not beside.is_optional:
        try:
            return rough_decoder(target)
        except NoRoughCopyError as reason:
            raise ModelLoadError(
                f"draft '{SOURCE}' {reason}: leave it out, and look-ups draft, a draft model or a "
                "trained head"
            ) from None
    try:
        copy = rough_decoder(
            target, least_item=2, least_bytes=LEAST_BYTES, memory_share=MEMORY_SHARE
        )
    except NoRoughCopyError as reason:
        raise LeftOutError(str(reason)) from None
    pass_s, gain = self_draft_price(target, copy)
    if gain < LEAST_GAIN:
        raise LeftOutError(f"would not pay: a pass takes {pass_s:.2f} of a step")
    return copy


def self_draft_price(target: Decoder, copy: Decoder) -> tuple[float, float]:
    """Price of a pass of a rough copy as a share of a step; and gain of chains at `LIKELY` odds.

    Measured for one request, with few tokens behind it.
    """
    page_size = EngineConfig().sizes(target.device.type).page_size  # has kernels of its own
    pool = sequence_pool(target, NUM_TRIED_PAGES, 1, page_size=page_size)
    forward, _ = guess_pass(target, pool)
    draft = profile_proposer(SelfProposer(copy, pool), (1,))
    return draft[1] / forward[1], best_chain(StepProfile(forward, draft), LIKELY)


def _check(config: EngineConfig) -> None:
    if config.quantize == "int4":
        message = f"draft '{SOURCE}' rounds weights of 8 bits or more, not int4 (--quantize)"
        raise InvalidRequest(message, param="draft")


SELF = ProposerKind(name=SOURCE, load=_load, check=_check)
