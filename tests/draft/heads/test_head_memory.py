"""Heads whose drafts copy head KV: how much at a time, and what happens where memory runs out."""

from __future__ import annotations

import random
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from foretoken.core.engine.step_bisection import StepBisection
from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from foretoken.core.scheduling.guarded_speculator import MAX_FAILURES
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.heads import copies
from foretoken.draft.heads.copies import CopyingProposer
from foretoken.draft.heads.kinds import KINDS
from foretoken.radix_cache import PrefixCache
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.tiny_heads import join_random, kinds_with_kv
from support.tiny_pair import write_pair

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES = 256, 4, 300
WITH_KV = kinds_with_kv()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)[0]


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return load_decoder(folder, backend="torch", exact="batch")


class Copies:
    """Watches what drafts copy of head KV; fails where a copy has more pages than fit."""

    def __init__(self, proposer: CopyingProposer, *, room: int = NUM_PAGES) -> None:
        self.room = room  # pages
        self.sizes: list[tuple[int, int]] = []  # of each copy: requests, pages of each
        self.num_failures = 0
        self._read, self._page_bytes = proposer._read, proposer.pool.data[0].nbytes
        self._alive = weakref.WeakSet[Any]()
        proposer._read = self.read  # type: ignore[method-assign]

    def read(self, requests: Sequence[ScheduledRequest], firsts: Sequence[int]) -> Any:
        assert not self._alive, "copies for two groups at once"
        context, seen = self._read(requests, firsts)
        num_bytes = sum(values.nbytes for pair in context for values in pair)
        num_pages = num_bytes // self._page_bytes
        if num_pages > self.room:
            self.num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.sizes.append((len(requests), num_pages // len(requests)))
        for keys, _ in context:
            self._alive.add(keys)
        return context, seen


class Bench:
    """Requests whose prompts were computed, and a head that drafts behind them."""

    def __init__(self, kind: str, target: Decoder, lengths: Sequence[int]) -> None:
        joined = join_random(kind, target)
        self.proposer = joined.proposer(joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE))
        if isinstance(self.proposer, CopyingProposer):
            self.copies = Copies(self.proposer)
        pages, prompts = array("q", range(NUM_PAGES)), []
        for index, length in enumerate(lengths):
            count = -(-(length + 8) // PAGE_SIZE) + 2
            own, pages = pages[:count], pages[count:]
            prompts.append(_prompt(str(index), length, own))
        runner = ModelRunner(
            target, target.make_pool(NUM_PAGES, page_size=PAGE_SIZE), self.proposer
        )
        runner.step(StepPlan(requests=prompts, newly_allocated_pages=array("q"), is_plain=True))
        self.requests = [
            replace(
                each, start=each.stop, stop=each.stop + 1, draft_plan=DraftPlan(max_draft=6),
                page_ids=each.page_ids[:-2], spare_page_ids=each.page_ids[-2:],
            )
            for each in prompts
        ]  # fmt: skip

    def limit(self, num_pages: int) -> None:
        """Copy at most so many pages at a time."""
        self.proposer._most_copied = num_pages * self.proposer.pool.data[0].nbytes

    def propose(self) -> list[Draft]:
        if isinstance(self.proposer, CopyingProposer):
            self.copies.sizes.clear()
        return self.proposer.propose(self.requests)

    def count_failures(self) -> int:
        """Drafts for which memory runs out until one is made."""
        for count in range(100):
            try:
                self.propose()
            except torch.OutOfMemoryError:
                continue
            return count
        raise AssertionError("memory never suffices")


def _prompt(request_id: str, length: int, page_ids: array[int]) -> ScheduledRequest:
    """All tokens but the last are computed."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ScheduledRequest(
        request_id=request_id, tokens=array("q", ids), start=0, stop=length - 1, page_ids=page_ids,
        sampling=_sampling(length),
    )  # fmt: skip


def _sampling(prompt_len: int) -> SamplingMetadata:
    params = TokenSamplingParams(temperature=0.5, max_tokens=60)
    return SamplingMetadata(params=params, seed=7, prompt_len=prompt_len)


SHORT = [9 + index % 8 for index in range(31)]  # tokens: 2 to 4 pages before the last one
LENGTHS = [*SHORT[:12], 250, *SHORT[12:]]


@pytest.mark.parametrize("kind", WITH_KV)
def test_copies_are_bounded_and_one_long_request_pads_no_other(kind: str, target: Decoder) -> None:
    bench = Bench(kind, target, LENGTHS)
    bench.limit(40)
    bench.propose()
    *short, long = bench.copies.sizes
    assert long == (1, 63), "more than the limit, but alone"
    assert sum(count for count, _ in short) == 31
    assert all(count * num_pages <= 40 and num_pages <= 4 for count, num_pages in short)
    assert len(short) <= 4, "groups are filled"


@pytest.mark.parametrize("kind", WITH_KV)
def test_the_drafts_of_groups_are_those_of_all_requests_at_once(kind: str, target: Decoder) -> None:
    bench = Bench(kind, target, LENGTHS)
    bench.copies.room = 10**6
    bench.limit(10**6)
    expected = bench.propose()
    assert len(bench.copies.sizes) == 1
    bench.limit(20)
    found = bench.propose()
    assert len(bench.copies.sizes) > 4
    assert all(draft.token_ids for draft in expected)
    assert len({tuple(draft.token_ids) for draft in expected}) > 8
    same = [
        (list(a.token_ids), list(a.parents)) == (list(b.token_ids), list(b.parents))
        for a, b in zip(expected, found, strict=True)
    ]
    assert sum(same) >= 31  # near ties may fall otherwise


def test_where_memory_runs_out_less_is_copied_at_a_time_and_slowly_more_again(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench("eagle3", target, [16] * 16)  # 4 pages each
    monkeypatch.setattr(copies, "MOST_COPIED", 64 * bench.proposer.pool.data[0].nbytes)
    bench.limit(64)
    bench.copies.room = 20
    assert bench.count_failures() == 2  # 64, 32
    assert bench.copies.sizes == [(4, 4)] * 4
    assert bench.count_failures() == 0
    bench.copies.room = 10**6
    for _ in range(200):
        bench.propose()
    assert bench.copies.sizes == [(16, 4)]
    assert bench.proposer._most_copied <= copies.MOST_COPIED


def test_at_last_requests_draft_one_by_one(target: Decoder) -> None:
    bench = Bench("eagle3", target, [16] * 3)
    bench.copies.room = 3
    for _ in range(60):
        with pytest.raises(torch.OutOfMemoryError):
            bench.propose()
    bench.copies.room = 4
    assert bench.count_failures() == 0
    assert bench.copies.sizes == [(1, 4)] * 3


def test_kernels_that_read_head_kv_where_it_lies_compute_all_requests_at_once(folder: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    bench = Bench("eagle3", load_decoder(folder, backend="native"), [16] * 3)
    calls, begin = list[int](), bench.proposer.begin
    bench.proposer.begin = lambda starts, num: calls.append(len(starts)) or begin(starts, num)  # type: ignore[method-assign, func-returns-value]
    bench.propose()
    assert calls == [3]
    assert not isinstance(bench.proposer, CopyingProposer)


@pytest.mark.parametrize("kind", WITH_KV)
def test_a_head_whose_memory_ran_out_for_long_drafts_again_when_it_suffices(
    kind: str, target: Decoder
) -> None:
    """Lack of memory depends on the requests: it is no failure of the head."""
    joined = join_random(kind, target)
    proposer = joined.proposer(joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE))
    copies = Copies(proposer, room=0)
    runner = ModelRunner(target, target.make_pool(NUM_PAGES, page_size=PAGE_SIZE), proposer)
    limits = SchedulerLimits(
        max_batch_tokens=64, max_running=4, max_queued=9, max_model_len=300, vocab_size=VOCAB_SIZE
    )
    scheduler = Scheduler(PrefixCache(NUM_PAGES, PAGE_SIZE), limits, FixedDepth(3))
    driver = Driver(scheduler, runner)  # type: ignore[arg-type]
    prompt = array("q", random.Random(3).choices(range(4, VOCAB_SIZE), k=20))
    request = Request(request_id="a", tokens=prompt, sampling=_sampling(len(prompt)))
    driver.add(request)
    for _ in range(MAX_FAILURES + 10):
        driver.step()
    assert copies.num_failures >= MAX_FAILURES + 5
    assert request.usage.proposed_tokens == 0
    copies.room = NUM_PAGES
    driver.run()
    assert request.usage.proposed_tokens > 20
    assert len(driver.served["a"]) == 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_health_check_leaves_nothing_behind(kind: str, target: Decoder) -> None:
    bench = Bench(kind, target, [16])
    runner = ModelRunner(target, target.make_pool(NUM_PAGES, page_size=PAGE_SIZE), bench.proposer)
    plan = StepPlan(requests=bench.requests, newly_allocated_pages=array("q"))
    bisection = StepBisection(plan, RuntimeError("it failed"))
    part = bisection.next()
    assert part is not None
    bisection.failed(part, RuntimeError("it failed"))
    runner.step(bisection.health_check(PAGE_SIZE))
    assert set(bench.proposer.head_kv.spans) == {"0"}
