"""The speculator that is built for a proposer, by what the proposer says of itself."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from foretoken.api.build.drafts import DraftSpec, make_speculator
from foretoken.core.config import EngineConfig
from foretoken.core.interface.draft import DraftPlan
from foretoken.core.interface.protocols import NO_SPECULATION, ProposerTraits
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.draft.control.controller import StepCandidates
from foretoken.draft.control.cost_model import StepProfile
from foretoken.draft.speculator import DraftSpeculator
from support.proposers import BareProposer

ROWS = (1, 4, 16)
PROFILE = StepProfile({n: 1.0 + 0.01 * n for n in ROWS}, dict.fromkeys(ROWS, 0.01))


class Third(BareProposer):
    """Neither a draft model nor a trained head."""

    def __init__(self, **traits: Any) -> None:
        self.traits = ProposerTraits(**traits)


@pytest.mark.parametrize(("speculation", "count"), [("auto", 0), ("off", 0), (4, 1)])
def test_a_depth_without_a_drafter_is_told(speculation, count, caplog) -> None:
    config = EngineConfig(draft="none", speculation=speculation)
    speculator, _ = make_speculator(config, DraftSpec(), overlaps=False)
    assert speculator is NO_SPECULATION
    assert caplog.text.count("has no effect") == count


@pytest.mark.parametrize(
    ("tokens_per_pass", "catches_up", "weighs"), [(1, True, True), (5, False, False)]
)
def test_any_proposer_is_priced_by_its_traits(tokens_per_pass, catches_up, weighs) -> None:
    third = Third(tokens_per_pass=tokens_per_pass, catches_up=catches_up, weighs=weighs)
    spec = DraftSpec(("suffix",), "a third kind")
    speculator, costs = make_speculator(
        EngineConfig(),
        spec,
        overlaps=False,
        proposer=third,  # type: ignore[arg-type]
    )
    costs.load(PROFILE)
    seen, plan = _decision(speculator)
    assert seen.tokens_per_pass == tokens_per_pass
    assert seen.num_uncached_draft_tokens.tolist() == [8 if catches_up else 0]
    assert plan.max_draft > 0
    assert (bool(plan.row_prices), plan.may_branch) == (weighs, weighs)


def _decision(speculator: Any) -> tuple[StepCandidates, DraftPlan]:
    """Return the controller's candidates for one request of nine tokens, and the plan for it."""
    assert isinstance(speculator, DraftSpeculator)
    seen, allocate = [], speculator.controller.allocate

    def watched(candidates: StepCandidates) -> Any:
        seen.append(candidates)
        return allocate(candidates)

    speculator.controller.allocate = watched  # type: ignore[method-assign]
    sampling = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=8)
    request = Request(request_id="a", tokens=array("q", range(9)), sampling=sampling)
    speculator.join(request)
    (plan,) = speculator.plan([request], [20], budget=50, num_prefill=0)
    return seen[-1], plan
