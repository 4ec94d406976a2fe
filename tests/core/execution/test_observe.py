"""Observing a step: a proposer learns which rows of the batch hold committed tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from foretoken.core.execution import model_runner
from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.execution.proposer import VerifiedRequest
from foretoken.core.interface.draft import NO_DRAFT_PLAN, Draft, DraftPlan
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import StepCancelled
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import ForwardOutput, RaggedBatch, Wanted
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.scheduling.guarded_speculator import MAX_FAILURES
from foretoken.draft.control.outcome import DraftNote, DraftOutcome
from support.checkpoints import make_checkpoint
from support.draft_trees import tree_of
from support.drafts import with_drafts
from support.proposers import BareProposer

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = array("q", [5, 9, 2, 6, 5])
SAMPLING = SamplingMetadata(
    params=TokenSamplingParams(temperature=0.0), seed=0, prompt_len=len(PROMPT)
)


class Observer(BareProposer):
    """Notes each row's positions, token ids and taps; proposes ``drafts``, if any."""

    taps = (0,)

    def __init__(self, drafts: list[Draft] | None = None) -> None:
        self.drafts = drafts
        self.steps: list[list[tuple[list[int], list[int]]]] = []
        self.rows: list[VerifiedRequest] = []
        self.embedded: list[Tensor] = []

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        assert self.drafts is not None
        return self.drafts

    def observe(
        self, batch: RaggedBatch, output: ForwardOutput, verified: Sequence[VerifiedRequest]
    ) -> None:
        assert output.taps is not None
        assert len(output.taps) == len(output.hidden)
        self.rows = list(verified)
        rows = [list(each.batch_rows) for each in verified]
        self.steps.append(
            [(batch.positions[each].tolist(), batch.token_ids[each].tolist()) for each in rows]
        )
        self.embedded = [output.taps[each] for each in rows]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(make_checkpoint(tmp_path_factory.mktemp("observe"), "qwen3"))


def row(tokens: array[int], start: int, stop: int, first_page: int = 0) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=str(first_page),
        tokens=tokens,
        start=start,
        stop=stop,
        page_ids=array("q", [first_page]),
        sampling=SAMPLING,
    )


def compute(decoder: Decoder, observer: Observer, *rows: ScheduledRequest, is_plain: bool = False):
    runner = ModelRunner(decoder, decoder.make_pool(16, page_size=16), observer)
    for each in rows:  # what stands before a row
        if each.start:
            runner.step(plan_of(replace(each, start=0, stop=each.start, draft_plan=NO_DRAFT_PLAN)))
    observer.steps.clear()
    return runner.step(plan_of(*rows, is_plain=is_plain)).requests


def plan_of(*rows: ScheduledRequest, is_plain: bool = True) -> StepPlan:
    return StepPlan(requests=rows, newly_allocated_pages=array("q"), is_plain=is_plain)


def answer(decoder: Decoder, count: int) -> list[int]:
    runner = ModelRunner(decoder, decoder.make_pool(16, page_size=16))
    tokens = PROMPT[:]
    for _ in range(count):
        (out,) = runner.step(plan_of(row(tokens, 0, len(tokens)))).requests
        tokens.extend(out.token_ids)
    return tokens[len(PROMPT) :].tolist()


def test_plain_steps_and_prefill_are_observed(decoder: Decoder) -> None:
    observer = Observer()
    compute(decoder, observer, row(PROMPT, 0, 3), row(PROMPT, 4, 5, 1), is_plain=True)
    assert observer.steps == [[([0, 1, 2], [5, 9, 2]), ([4], [5])]]
    for embedded, (_, token_ids) in zip(observer.embedded, observer.steps[0], strict=True):
        assert torch.equal(embedded, decoder.weights.embedding[token_ids])


def test_the_rows_of_refused_draft_tokens_are_left_out(decoder: Decoder) -> None:
    right = answer(decoder, 2)
    observer = Observer([Draft.of([right[0], right[1] + 1, 3], "x")])
    drafting = with_drafts(row(PROMPT, 4, 5), max_draft=3)
    _, out = compute(decoder, observer, row(PROMPT, 0, 2, 1), drafting)
    assert len(out.path) == 1
    assert observer.steps == [[([0, 1], [5, 9]), ([4, 5], [5, right[0]])]]
    assert observer.rows[1].output is out


