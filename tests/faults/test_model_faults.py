"""The table of faults, the part in which a real model, a draft or a grammar goes wrong."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.engine.engine import Engine
from foretoken.core.errors import ForetokenError
from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import Draft
from foretoken.core.interface.request import Delta, Request
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.proposers.lm_proposer import LmProposer
from foretoken.radix_cache import PrefixCache
from support.fault_table import BAD, NAMES, NUM_TOKENS, PROMPTS, Reader, live, no_act
from support.fixed_depth import FixedDepth
from support.proposers import BareProposer
from support.tiny_pair import write_pair

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES = 64, 4, 100


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[tuple[Decoder, Decoder]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folders = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)
    yield tuple(load_decoder(folder) for folder in folders)  # type: ignore[misc]
    torch.set_num_threads(before)


class Poisoned(ModelRunner):
    """One value takes the place of all the bad request's logits, from its second token on."""

    value = float("nan")

    def _verify(self, work):
        at = 0
        for row, draft in zip(work.plan.requests, work.layout.drafts, strict=True):
            count = len(draft.token_ids) + 1 if row.samples else 0
            if row.request_id == BAD and len(row.tokens) > row.sampling.prompt_len:
                work.output.logits[at : at + count] = self.value
            at += count
        return super()._verify(work)


class PoisonedDown(Poisoned):
    value = float("-inf")


class Drafter(BareProposer):
    """Proposes what ``drafts`` makes of the rows."""

    def __init__(self, drafts: Callable[[Sequence[object]], object]) -> None:
        self.drafts = drafts

    def propose(self, rows):
        return self.drafts(rows)


def raises(rows: Sequence[object]) -> object:
    raise RuntimeError("the draft model failed")


DRAFTS = {
    "raises": raises,
    "gives nothing": lambda rows: None,
    "gives too few": lambda rows: [Draft.of([1], "x")] * (len(rows) - 1),
    "gives something else": lambda rows: ["draft"] * len(rows),
    "guesses ids that are too high": lambda rows: [Draft.of([VOCAB_SIZE, 1], "x")] * len(rows),
    "guesses ids below zero": lambda rows: [Draft.of([-1, 1], "x")] * len(rows),
    "guesses no integers": lambda rows: [Draft.of([1.5, "a"], "x")] * len(rows),  # type: ignore[list-item]
    "guesses too much": lambda rows: [Draft.of([1] * 99, "x")] * len(rows),
    "names too few sources": lambda rows: [Draft([1, 2], ())] * len(rows),
}


class BrokenGrammar:
    """Raises what a grammar should never raise, after a few tokens."""

    def allowed(self, tokens, start, tail):
        if len(tokens) - start >= 3:
            raise ZeroDivisionError("a secret of the grammar")
        return

    def forced(self, tokens, start, most):
        return ()

    def count_allowed(self, tokens, start, guess):
        return len(guess)

    def fork(self):
        return self


def real_engine(pair: tuple[Decoder, Decoder], proposer=None, kind=ModelRunner) -> Engine:
    limits = SchedulerLimits(
        max_batch_tokens=64, max_running=8, max_queued=9, max_model_len=100, vocab_size=VOCAB_SIZE
    )
    scheduler = Scheduler(PrefixCache(NUM_PAGES, PAGE_SIZE), limits, FixedDepth(3))
    pool = pair[0].make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    return Engine(scheduler, kind(pair[0], pool, proposer))


def real_request(name: str, constraint=None) -> Request:
    params = SamplingParams(temperature=0.7, max_tokens=NUM_TOKENS)
    prompt = PROMPTS[name]
    sampling = SamplingMetadata(
        params=params, seed=len(name), prompt_len=len(prompt), constraint=constraint
    )
    return Request(request_id=name, tokens=array("q", prompt), sampling=sampling)


def say(engine: Engine, requests: Sequence[Request]) -> dict[str, Reader]:
    async def scenario() -> dict[str, Reader]:
        try:
            return await live(engine, {each.request_id: each for each in requests}, no_act)
        finally:
            await engine.close()

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def solo(pair) -> dict[str, list[int]]:
    """Tokens of each request alone."""
    return {name: say(real_engine(pair), [real_request(name)])[name].tokens for name in NAMES}


@pytest.mark.parametrize("kind", [Poisoned, PoisonedDown])
def test_logits_that_are_not_finite_fail_their_row_alone(pair, solo, kind) -> None:
    drafter = Drafter(lambda rows: [Draft.of([1, 2], "x")] * len(rows))
    told = say(real_engine(pair, drafter, kind), [real_request(name) for name in NAMES])
    assert str(told[BAD].end) == "the model's logits are not finite"
    assert told[BAD].tokens == solo[BAD][:1]
    for name in set(NAMES) - {BAD}:
        assert told[name].tokens == solo[name]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_that_goes_wrong_changes_no_answer(pair, solo, name) -> None:
    told = say(real_engine(pair, Drafter(DRAFTS[name])), [real_request(each) for each in NAMES])
    assert {each: reader.tokens for each, reader in told.items()} == solo


def test_a_draft_model_whose_weights_are_not_finite_changes_no_answer(pair, solo) -> None:
    draft = pair[1]
    kept = draft.weights.embedding[2].clone()
    draft.weights.embedding[2] = float("nan")
    proposer = LmProposer(draft, draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE))
    told = say(real_engine(pair, proposer), [real_request(each) for each in NAMES])
    draft.weights.embedding[2] = kept
    assert {each: reader.tokens for each, reader in told.items()} == solo


def test_a_failed_step_changes_no_answer_of_a_pair(pair, solo) -> None:
    """The draft model's own KV and its place in each answer outlive the failure, too."""
    draft = pair[1]

    class Unsteady(ModelRunner):
        num_steps = 0

        def _finish(self, work):
            output = super()._finish(work)
            type(self).num_steps += 1
            if type(self).num_steps % 3 == 0:
                raise RuntimeError("the step failed when all was done")
            return output

    proposer = LmProposer(draft, draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE))
    engine = real_engine(pair, proposer, Unsteady)
    told = say(engine, [real_request(each) for each in NAMES])
    assert engine.num_failed_steps > 1
    good = {each for each, reader in told.items() if isinstance(reader.end, Delta)}
    assert len(good) >= 3
    for each in good:
        assert told[each].tokens == solo[each]


def test_a_grammar_that_raises_fails_its_request_alone(pair, solo) -> None:
    requests = [real_request(name, BrokenGrammar() if name == BAD else None) for name in NAMES]
    told = say(real_engine(pair), requests)
    assert type(told[BAD].end) is ForetokenError
    assert "secret" not in str(told[BAD].end)
    assert told[BAD].tokens == solo[BAD][:3]
    for name in set(NAMES) - {BAD}:
        assert told[name].tokens == solo[name]
