"""Proposers with heads: every draft is the one that the head makes from the whole text at once.

The reference computes the text so far with the target, from nothing, and hands tokens and taps to
the head's own forward pass over whole sequences, the one that training uses. So stale, foreign,
shifted or missing head KV shows, whatever brought it about.
"""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.protocols import ProposerTraits
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import Segment, Wanted
from foretoken.core.ops.native import native_library
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.control.outcome import NUM_BEST
from foretoken.draft.heads import block
from foretoken.draft.heads.block import BlockPass
from foretoken.draft.heads.block_network import BlockHead
from foretoken.draft.heads.common.head_kv import Written
from foretoken.draft.heads.common.layers import Head
from foretoken.draft.heads.common.packing import PassRows
from foretoken.draft.heads.common.proposer import HeadProposer
from foretoken.draft.heads.joined import JoinedHead, lend
from foretoken.draft.heads.joined import join as pack
from foretoken.draft.proposers.gap_model import default_gap_models
from foretoken.radix_cache import PrefixCache
from support.draft_trees import TreeDepth
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.native_variants import BACKENDS
from support.tiny_heads import (
    MANY,
    TINY,
    Text,
    block_config,
    join,
    join_random,
    kinds_with_kv,
    plain,
    random_head,
    tiny,
)
from support.tiny_pair import write_pair

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES, CHUNK = 256, 4, 160, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)[0]


@pytest.fixture(scope="module", params=BACKENDS)
def target(request, folder) -> Decoder:
    torch.set_num_threads(1)
    if request.param == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    return load_decoder(folder, backend=request.param, exact="batch")


def make_proposer(kind: str, target: Decoder, **options: bool) -> HeadProposer:
    """A proposer with a random head of a kind."""
    return proposer_of(kind, join_random(kind, target), **options)


def proposer_of(kind: str, joined: JoinedHead, **options: bool) -> HeadProposer:
    """A proposer and, as its ``twin``, the kind and the plain head."""
    pool = joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    pool.data.fill_(float("nan"))  # void
    proposer = joined.proposer(pool, **options)
    proposer.twin = kind, plain(joined)  # type: ignore[attr-defined]
    return proposer


def taps_of(target: Decoder, tokens: Sequence[int], boundaries: Sequence[int]) -> Tensor:
    """Compute the taps of a text from nothing, [len(tokens), num_taps * hidden]."""
    parts = states_of(target, tuple(tokens))
    return torch.cat([parts[boundary] for boundary in boundaries], dim=-1)


