"""A draft model with another tokenizer: it meets the target in text, on pages of its own."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from foretoken.core.errors import InvalidRequest
from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.execution.proposer import VerifiedRequest
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.output import RequestOutput
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import (
    ConstraintFailed,
    SamplingMetadata,
    TokenSamplingParams,
)
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import Segment
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.proposers import text_proposer
from foretoken.draft.proposers.text_proposer import TextProposer, _whole_characters
from foretoken.radix_cache import PrefixCache
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.tiny_pair import write_pair

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES, WINDOW = 256, 4, 120, 24
NO_PAGES = array("q")
SPACE_IDS = range(10, 40)
FIRST = 0x4E00  # three bytes in UTF-8


class Letters:
    """Each token is a character of its own; some stand behind a space, as words do."""

    first_ids: Sequence[int] = ()
    special_ids = frozenset({2})

    def piece(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return b""
        space = " " if token_id in SPACE_IDS else ""
        return f"{space}{chr(FIRST + token_id)}".encode()

    def encode(self, text: str) -> list[int]:
        return [ord(char) - FIRST for char in text if char != " "]


class Bytes(Letters):
    """Each token is a byte of UTF-8."""

    def piece(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids else bytes([token_id])

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Decoder, Decoder]:
    torch.set_num_threads(1)
    folders = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)
    target, draft = (load_decoder(folder) for folder in folders)
    return target, draft


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids


def proposer_of(decoder: Decoder, num_pages: int = NUM_PAGES, **texts: Letters) -> TextProposer:
    both = {"target": Letters(), "own": Letters()} | texts
    pool = decoder.make_pool(num_pages, page_size=PAGE_SIZE)
    return TextProposer(decoder, pool, window=WINDOW, **both)


class Bench:
    """An engine without its loop whose drafts are of the target itself, by text."""

    def __init__(
        self,
        target: Decoder,
        draft: Decoder | None = None,
        *,
        num_pages: int = NUM_PAGES,
        own_pages: int = 0,
    ) -> None:
        limits = SchedulerLimits(
            max_batch_tokens=64, max_running=4, max_queued=9, max_model_len=300,
            vocab_size=VOCAB_SIZE,
        )  # fmt: skip
        self.proposer = proposer_of(draft or target, own_pages or num_pages)
        pool = target.make_pool(num_pages, page_size=PAGE_SIZE)
        scheduler = Scheduler(PrefixCache(num_pages, PAGE_SIZE), limits, FixedDepth(3))
        self.driver = Driver(scheduler, ModelRunner(target, pool, self.proposer))  # type: ignore[arg-type]

    def add(self, name: str, prompt: list[int], *, namespace: str | None = None) -> Request:
        params = TokenSamplingParams(temperature=0.0, max_tokens=24)
        sampling = SamplingMetadata(params=params, seed=1, prompt_len=len(prompt))
        request = Request(
            request_id=name, tokens=array("q", prompt), sampling=sampling, namespace=namespace
        )
        self.driver.add(request)
        return request

    def run(self, name: str, prompt: list[int], *, namespace: str | None = None) -> Request:
        request = self.add(name, prompt, namespace=namespace)
        self.driver.run()
        return request

    def check(self) -> None:
        """Every page of the draft model has one owner."""
        leases = [each.lease for each in self.proposer._readings.values() if each.lease is not None]
        self.proposer.cache.check(leases)


def test_a_model_that_drafts_for_itself_by_text_is_always_right(pair) -> None:
    """Any stale KV would break the run of accepted tokens, in short pools above all."""
    bench = Bench(pair[0], num_pages=27)
    shared = prompt_of(21)
    requests = [bench.add(str(i), [*shared, *prompt_of(3 + i, i)]) for i in range(4)]
    bench.driver.run()
    requests += [bench.run(f"again-{i}", [*shared, *prompt_of(3 + i, i)]) for i in range(4)]
    for request in requests:
        assert request.usage.accepted_tokens == request.usage.proposed_tokens
        assert set(request.usage.proposed_by_source) <= {"text"}
    assert sum(request.usage.accepted_tokens for request in requests) > 60
    assert bench.driver.scheduler.num_preemptions > 0
    bench.check()


def test_drafts_are_those_of_a_newcomer_whatever_was_rejected_before(pair) -> None:
    """KV of rejected tokens is never read: neither by the request nor by those that share it."""
    target, draft = pair
    bench = Bench(target, draft)
    propose, compared, num_calls = bench.proposer.propose, [0], itertools.count()

    def doubting(requests: Sequence[ScheduledRequest]) -> list[Draft]:
        if next(num_calls) % 2:
            return [Draft()] * len(requests)  # what was rejected is not written over at once
        drafts = propose(requests)
        newcomer = proposer_of(draft)
        newcomer._window = 10_000
        for found, right in zip(drafts, newcomer.propose(requests), strict=True):
            assert found.token_ids in ([], (), right.token_ids)
            compared[0] += len(found.token_ids)
        return drafts

    bench.proposer.propose = doubting  # type: ignore[method-assign]
    shared = prompt_of(21)
    requests = [bench.add(str(i), [*shared, *prompt_of(3 + i, i)]) for i in range(4)]
    bench.driver.run()
    requests += [bench.run(f"again-{i}", [*shared, *prompt_of(3 + i, i)]) for i in range(3)]
    accepted = sum(request.usage.accepted_tokens for request in requests)
    assert 0 < accepted < sum(request.usage.proposed_tokens for request in requests)
    assert compared[0] > 50


def test_what_differs_from_the_draft_is_computed_anew(pair, monkeypatch) -> None:
    """A tiny model may overlook KV of rejected tokens, so what is computed is looked at."""
    proposer, prompt = proposer_of(pair[0]), prompt_of(12)
    first, *_ = drafted(proposer, row_of(prompt))
    run, computed = proposer._grower.run, list[list[int]]()

    def watched(segments: Sequence[Segment], *others: Any) -> Any:
        computed.append(list(segments[0].token_ids))
        return run(segments, *others)

    monkeypatch.setattr(proposer._grower, "run", watched)
    for new in ([first, 77], [77, 78], [78, 79, 80]):
        computed.clear()
        proposer.propose([row_of([*prompt, *new])])
        assert computed[0] == [each for each in new if each != first]
        prompt += new


def test_where_its_pool_is_short_it_drafts_for_some_alone(pair) -> None:
    bench = Bench(pair[0], own_pages=20)
    requests = [bench.add(str(i), prompt_of(30, i)) for i in range(4)]
    bench.driver.run()
    assert {request.num_output for request in requests} == {24}
    assert sum(request.usage.accepted_tokens for request in requests) > 0
    bench.check()


def test_a_second_request_finds_the_first_ones_kv_and_another_namespace_does_not(pair) -> None:
    bench, prompt = Bench(pair[0]), prompt_of(60)
    bench.run("a", prompt)
    assert bench.proposer.cache.num_hits == 0
    bench.run("b", prompt, namespace="other")
    assert bench.proposer.cache.num_hits == 0
    bench.run("c", prompt)
    assert bench.proposer.cache.num_hits > 30
    bench.check()


def test_a_page_that_changes_hands_takes_what_is_cached_behind_it_along(pair) -> None:
    proposer, row = proposer_of(pair[0]), row_of(prompt_of(40))
    assert drafted(proposer, row)
    proposer.forget(["a"], NO_PAGES)
    proposer.propose([replace(row, request_id="b")])
    num_hits = proposer.cache.num_hits
    assert num_hits > 20
    proposer.forget([], row.page_ids[:1])
    proposer.propose([replace(row, request_id="c")])
    assert proposer.cache.num_hits == num_hits, "b holds the pages, and c has another namespace"
    proposer.forget(["b", "c"], NO_PAGES)
    proposer.forget([], row.page_ids[:1])
    proposer.propose([replace(row, request_id="d")])
    assert proposer.cache.num_hits == num_hits
    held = {node.namespace for node in proposer.cache.tree.nodes()}
    assert proposer._readings["d"].space in held
    assert "1" not in held, "what c left is flushed"


def test_pages_that_change_hands_cost_one_look_at_the_cache(pair, monkeypatch) -> None:
    """Each look passes over all leaves of the cache, in the model thread."""
    proposer, flushed = proposer_of(pair[0]), list[Sequence[str | None]]()
    for page_id in range(3):
        row = replace(row_of(prompt_of(12)), request_id=str(page_id))
        proposer.propose([replace(row, page_ids=row.page_ids[page_id:])])
    monkeypatch.setattr(proposer.cache, "flush", lambda *spaces: flushed.append(spaces))
    proposer.forget(["0", "1", "2"], row_of([]).page_ids)
    proposer.forget([], row_of([]).page_ids)
    assert [len(each) for each in flushed] == [3]


class Refusing(Letters):
    """A tokenizer that refuses texts with one of its tokens."""

    refused = chr(FIRST + 9)

    def encode(self, text: str) -> list[int]:
        if self.refused in text:
            raise InvalidRequest("for this test")
        return super().encode(text)


@pytest.mark.parametrize("side", ["target", "own"])
def test_a_text_that_a_tokenizer_refuses_costs_the_drafts_of_its_request_alone(pair, side) -> None:
    other, prompt = prompt_of(12), [7, 8, 9] if side == "own" else prompt_of(12, 1)
    row = replace(row_of(other), request_id="b")
    bad = Refusing()
    if side == "target":  # refuses what it is to draft
        first, *_ = drafted(proposer_of(pair[0]), row_of(prompt))
        bad.refused = chr(FIRST + first)
        assert first not in other
    proposer = proposer_of(pair[0], **{side: bad})
    for _ in range(3):
        drafts = proposer.propose([row_of(prompt), row])
        assert not drafts[0].token_ids
    assert drafts[1].token_ids


def test_of_a_draft_that_was_cut_only_what_was_verified_was_tried(pair) -> None:
    proposer, row = proposer_of(pair[0]), row_of(prompt_of(12))
    (draft,) = proposer.propose([row])
    assert len(draft.token_ids) == 4
    before = proposer._chances[False].survival(1)[0]
    output = RequestOutput(request_id="a", token_ids=[1, 2], draft=draft.first_nodes(1), path=[0])
    nothing: Any = None
    proposer.observe(nothing, nothing, [VerifiedRequest(row, [0, 1], output)])
    learnt = proposer._chances[False]
    assert learnt._tries == text_proposer.PRIOR_WEIGHT + 1, "one token of four"
    assert learnt.survival(1)[0] > before


def row_of(tokens: Sequence[int], max_draft: int = 4, **form: object) -> ScheduledRequest:
    params = TokenSamplingParams(temperature=0.0)
    return ScheduledRequest(
        request_id="a",
        tokens=array("q", list(tokens)),
        start=len(tokens) - 1,
        stop=len(tokens),
        page_ids=array("q", range(NUM_PAGES)),
        sampling=SamplingMetadata(params=params, seed=1, prompt_len=5, **form),  # type: ignore[arg-type]
        draft_plan=DraftPlan(max_draft=max_draft),
    )


def drafted(proposer: TextProposer, row: ScheduledRequest) -> list[int]:
    """The first draft that is not empty, once all is caught up."""
    for _ in range(9):
        if token_ids := list(proposer.propose([row])[0].token_ids):
            return token_ids
    return []


def test_long_prompts_are_read_and_caught_up_a_part_at_a_time(pair, monkeypatch) -> None:
    monkeypatch.setattr(text_proposer, "READ_TOKENS", 30)
    proposer, row = proposer_of(pair[0]), row_of(prompt_of(70))
    owed = [proposer.propose([row])[0].note.num_uncached for _ in range(6)]  # type: ignore[attr-defined]
    assert owed[:2] == [40, 10]
    assert owed[2:4] == [70 - WINDOW - 1, 70 - 2 * WINDOW - 2]
    assert owed[-1] == 0
    assert drafted(proposer, row)


def test_the_same_text_in_other_tokens_gets_the_same_draft(pair) -> None:
    """The target's tokens are bytes: a draft begins inside a character where the target does."""
    alone = drafted(proposer_of(pair[0]), row_of(prompt_of(12)))
    text = b"".join(map(Letters().piece, prompt_of(12)))
    expected = b"".join(map(Letters().piece, alone))
    for cut in (0, 1, 2):  # bytes of the first character of the draft that are known
        proposer = proposer_of(pair[0], target=Bytes())
        found = drafted(proposer, row_of(text + expected[:cut], 60))
        assert expected.startswith(bytes([*expected[:cut], *found])[: len(expected)])
        assert len(found) > 3


