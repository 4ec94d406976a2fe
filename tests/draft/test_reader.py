"""Reader: whose text is taken in next, where a step has no time for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from foretoken.core.request import Request
from foretoken.draft.reader import Reader
from foretoken.draft.source import INDEX_CHUNK, CarefulSource
from foretoken.draft.suffix import SuffixSource

BITE = 32


class Noting(SuffixSource):
    """Notes how much of each request it took in."""

    def __init__(self) -> None:
        super().__init__(num_slots=2**10)
        self.num_taken: dict[str, int] = {}
        self.left: list[str] = []

    def leave(self, request: Request) -> None:
        super().leave(request)
        self.left.append(request.request_id)

    def index(self, request: Request) -> int:
        taken = super().index(request)
        self.num_taken[request.request_id] = self.num_taken.get(request.request_id, 0) + taken
        return taken


@pytest.fixture
def source() -> Noting:
    return Noting()


@pytest.fixture
def reader(source: Noting) -> Reader:
    return Reader([CarefulSource(source)])


def joined(
    reader: Reader, make_request: Callable[[Sequence[int]], Request], count: int
) -> list[Request]:
    requests = [make_request([1, 2, 3]) for _ in range(count)]
    for request in requests:
        reader.join(request)
    reader.read_prompts()
    return requests


def test_all_have_their_turns_where_more_is_said_than_is_taken_in(
    reader, source, make_request
) -> None:
    requests = joined(reader, make_request, 4)
    for _ in range(20):
        for request in requests:
            request.tokens.extend(range(INDEX_CHUNK // 2))  # twice of what there is time for
        reader.read(BITE)
    taken = source.num_taken.values()
    assert min(taken) > 0.5 * max(taken)


def test_of_the_eager_every_token_is_taken_in(reader, source, make_request) -> None:
    eager, other = joined(reader, make_request, 2)
    before = dict(source.num_taken)
    for request in (eager, other):
        request.tokens.append(4)
    reader.read(BITE, eager={eager.request_id})
    assert source.num_taken[eager.request_id] == before[eager.request_id] + 1
    assert source.num_taken[other.request_id] == before[other.request_id]


def test_of_many_who_end_at_once_a_few_are_kept_in_a_step_and_none_is_lost(
    reader, source, make_request
) -> None:
    requests = joined(reader, make_request, 5)
    for request in requests:
        reader.leave(request)
    reader.keep(2)
    assert source.left == [request.request_id for request in requests[:2]]
    reader.keep()
    assert source.left == [request.request_id for request in requests]