@cache
def states_of(target: Decoder, tokens: tuple[int, ...]) -> Sequence[Tensor]:
    """At each boundary of the layers, [len(tokens), hidden]: all heads meet the same texts."""
    num_pages = -(-len(tokens) // 16)
    pool = target.make_pool(num_pages, page_size=16)
    segment = Segment(array("q", tokens), 0, array("q", range(num_pages)), 0)
    batch = target.batch([segment], page_size=16)
    boundaries = tuple(range(target.config.num_layers + 1))
    found = target.forward(batch, pool, Wanted(taps=boundaries)).taps
    assert found is not None
    return found[: len(tokens)].chunk(len(boundaries), dim=-1)


class Reference:
    """Reference draft of a head behind a row's tokens: its forward pass over the whole of them."""

    @torch.inference_mode()
    def __init__(self, kind: str, head: Head, target: Decoder, row: ScheduledRequest) -> None:
        self._head, self._target, self._row = head, target, row
        taps = taps_of(target, row.tokens, head.config.taps)
        taps[-1] = 0.0  # not to be looked at
        self._behind = tiny(kind).behind(head, Text(target, list(row.tokens), taps))
        self._most = min(row.draft_plan.max_draft, head.config.longest)

    @torch.inference_mode()
    def best(self, drafted: Sequence[int]) -> Sequence[int]:
        """The best few tokens behind some that were drafted."""
        logits, draft_ids = self._behind(drafted), self._head.draft_ids
        wide = torch.full((1, VOCAB_SIZE), -torch.inf)
        wide[0, torch.arange(len(logits)) if draft_ids is None else draft_ids] = logits
        wanted = DraftedRow(self._row.tokens, self._row.sampling, list(drafted))
        return self._target.sampler.best(wide, [wanted], NUM_BEST)[0].token_ids

    def chain(self) -> list[int]:
        """Return the head's whole draft, if that is a chain."""
        drafted: list[int] = []
        while len(drafted) < self._most:
            drafted.append(self.best(drafted)[0])
        return drafted


class Compared:
    """Compares every draft with the reference; drafts every other time only."""

    def __init__(self, proposer: HeadProposer, target: Decoder, *, rests: bool = True) -> None:
        self.proposer, self._target, self._rests = proposer, target, rests
        self.observe, self.forget = proposer.observe, proposer.forget
        self.traits, self.taps = proposer.traits, proposer.taps
        self.num_calls = self.num_right = self.num_compared = 0
        self.num_drafts = self.num_trees = 0

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        self.num_calls += 1
        if self._rests and self.num_calls % 3 == 0:
            return [Draft()] * len(rows)
        drafts = self.proposer.propose(rows)
        for row, draft in zip(rows, drafts, strict=True):
            kind, head = self.proposer.twin  # type: ignore[attr-defined]
            self._compare(draft, Reference(kind, head, self._target, row))
        return drafts

    def _compare(self, draft: Draft, reference: Reference) -> None:
        self.num_drafts += 1
        if not draft.parents:
            expected = reference.chain()
            self.num_compared += len(expected)
            pairs = zip(draft.token_ids, expected, strict=False)
            self.num_right += sum(ours == theirs for ours, theirs in pairs)
            return
        self.num_trees += 1
        siblings: dict[tuple[int, ...], list[int]] = {}
        for node, token_id in enumerate(draft.token_ids):
            path = tuple(draft.token_ids[each] for each in draft.path(node)[:-1])
            siblings.setdefault(path, []).append(token_id)
        for path, token_ids in siblings.items():
            self.num_compared += len(token_ids)
            pairs = zip(token_ids, reference.best(path), strict=False)
            self.num_right += sum(ours == theirs for ours, theirs in pairs)


class Unit:
    """An engine without its loop and a head that is compared."""

    def __init__(
        self,
        target: Decoder,
        proposer: HeadProposer,
        *,
        num_pages: int = NUM_PAGES,
        rests: bool = True,
        speculator: FixedDepth | None = None,
    ) -> None:
        limits = SchedulerLimits(
            max_batch_tokens=CHUNK, max_running=4, max_queued=20, max_model_len=300,
            vocab_size=VOCAB_SIZE,
        )  # fmt: skip
        self.compared = Compared(proposer, target, rests=rests)
        runner = ModelRunner(
            target, target.make_pool(num_pages, page_size=PAGE_SIZE), self.compared
        )
        cache = PrefixCache(num_pages, PAGE_SIZE)
        self.scheduler = Scheduler(cache, limits, speculator or FixedDepth(4))
        self.driver = Driver(self.scheduler, runner)  # type: ignore[arg-type]

    def add(self, request_id: str, prompt: list[int], num: int, temperature: float) -> Request:
        params = TokenSamplingParams(temperature=temperature, max_tokens=num)
        sampling = SamplingMetadata(params=params, seed=7, prompt_len=len(prompt))
        request = Request(request_id=request_id, tokens=array("q", prompt), sampling=sampling)
        self.driver.add(request)
        return request

    def run_all(self) -> None:
        """Prompts of several chunks, shared ones, the same ids again for others, and hits."""
        shared = prompt_of(41)
        for turn in range(2):
            for i in range(4):
                prompt = (
                    [*shared, *prompt_of(2 + i, 10 * turn + i)] if i % 2 else prompt_of(i + 1, i)
                )
                self.add(str(i), prompt, 24, i % 3 / 2)
            self.driver.run()
            self.driver.ended.clear()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids


@pytest.mark.parametrize("kind", MANY)
def test_drafts_are_the_reference_over_chunks_hits_and_rejections(target, kind) -> None:
    unit = Unit(target, make_proposer(kind, target))
    unit.run_all()
    compared = unit.compared
    assert unit.scheduler.cache.num_hits > 0
    assert compared.num_drafts > 50
    # near ties may fall otherwise: a pass over more rows rounds otherwise
    assert compared.num_right >= 0.98 * compared.num_compared


def test_without_head_kv_there_is_no_draft_and_what_was_looked_up_is_not_the_heads(target) -> None:
    params = TokenSamplingParams(temperature=1.0)
    row = ScheduledRequest(
        request_id="never seen",
        tokens=array("q", prompt_of(9)),
        start=8,
        stop=9,
        page_ids=array("q", range(4)),
        sampling=SamplingMetadata(params=params, seed=7, prompt_len=9),
        draft_plan=DraftPlan(Draft([1, 2], ("suffix", "suffix"), survival=(0.9, 0.8)), max_draft=4),
    )
    proposer = make_proposer("block", target)
    assert proposer.propose([row]) == [Draft()]


@pytest.mark.parametrize("kind", MANY)
def test_a_head_says_how_it_works(target, kind) -> None:
    joined = join_random(kind, target)
    expected = ProposerTraits(tiny(kind).tokens_per_pass, catches_up=False, weighs=True)
    assert proposer_of(kind, joined).traits == expected


@pytest.mark.parametrize("kind", MANY)
def test_the_nodes_of_a_tree_are_the_references_best_behind_their_paths(target, kind) -> None:
    """Nodes beside the trunk, too: each sees its own ancestors, not those of its neighbours."""
    proposer = make_proposer(kind, target)
    unit = Unit(target, proposer, speculator=TreeDepth(8))
    unit.run_all()
    compared = unit.compared
    assert compared.num_trees > 50
    assert compared.num_right >= 0.99 * compared.num_compared


@pytest.fixture
def native(folder) -> Decoder:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    return load_decoder(folder, backend="native")


def test_a_proposer_begins_with_the_gap_models_that_training_fitted(native) -> None:
    head = random_head("block", native)
    lend(head, native, native.weights.embedding.clone)
    joined = pack(head, native, {True: (0.7, 1.9, 0.6)})
    models = joined.proposer(joined.make_pool(8, page_size=PAGE_SIZE))._grower.gap_models
    assert (models[True].falloff, models[True].rest, models[True].slope) == (0.7, 1.9, 0.6)
    assert models[False].falloff == default_gap_models()[False].falloff


@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_of_more_requests_than_a_pass_holds(native, blocks, monkeypatch) -> None:
    """A block is computed by the backend's operations, some requests at a time."""
    monkeypatch.setattr(block, "BLOCKS_A_PASS", blocks)
    proposer = make_proposer("block", native)
    unit = Unit(native, proposer, speculator=TreeDepth(8))
    unit.run_all()
    assert unit.compared.num_trees > 50
    assert unit.compared.num_right >= 0.99 * unit.compared.num_compared


@pytest.mark.parametrize(("kind", "layers"), [("block", "layers"), ("eagle3", "midlayer")])
def test_the_layers_of_a_packed_head_are_freed_with_it(native, kind, layers) -> None:
    head = random_head(kind, native)
    layer = weakref.ref(getattr(head, layers))
    lend(head, native, native.weights.embedding.clone)
    joined = pack(head, native)
    assert layer() is not None, "the module itself stays whole"
    del head
    gc.collect()
    assert layer() is None
    assert joined.config.kind


def test_a_block_whose_rows_see_only_those_before_would_show(native, monkeypatch) -> None:
    """The negative control: rows of a block that attend as a text's do."""
    rows_of = BlockPass._rows

    def causal(self: BlockPass, *args: Any) -> list[PassRows]:
        (rows,) = rows_of(self, *args)
        return [
            PassRows([token_id], rows.position + at, [slot], rows.seen, rows.draft_slots[: at + 1])
            for at, (token_id, slot) in enumerate(zip(rows.token_ids, rows.slots, strict=True))
        ]

    monkeypatch.setattr(BlockPass, "_rows", causal)
    unit = Unit(native, make_proposer("block", native))
    unit.run_all()
    assert unit.compared.num_right < 0.9 * unit.compared.num_compared


@pytest.mark.parametrize("kind", ["rnn", "eagle3"])
def test_a_wrong_parent_in_a_tree_would_show(target, kind, monkeypatch) -> None:
    """The negative control: each node takes its neighbour's parent for its own."""
    proposer = make_proposer(kind, target)
    grower = proposer._grower
    query = grower._query

    def beside(tree, node):
        found = query(tree, node)
        own = [at for (other, _), at in grower._before.items() if other is tree]
        if not own:
            return found
        return found._replace(parent=own[own.index(found.parent) - 1])

    monkeypatch.setattr(grower, "_query", beside)
    unit = Unit(target, proposer, speculator=TreeDepth(8))
    unit.run_all()
    assert unit.compared.num_trees > 50
    assert unit.compared.num_right < 0.98 * unit.compared.num_compared


@pytest.mark.parametrize("kind", TINY)
def test_drafts_are_the_reference_after_preemption(target, kind) -> None:
    unit = Unit(target, make_proposer(kind, target), num_pages=40)
    for i in range(4):
        unit.add(str(i), [*prompt_of(21), *prompt_of(3 + i, i)], 40, 1.0)
    unit.driver.run()
    assert unit.scheduler.num_preemptions > 0
    assert unit.compared.num_right >= 0.98 * unit.compared.num_compared > 0


class CompareKv:
    """Compares the head KV that drafts read with what the plain head makes of the text at once."""

    def __init__(self, proposer: HeadProposer, target: Decoder) -> None:
        self._proposer, self._target = proposer, target
        self._start, self.num_positions = proposer._start, 0

    @torch.inference_mode()
    def start(self, row: ScheduledRequest) -> object:
        start, pool = self._start(row), self._proposer.pool
        if start is None:
            return None
        last = len(row.tokens) - 1
        kind, head = self._proposer.twin  # type: ignore[attr-defined]
        taps = taps_of(self._target, row.tokens, head.config.taps)
        expected = tiny(kind).head_kv(head, Text(self._target, list(row.tokens), taps), start.first)
        positions = torch.arange(start.first, last)
        pages = torch.tensor(row.page_ids)[positions // PAGE_SIZE]
        for layer, pair in enumerate(expected):
            for kind, values in enumerate(pair):
                found = pool.data[:, layer, kind][pages, :, positions % PAGE_SIZE]
                torch.testing.assert_close(found, values, atol=1e-4, rtol=1e-4)
        self.num_positions += len(positions)
        return start


@pytest.mark.parametrize("kind", [*kinds_with_kv(), "reduced"])
def test_head_kv_is_that_of_a_cold_text_behind_chunks_hits_and_preemption(target, kind) -> None:
    proposer = make_proposer(kind, target)
    compared = CompareKv(proposer, target)
    proposer._start = compared.start  # type: ignore[method-assign, assignment]
    unit = Unit(target, proposer, num_pages=34, speculator=TreeDepth(6))
    shared = prompt_of(41)  # more than a chunk
    for turn in range(2):
        for i in range(4):
            unit.add(f"{turn} {i}", [*shared, *prompt_of(3 + i, i)], 24, 1.0)
        unit.driver.run()
    assert unit.scheduler.cache.num_hits > 0
    assert unit.scheduler.num_preemptions > 0
    assert compared.num_positions > 1000


@pytest.mark.parametrize("kind", kinds_with_kv())
def test_a_hole_in_the_heads_kv_hides_what_lies_before_it(target, kind) -> None:
    """A step whose taps never arrived: drafts go on, and see what came later."""
    proposer = make_proposer(kind, target)
    unit = Unit(target, proposer, rests=False)
    observe, calls = unit.compared.observe, 0

    def sometimes(*step: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("no taps today")
        observe(*step)  # type: ignore[arg-type]

    unit.compared.observe = sometimes  # type: ignore[assignment, method-assign]
    unit.add("a", prompt_of(50), 30, 1.0)  # of two chunks: the first is lost
    unit.driver.run()
    assert len(unit.driver.served["a"]) == 30
    compared = unit.compared
    assert compared.num_compared > 20
    assert 0 < compared.num_right < 0.9 * compared.num_compared, "the reference sees all"
    calls = 1
    unit.add("b", prompt_of(50), 30, 1.0)  # the hit lacks the head's KV of its first pages
    unit.driver.run()
    assert unit.driver.served["b"] == unit.driver.served["a"]


@pytest.mark.parametrize("kind", TINY)
def test_taps_of_the_next_boundary_would_show(target, kind) -> None:
    """The negative control: the comparison sees taps that are off by one."""
    proposer = make_proposer(kind, target)
    lower = (max(0, boundary - 1) for boundary in proposer.config.taps)
    proposer._taps = tuple(dict.fromkeys(lower))
    unit = Unit(target, proposer)
    unit.run_all()
    assert unit.compared.num_right < 0.9 * unit.compared.num_compared


@pytest.mark.parametrize("kind", kinds_with_kv())
def test_while_nothing_is_drafted_head_kv_is_written_a_page_at_a_time(
    target, kind, monkeypatch
) -> None:
    """Each full page has its head KV, for any request that hits it."""
    proposer = make_proposer(kind, target)
    write, written = proposer.head_kv._write, list[int]()

    def counted(found: Written) -> Tensor | None:
        written.append(len(found.slots))
        return write(found)

    monkeypatch.setattr(proposer.head_kv, "_write", counted)
    unit = Unit(target, proposer, speculator=FixedDepth(0))
    prompt = prompt_of(CHUNK)
    request = unit.add("a", prompt, 5 * PAGE_SIZE, 0.0)
    unit.driver.run()
    num_pages = (len(request.tokens) - 1) // PAGE_SIZE
    assert sum(written[1:]) == num_pages * PAGE_SIZE - CHUNK
    assert len(written) <= 1 + num_pages
    assert proposer.head_kv.ready.sum() == num_pages


def test_taps_that_wait_do_not_hold_those_of_the_whole_step(target) -> None:
    proposer = make_proposer("block", target)
    unit = Unit(target, proposer, speculator=FixedDepth(0))
    unit.add("a", prompt_of(CHUNK + 1), 2, 0.0)
    unit.add("b", prompt_of(CHUNK - 2, 1), 2, 0.0)
    while unit.scheduler.num_requests:
        unit.driver.step()
        for span in proposer.head_kv.spans.values():
            for part in span.waiting:
                assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize("kind", kinds_with_kv())
def test_a_slot_before_the_position_would_show(target, kind, monkeypatch) -> None:
    """The negative control: head KV that lies one slot too low."""
    proposer = make_proposer(kind, target)
    write = proposer.head_kv._write

    def low(written: Written) -> Tensor | None:
        return write(written._replace(slots=np.roll(written.slots, 1)))

    monkeypatch.setattr(proposer.head_kv, "_write", low)
    unit = Unit(target, proposer)
    unit.run_all()
    assert unit.compared.num_right < 0.9 * unit.compared.num_compared


@torch.inference_mode()
def test_a_head_that_knows_the_target_is_always_right(folder) -> None:
    """A target that goes by its last token alone, and a Markov head that holds its table."""
    target = load_decoder(folder)
    for layer in target.weights.layers:
        for packed in (layer.mixer.o, layer.mlp.down):
            packed.weight.zero_()
    shape = {"markov_rank": target.config.hidden_size, "markov_kind": "vanilla"}
    head = BlockHead(block_config(target.config, block_size=6, **shape))
    assert head.markov_head is not None
    normed = target.ops.norm(target.weights.embedding, target.weights.final_norm)
    head.markov_head.markov_w1.weight.copy_(normed)
    head.markov_head.markov_w2.weight.copy_(target.weights.embedding)
    head.norm.weight.zero_()
    joined = join(head, target)
    for temperature in (0.0, 1.0):
        unit = Unit(target, proposer_of("block", joined))
        request = unit.add("a", prompt_of(21), 60, temperature)
        unit.driver.run()
        assert request.usage.accepted_tokens == request.usage.proposed_tokens > 20