def test_where_the_draft_does_not_go_on_inside_a_character_as_the_target_there_is_none(
    pair,
) -> None:
    text = b"".join(map(Letters().piece, prompt_of(12)))
    right = drafted(proposer_of(pair[0], target=Bytes()), row_of(text, 60))
    other = 0xE4 if right[0] != 0xE4 else 0xE5
    assert drafted(proposer_of(pair[0], target=Bytes()), row_of(text + bytes([other]), 60)) == []


def test_a_token_without_text_ends_the_draft(pair) -> None:
    proposer, row = proposer_of(pair[0]), row_of(prompt_of(12))
    first = drafted(proposer, row)[0]
    assert proposer._text_of([5, 6, 2, 7]) == b"".join(map(Letters().piece, (5, 6)))
    own = Letters()
    own.special_ids = frozenset({first})
    assert drafted(proposer_of(pair[0], own=own), row) == []


class Allows:
    """A constraint that allows so many more tokens; None: it fails."""

    def __init__(self, count: int | None) -> None:
        self._count = count

    def count_allowed(self, tokens: array[int], start: int, guess: Sequence[int]) -> int:
        if self._count is None:
            raise ConstraintFailed("for this test")
        return self._count


@pytest.mark.parametrize(("count", "expected"), [(2, 2), (0, 0), (None, 0)])
def test_a_draft_ends_where_the_grammar_forbids_its_next_token(pair, count, expected) -> None:
    row = row_of(prompt_of(12), constraint=Allows(count))
    assert len(drafted(proposer_of(pair[0]), row)) == expected


def test_the_likelier_of_its_chain_and_the_one_looked_up_is_verified(pair) -> None:
    proposer, row = proposer_of(pair[0]), row_of(prompt_of(12))
    for chance, source in ((0.99, "suffix"), (0.1, "text")):
        known = Draft([5, 6], ("suffix",) * 2, survival=(chance, chance))
        plan = replace(row.draft_plan, draft=known)
        (draft,) = proposer.propose([replace(row, draft_plan=plan)])
        assert set(draft.sources) == {source}


@pytest.mark.parametrize(
    ("text", "whole"),
    [(b"", 0), (b"a", 1), ("é".encode(), 2), (b"a\xc3", 1), (b"\xe4\xb8", 0), (b"a\xf0\x9f\x8e", 1),
     ("🎉".encode(), 4), (b"\xff", 1), (b"\x80\x80", 2), ("a語".encode(), 4)],
)  # fmt: skip
def test_only_the_beginning_of_a_character_is_split_off(text: bytes, whole: int) -> None:
    found, pending = _whole_characters(text)
    assert pending == text[whole:]
    assert found == text[:whole].decode("utf-8", "replace")
