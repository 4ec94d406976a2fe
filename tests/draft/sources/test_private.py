"""Requests that do not read or do not write the cache: their drafts are their own, as well."""

from __future__ import annotations

import pytest

from foretoken.core.interface.request import CacheOptions
from foretoken.draft.sources.prefix import PrefixSource
from foretoken.draft.sources.suffix import SuffixSource

TEXT = [5, 6, 7, 8, 9, 10, 11, 12]
PRIVATE = [
    CacheOptions(read=False),
    CacheOptions(write=False),
    CacheOptions(read=False, write=False),
]


@pytest.fixture(params=PRIVATE, ids=["blind", "secret", "both"])
def cache(request: pytest.FixtureRequest) -> CacheOptions:
    return request.param


@pytest.mark.parametrize("make_source", [PrefixSource, SuffixSource])
def test_a_private_request_draws_on_nothing_that_others_said(
    make_source, cache, make_request
) -> None:
    source = make_source()
    source.leave(make_request([1, 2, 3], TEXT))
    public, private = make_request([1, 2, 3], TEXT[:4]), make_request([1, 2, 3], TEXT[:4])
    private.cache = cache
    assert source.propose(public, 3)
    assert not source.propose(private, 3)


@pytest.mark.parametrize("make_source", [PrefixSource, SuffixSource])
def test_nothing_that_a_private_request_said_is_kept(
    make_source, cache, make_request, index_all
) -> None:
    source = make_source()
    private = make_request([1, 2, 3], TEXT)
    private.cache = cache
    index_all(source, private)
    assert not source.propose(make_request([1, 2, 3], TEXT[:4]), 3)  # while it lives
    source.leave(private)
    assert not source.propose(make_request([1, 2, 3], TEXT[:4]), 3)


def test_a_private_request_still_draws_on_its_own_tokens(cache, make_request, index_all) -> None:
    source = SuffixSource()
    private = make_request([*TEXT, 1, *TEXT[:4]], cached=8)
    private.cache = cache
    index_all(source, private)
    (guess,) = source.propose(private, 3)
    assert list(guess.token_ids) == TEXT[4:7]


def test_an_ended_private_request_leaves_no_memory_behind(cache, make_request, index_all) -> None:
    source = SuffixSource()
    for _ in range(5):
        private = make_request(TEXT, TEXT)
        private.cache = cache
        index_all(source, private)
        source.leave(private)
    assert not source._index.histories
    assert not source._live