def test_where_a_path_beside_the_trunk_won_its_rows_hold_the_positions(decoder: Decoder) -> None:
    right = answer(decoder, 2)
    wrong = [token + 1 for token in right]
    observer = Observer()
    tree = tree_of([wrong, [wrong[0], right[1]], right])
    forked = replace(row(PROMPT, 4, 5), draft_plan=DraftPlan(tree), spare_page_ids=array("q", [3]))
    out, _ = compute(decoder, observer, forked, row(PROMPT, 0, 2, 1))
    assert len(out.path) == 2
    assert observer.steps == [[([4, 5, 6], [5, *right]), ([0, 1], [5, 9])]]


def test_a_proposer_that_fails_to_observe_costs_nothing_and_is_let_go(decoder: Decoder) -> None:
    class Failing(Observer):
        def observe(self, *step: object) -> None:
            raise RuntimeError("it cannot look")

    runner = ModelRunner(decoder, decoder.make_pool(16, page_size=16), Failing())
    for _ in range(MAX_FAILURES):
        assert runner.proposer is not None
        (out,) = runner.step(plan_of(row(PROMPT, 0, 5))).requests
        assert list(out.token_ids) == answer(decoder, 1)
    assert runner.proposer is None


def test_a_proposer_that_is_let_go_is_reported_and_its_taps_stay(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other taps a GPU's graphs would be captured again, one after another, while it serves.

    That it observes without failing forgives nothing.
    """
    taps, forward = [], decoder.forward

    def watched(batch: RaggedBatch, pool: KVPool, wanted: Wanted) -> ForwardOutput:
        taps.append(wanted.taps)
        return forward(batch, pool, wanted)

    monkeypatch.setattr(decoder, "forward", watched)
    runner = ModelRunner(decoder, decoder.make_pool(16, page_size=16), Observer())
    drafting = with_drafts(row(PROMPT, 0, 5), max_draft=2)
    lost = [
        runner.step(plan_of(drafting, is_plain=False)).lost_proposer
        for _ in range(MAX_FAILURES + 2)
    ]
    assert lost == [False] * (MAX_FAILURES - 1) + [True] * 3
    assert taps == [Observer.taps] * (MAX_FAILURES + 2)


@pytest.mark.parametrize(
    ("drafts", "num_uncached"), [([Draft(note=DraftNote((), 2))], 2), (None, 0)]
)
def test_where_the_proposer_has_no_draft_what_was_looked_up_is_verified(
    decoder: Decoder, drafts: list[Draft] | None, num_uncached: int
) -> None:
    """The proposer returns an empty draft, or fails; either way it found none of these tokens."""
    right = answer(decoder, 3)
    known = replace(Draft.of(right, "suffix"), survival=(0.9, 0.8, 0.7))
    (out,) = compute(
        decoder, Observer(drafts), with_drafts(row(PROMPT, 4, 5), draft=known, max_draft=4)
    )
    assert (list(out.path), out.draft.sources) == ([0, 1, 2], ("suffix",) * 3)
    outcome = DraftOutcome(out.draft, out.path)
    assert (outcome.num_ranked, list(outcome.accepted_ranks)) == (0, [])
    assert outcome.note.num_uncached == num_uncached


def test_a_step_that_failed_behind_its_observation_is_not_observed_again(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> dict[str, float]:
        raise RuntimeError("the device lost the clock")

    monkeypatch.setattr(model_runner, "_times", refuse)
    observer = Observer()
    runner = ModelRunner(decoder, decoder.make_pool(16, page_size=16), observer)
    pending = runner.launch(plan_of(row(PROMPT, 0, 5)))
    with pytest.raises(RuntimeError, match="lost the clock"):
        pending.finish()
    with pytest.raises(StepCancelled):
        pending.finish()
    assert len(observer.steps) == 1
