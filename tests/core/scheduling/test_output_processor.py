"""Taking a step's outcome into a request, as the scheduler does it."""

from __future__ import annotations

import pytest

from foretoken.core.interface.draft import Draft
from foretoken.core.interface.output import RequestOutput, TokenLogprob
from foretoken.core.interface.protocols import NO_SPECULATION
from foretoken.core.interface.request import Delta, FinishReason, Request
from foretoken.core.scheduling.accounting import CommittedRow, StepAccounts
from foretoken.core.scheduling.output_processor import take_output
from foretoken.core.scheduling.shares import schedule_request
from support.fake_model import EOS, make_request

TWO = Draft.of([4, 4], "ngram")
NAMED = 5  # a stop token that the caller asked for


def running(**params: object) -> Request:
    request = make_request("a", [1, 2, 3], stop_ids=(EOS, NAMED), stop_token_ids=[NAMED], **params)
    request.max_len = 100
    return request


def take(request: Request, *, now: float = 1.0, **output: object) -> Delta:
    """Take an outcome and account for it; return the delta."""
    row = schedule_request(request, len(request.tokens))
    out = RequestOutput(request_id="a", **output)  # type: ignore[arg-type]
    delta = take_output(request, row, out)
    accounts = StepAccounts(NO_SPECULATION, lambda _tenant, _num_tokens: None)
    accounts.add(CommittedRow(request, row, out, delta, now, is_plain=True))
    accounts.settle()
    return delta


@pytest.mark.parametrize(("token_id", "told"), [(EOS, None), (NAMED, NAMED)])
def test_only_a_stop_token_that_the_caller_named_is_a_reason(
    token_id: int, told: int | None
) -> None:
    delta = take(running(), token_ids=[4, token_id, 6], draft=TWO, path=(0, 1))
    assert delta.token_ids == [4, token_id]
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, told)


def test_prompt_logprobs_are_told_once_though_preemption_computes_them_twice() -> None:
    request = running(prompt_logprobs=0)
    entries = [TokenLogprob(token_id, -1.0) for token_id in (2, 3)]
    told = []
    for computed in (entries[:1], entries, entries):
        request.num_computed = 0  # preempted, but for the first time
        told += take(request, prompt_logprobs=computed).prompt_logprobs
    assert told == entries


def test_a_request_for_no_tokens_ends_with_its_prompt() -> None:
    request = running(prompt_only=True, prompt_logprobs=0)
    entries = [TokenLogprob(token_id, -1.0) for token_id in (2, 3)]
    delta = take(request, token_ids=[EOS], prompt_logprobs=entries, logprobs=entries[:1])
    assert (delta.token_ids, delta.logprobs, delta.prompt_logprobs) == ([], [], entries)
    assert delta.finish_reason is FinishReason.LENGTH
    assert (len(request.tokens), request.num_computed, request.usage.completion_tokens) == (3, 3, 0)


def test_log_probabilities_are_cut_as_the_tokens_are() -> None:
    entries = [TokenLogprob(token_id, -1.0) for token_id in (4, EOS, 6)]
    delta = take(running(), token_ids=[4, EOS, 6], draft=TWO, path=(0, 1), logprobs=entries)
    assert delta.logprobs == entries[:2]


def test_the_time_to_the_first_token_is_not_that_to_a_later_one() -> None:
    request = running()
    request.arrival_time = 0.5
    for now in (2.0, 5.0):
        take(request, now=now, token_ids=[4])
    assert request.usage.time_to_first_token == 1.5


def test_accepted_tokens_behind_the_cut_were_proposed_and_not_served() -> None:
    request = running()
    sources = ["ngram", "ngram", "suffix", "suffix"]
    take(
        request,
        token_ids=[4, 4, EOS, 4, 4],
        draft=Draft([4, 4, EOS, 4], sources),
        path=range(4),
    )
    usage = request.usage
    assert (usage.completion_tokens, usage.proposed_tokens, usage.accepted_tokens) == (3, 4, 3)
    assert usage.accepted_by_source == {"ngram": 2, "suffix": 1}
    assert request.num_computed == len(request.tokens) == 6
