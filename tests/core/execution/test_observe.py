"""What a proposer observes of every step: which rows of the batch hold what was committed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from foretoken.core.execution.model_runner import MAX_FAILURES, ModelRunner
from foretoken.core.execution.proposer import VerifiedRequest
from foretoken.core.interface.sampling_params import TokenSamplingParams
from foretoken.core.interface.step import Draft, SamplingMetadata, ScheduledRequest, StepPlan
from foretoken.core.model import Decoder, load_decoder
from foretoken.core.ops.batch import ForwardOutput, RaggedBatch
from support.checkpoints import make_checkpoint
from support.draft_trees import tree_of

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = array("q", [5, 9, 2, 6, 5])
SAMPLING = SamplingMetadata(
    params=TokenSamplingParams(temperature=0.0), seed=0, prompt_len=len(PROMPT)
)


class Observer:
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

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None: ...


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
            runner.step(plan_of(replace(each, start=0, stop=each.start, max_draft=0)))
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
    drafting = replace(row(PROMPT, 4, 5), max_draft=3)
    _, out = compute(decoder, observer, row(PROMPT, 0, 2, 1), drafting)
    assert out.num_accepted == 1
    assert observer.steps == [[([0, 1], [5, 9]), ([4, 5], [5, right[0]])]]
    assert observer.rows[1].output is out


def test_where_a_path_beside_the_trunk_won_its_rows_hold_the_positions(decoder: Decoder) -> None:
    right = answer(decoder, 2)
    wrong = [token + 1 for token in right]
    observer = Observer()
    tree = tree_of([wrong, [wrong[0], right[1]], right])
    forked = replace(row(PROMPT, 4, 5), draft=tree, spare_page_ids=array("q", [3]))
    out, _ = compute(decoder, observer, forked, row(PROMPT, 0, 2, 1))
    assert out.num_accepted == 2
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
