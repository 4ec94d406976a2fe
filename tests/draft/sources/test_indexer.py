"""SourceIndexer: whose tokens are indexed next, where a step has no time for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from foretoken.core.interface.request import Request
from foretoken.core.scheduling.guarded_speculator import MAX_FAILURES
from foretoken.draft.sources.prediction import PredictionSource
from foretoken.draft.sources.source import INDEX_CHUNK, MAX_ENDED, GuardedSource, SourceIndexer
from foretoken.draft.sources.suffix import SuffixSource


class Noting(SuffixSource):
    """Notes how much of each request it indexed."""

    def __init__(self) -> None:
        super().__init__(num_slots=2**10)
        self.num_indexed: dict[str, int] = {}
        self.num_calls = 0
        self.left: list[str] = []

    def leave(self, request: Request) -> None:
        super().leave(request)
        self.left.append(request.request_id)

    def index(self, request: Request, *, for_others: bool = False) -> int:
        done = super().index(request)
        self.num_calls += 1
        self.num_indexed[request.request_id] = self.num_indexed.get(request.request_id, 0) + done
        return done


@pytest.fixture
def source() -> Noting:
    return Noting()


@pytest.fixture
def indexer(source: Noting) -> SourceIndexer:
    return SourceIndexer([GuardedSource(source)])


def joined(
    indexer: SourceIndexer,
    make_request: Callable[[Sequence[int]], Request],
    count: int,
    length: int = 3,
) -> list[Request]:
    requests = [make_request(range(length)) for _ in range(count)]
    for request in requests:
        indexer.join(request)
    return requests


def test_every_new_token_of_every_request_is_indexed(indexer, source, make_request) -> None:
    requests = joined(indexer, make_request, 4)
    for _ in range(5):
        indexer.work()
        assert list(source.num_indexed.values()) == [len(each.tokens) for each in requests]
        for request in requests:
            request.tokens.append(7)


def test_a_request_without_news_is_not_asked_about(indexer, source, make_request) -> None:
    first, second = joined(indexer, make_request, 2)
    indexer.work()
    before = source.num_calls
    second.tokens.append(7)
    indexer.work()
    assert source.num_calls == before + 1
    assert source.num_indexed[second.request_id] == 4
    assert source.num_indexed[first.request_id] == 3


def test_one_call_indexes_no_more_than_a_chunk_and_one_request_more(
    indexer, source, make_request
) -> None:
    joined(indexer, make_request, 3, length=5 * INDEX_CHUNK)
    indexer.work()
    assert list(source.num_indexed.values()) == [INDEX_CHUNK]


def test_a_long_prompt_is_finished_by_later_calls(indexer, source, make_request) -> None:
    (request,) = joined(indexer, make_request, 1, length=2 * INDEX_CHUNK + 5)
    for _ in range(4):
        indexer.work()
    assert source.num_indexed[request.request_id] == len(request.tokens)
    indexer.work()
    assert source.num_calls == 3, "it is whole"


def test_all_have_their_turns_where_more_is_said_than_there_is_time_for(
    indexer, source, make_request
) -> None:
    requests = joined(indexer, make_request, 4)
    for _ in range(20):
        for request in requests:
            request.tokens.extend(range(INDEX_CHUNK // 2))  # twice of what there is time for
        indexer.work()
    done = source.num_indexed.values()
    assert len(done) == 4
    assert min(done) > 0.5 * max(done)


def test_of_many_that_end_at_once_a_few_are_kept_in_a_call_and_none_is_lost(
    indexer, source, make_request
) -> None:
    runs, *requests = joined(indexer, make_request, 2 * MAX_ENDED + 2)
    for request in requests:
        indexer.leave(request)
    ended = [request.request_id for request in requests]
    for count in (MAX_ENDED, 2 * MAX_ENDED, len(requests)):
        indexer.work()
        assert source.left == ended[:count]
    assert source.num_indexed[runs.request_id] == 3


def test_where_nothing_runs_all_that_ended_is_kept_at_once(indexer, source, make_request) -> None:
    requests = joined(indexer, make_request, 2 * MAX_ENDED)
    for request in requests:
        indexer.leave(request)
    assert indexer.has_work
    indexer.work()
    assert source.left == [request.request_id for request in requests]
    assert not indexer.has_work
    assert not indexer._num_indexed


def test_all_that_ended_can_be_kept_at_once_before_a_flush(indexer, source, make_request) -> None:
    _, *requests = joined(indexer, make_request, 2 * MAX_ENDED)
    for request in requests:
        indexer.leave(request)
    indexer.keep()
    assert len(source.left) == len(requests)


def test_a_request_that_comes_back_is_indexed_on(indexer, source, make_request) -> None:
    (request,) = joined(indexer, make_request, 1)
    indexer.work()
    indexer.join(request)  # after a preemption
    request.tokens.append(7)
    indexer.work()
    assert source.num_indexed[request.request_id] == 4


def test_there_is_work_for_running_requests_only_while_a_source_has_an_index(make_request) -> None:
    without, with_index = GuardedSource(PredictionSource()), GuardedSource(SuffixSource())
    assert [without.has_index, with_index.has_index] == [False, True]
    indexer, both = SourceIndexer([without]), SourceIndexer([without, with_index])
    (request,) = joined(indexer, make_request, 1)
    both.join(request)
    assert [indexer.has_work, both.has_work] == [False, True]
    assert [indexer.has_backlog, both.has_backlog] == [False, True]
    for _ in range(MAX_FAILURES):
        with_index.count_failure("index")  # the source is turned off
    assert [both.has_work, both.has_backlog] == [False, False]
    both.leave(request)
    assert both.has_work  # sources forget an ended request even if they have no index
    both.work()
    assert not both.has_work
