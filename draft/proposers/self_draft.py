"""SelfProposer: a 4-bit copy of the target drafts for it, on the target's own KV pages.

The pending token and the nodes of a draft write KV into slots that the verification pass writes
again: the slots of their positions, and slots of spare pages for nodes off the trunk. All belong to
the request. The context is the target's own KV, in full precision. So the drafter computes no
prompt, keeps no KV and moves no KV. In recurrent layers the same holds for the entries of the
request's log, as long as they are not folded into its state; so a draft ends with the page.
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
        """Draft for requests whose tokens all have KV except the last one."""
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
        """Learn from verified trees; the KV is the target's, so the runner has moved it."""
        self._grower.judge(verified)


# -- loading --------------------------------------------------------------------------------------


def _load(beside: Beside) -> LoadedDrafter:
    """Round the target to 4 bits. Raises `LeftOutError` if it is optional and does not pay."""
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
    """Return the time of a rough copy's pass as a share of the target's, and the speed-up.

    The speed-up assumes chains whose tokens have the acceptance probability `LIKELY`. Both are
    measured for one request with a short context.
    """
    # The default page size has specialised kernels.
    page_size = EngineConfig().sizes(target.device.type).page_size
    pool = sequence_pool(target, NUM_TRIED_PAGES, 1, page_size=page_size)
    forward, _ = guess_pass(target, pool)
    draft = profile_proposer(SelfProposer(copy, pool), (1,))
    return draft[1] / forward[1], best_chain(StepProfile(forward, draft), LIKELY)


def _check(config: EngineConfig) -> None:
    if config.quantize == "int4":
        message = f"draft '{SOURCE}' rounds weights of 8 bits or more, not int4 (--quantize)"
        raise InvalidRequest(message, param="draft")


SELF = ProposerKind(name=SOURCE, load=_load, check=_check)
