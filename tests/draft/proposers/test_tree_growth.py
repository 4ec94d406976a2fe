"""Draft trees of a model: grown by the survival that the gaps of its own race tell."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.sampling.gumbel import gumbel_rows, vocabulary_hashes
from foretoken.core.sampling.verifier import Best
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.control.outcome import NUM_BEST, DraftNote
from foretoken.draft.proposers.gap_model import GapModel, default_gap_models
from foretoken.draft.proposers.lm_proposer import LmProposer
from foretoken.draft.proposers.step_trees import StepTrees, _Group
from foretoken.draft.proposers.tree_growth import ROOT, TreeGrowth
from foretoken.radix_cache import PrefixCache
from support.draft_trees import TreeDepth
from support.drafts import with_drafts
from support.fake_model import Driver
from support.tiny_pair import write_pair

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES = 256, 4, 120


def row_of(
    num_tokens: int = 6,
    max_draft: int = 6,
    *,
    num_spare: int = 2,
    temperature: float = 1.0,
    **prices: object,
) -> ScheduledRequest:
    params = TokenSamplingParams(temperature=temperature)
    return ScheduledRequest(
        request_id="a",
        tokens=array("q", range(5, 5 + num_tokens)),
        start=num_tokens - 1,
        stop=num_tokens,
        page_ids=array("q", range(20)),
        sampling=SamplingMetadata(params=params, seed=0, prompt_len=1),
        draft_plan=DraftPlan(max_draft=max_draft, **prices),  # type: ignore[arg-type]
        spare_page_ids=array("q", range(50, 50 + num_spare)),
    )


def grown(row: ScheduledRequest) -> TreeGrowth:
    return TreeGrowth(row, default_gap_models()[True], "lm", PAGE_SIZE)


def frontier_of(tree: TreeGrowth) -> list[int]:
    (nodes,) = StepTrees([tree]).frontiers()
    return nodes


def gain_of(tree: TreeGrowth) -> float:
    group = _Group([tree])
    group.rank()
    paths, _ = group._by_gain(group.frontiers(None))
    return group._added_net_gain(paths)


def draft_of(tree: TreeGrowth, owed: int = 0) -> Draft:
    (draft,) = StepTrees([tree]).drafts([owed])
    return draft


CLEAR = Best((1, 2, 3, 4), (9.0, 5.0, 4.0, 3.0))
CLOSE = Best((5, 6, 7, 8), (3.0, 2.9, 2.0, 1.5))


# -- gap models -----------------------------------------------------------------------------------


def test_a_close_race_is_less_sure_than_a_clear_one() -> None:
    model = default_gap_models()[True]
    clear, close = model.chances(CLEAR.scores), model.chances(CLOSE.scores)
    for chances in (clear, close):
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) < 1.0
    assert clear[0] > 0.95 > 0.5 > close[0]
    assert close[1] > 0.2 > clear[1]


def test_the_numbers_are_fitted_as_positions_are_judged() -> None:
    """Drafts of a distribution near the target's, under the same noise: right in ten bins."""
    generator = torch.Generator().manual_seed(1)
    num, vocab = 6000, 40
    target = torch.randn(num, vocab, generator=generator) * 2.0
    draft = target + 0.9 * torch.randn(num, vocab, generator=generator)
    hashes = vocabulary_hashes(vocab, torch.device("cpu"))
    noise = gumbel_rows([(7, position) for position in range(num)], hashes)
    winners = (target.log_softmax(-1) + noise).argmax(-1)
    best = (draft.log_softmax(-1) + noise).topk(NUM_BEST, dim=-1)
    model, told = GapModel(0.3, 1.0, 0.1), []
    for at in range(num):
        scores = best.values[at].tolist()
        found = (best.indices[at] == winners[at]).nonzero()
        rank = int(found[0]) if len(found) else None
        if at >= num // 2:
            told += [(c, r == rank) for r, c in enumerate(model.chances(scores))]
        model.learn(scores, rank)
    told.sort()
    for start in range(0, len(told), len(told) // 10):
        part = told[start : start + len(told) // 10]
        chance = sum(chance for chance, _ in part) / len(part)
        assert chance == pytest.approx(sum(hit for _, hit in part) / len(part), abs=0.03)


def test_one_token_left_behind_a_node_is_sure_and_teaches_nothing() -> None:
    model = GapModel(1.6, -0.9, 1.4)
    assert model.chances([3.0]) == [1.0]
    model.learn([3.0], 0)
    assert (model.falloff, model.rest, model.slope) == (1.6, -0.9, 1.4)
    model.learn([3.0, -math.inf], None)
    assert all(map(math.isfinite, (model.falloff, model.rest, model.slope)))


# -- growth ---------------------------------------------------------------------------------------


def paths(draft: Draft) -> set[tuple[int, ...]]:
    count = len(draft.token_ids)
    return {tuple(draft.token_ids[n] for n in draft.path(node)) for node in range(count)}


def test_the_best_nodes_are_drafted_depth_first_and_ranked_by_their_survival() -> None:
    tree = grown(row_of(max_draft=4))
    tree.expand(ROOT, CLOSE)
    frontier = tree.open(frontier_of(tree))
    assert [tree.nodes[node].token_id for node in frontier] == [5, 6, 7], "of four the last stays"
    for node in frontier[:2]:
        tree.expand(node, CLEAR)
    draft = draft_of(tree)
    assert list(draft.token_ids) == [5, 1, 6, 1]
    assert list(draft.parents) == [-1, 0, -1, 2]
    assert draft.survival[0] > draft.survival[1] > draft.survival[2] > draft.survival[3] > 0.2


def test_a_row_without_spare_pages_gets_a_chain() -> None:
    tree = grown(row_of(num_spare=0, row_prices=(0.01,)))
    tree.expand(ROOT, CLOSE)
    for _ in range(3):
        (node,) = tree.open(frontier_of(tree))
        tree.expand(node, CLEAR)
    assert (list(draft_of(tree, 3).token_ids), draft_of(tree, 3).parents) == ([5, 1, 1, 1], ())
    assert draft_of(tree, 3).note == DraftNote((1, 1, 1, 1), num_uncached=3)


def test_a_node_that_is_not_worth_its_row_is_not_drafted() -> None:
    tree = grown(row_of(row_prices=(0.3,)))
    tree.expand(ROOT, CLOSE)
    assert all(tree.nodes[node].survival > 0.3 for node in frontier_of(tree))
    assert len(draft_of(tree).token_ids) == sum(node.survival > 0.3 for node in tree.nodes) < 4


def test_nodes_that_open_a_tile_of_rows_pay_for_it_together() -> None:
    best = Best((1, 2, 3, 4), (1.0, 1.0, 1.0, 1.0))  # four tokens as likely as each other
    for tile, num_drafted in ((0.05, 4), (0.2, 4), (0.9, 2)):
        tree = grown(row_of(row_prices=(0.0, 0.0, tile, tile, tile, tile)))
        tree.expand(ROOT, best)
        chance = tree.nodes[0].survival
        assert (2 * chance > tile) == (num_drafted == 4)
        assert len(draft_of(tree).token_ids) == num_drafted


def test_a_pass_pays_by_what_it_brings_beyond_the_rows_that_it_opens() -> None:
    free, dear = (row_of(row_prices=p) for p in ((0.0,), (0.0, 0.0, 0.0, 0.0, 2.0, 2.0)))
    gains = []
    for row in (free, dear):
        tree = grown(row)
        tree.expand(ROOT, CLEAR)
        gains.append(gain_of(tree))
    assert gains[0] > gains[1] > 0.0, "a likelier node takes the row of an unlikely one"


def test_no_two_nodes_share_a_slot_and_only_the_best_path_lies_at_home() -> None:
    tree = grown(row_of(num_tokens=6, max_draft=16, num_spare=3))
    tree.expand(ROOT, CLOSE)
    for _ in range(4):
        for node in tree.open(frontier_of(tree)):
            tree.expand(node, CLEAR if tree.nodes[node].level % 2 else CLOSE)
    slots = [node.slot for node in tree.nodes if node.slot is not None]
    assert len(set(slots)) == len(slots) > 10
    home = [node.slot for node in tree.nodes if node.on_trunk and node.slot is not None]
    assert home == list(range(6, 6 + len(home)))
    assert all(slot >= 50 * PAGE_SIZE for slot in set(slots) - set(home))


def test_what_the_target_said_is_found_again_and_its_kv_is_called_home() -> None:
    tree = grown(row_of(num_tokens=6))
    tree.expand(ROOT, CLOSE)
    for node in tree.open(frontier_of(tree)):
        tree.expand(node, CLEAR)
    second = tree.nodes[1].slot
    assert second is not None
    before = tree.gap_model.falloff
    assert tree.judge([6, 2, 9]) == [(second, 6)], "the token behind was never computed"
    assert tree.gap_model.falloff != before
    assert tree.judge([99, 1]) == []


# -- beside tokens that were looked up -------------------------------------------------------------


def looked_up(
    *token_ids: int, survival: Sequence[float], num_spare: int = 2, **options: float
) -> ScheduledRequest:
    draft = Draft(array("q", token_ids), ("suffix",) * len(token_ids), survival=survival)
    row = row_of(num_spare=num_spare, row_prices=(0.05,), **options)  # type: ignore[arg-type]
    return with_drafts(row, draft=draft)


def survival_of(tree: TreeGrowth) -> dict[int, float]:
    """Return the survival of the tokens at the first level."""
    return {node.token_id: node.survival for node in tree.nodes if node.level == 1}


def test_a_token_that_both_guess_has_the_better_survival_and_counts_for_both() -> None:
    tree = grown(looked_up(5, 9, survival=(0.3, 0.2)))
    tree.expand(ROOT, CLOSE)
    (alone,) = (grown(row_of()),)
    alone.expand(ROOT, CLOSE)
    assert survival_of(tree)[5] == survival_of(alone)[5] > 0.3
    assert survival_of(tree) == survival_of(alone), "nobody else is the worse for it"
    draft = draft_of(tree)
    assert draft.sources[:2] == ("suffix", "suffix")
    assert list(draft.token_ids[:2]) == [5, 9]
    assert (draft.survival[0] > 0.3, draft.survival[1]) == (True, 0.0), (
        "the model did not find the second"
    )


def test_no_pass_computes_the_last_level_whose_followers_cannot_be_verified() -> None:
    tree = grown(looked_up(5, 9, 7, survival=(0.9, 0.8, 0.7), max_draft=3))
    assert tree.open([0, 1, 2]) == [0, 1]


def test_what_one_side_is_sure_of_leaves_little_for_the_other() -> None:
    sure = grown(looked_up(9, survival=(0.9,)))
    sure.expand(ROOT, CLOSE)
    alone = grown(row_of())
    alone.expand(ROOT, CLOSE)
    for token_id in CLOSE.token_ids:
        assert survival_of(sure)[token_id] == pytest.approx(0.1 * survival_of(alone)[token_id])
    doubtful = grown(looked_up(9, 10, survival=(0.2, 0.1)))
    doubtful.expand(ROOT, CLEAR)
    assert survival_of(doubtful)[1] > 0.95
    assert doubtful.nodes[0].survival < 0.01
    assert doubtful.nodes[1].survival == pytest.approx(doubtful.nodes[0].survival / 2), (
        "its path with it"
    )


def test_a_model_goes_on_where_the_text_that_was_looked_up_leaves_doubt() -> None:
    tree = grown(looked_up(9, 10, 11, survival=(0.9, 0.88, 0.8), max_draft=12))
    tree.expand(ROOT, CLOSE)
    frontier = tree.open(frontier_of(tree))
    assert [tree.nodes[node].token_id for node in frontier[:3]] == [9, 10, 11]
    assert [tree.nodes[node].slot for node in frontier[:3]] == [6, 7, 8], "in one pass, at home"
    tree.expand(frontier[2], CLEAR)
    draft = draft_of(tree)
    assert list(draft.token_ids[:4]) == [9, 10, 11, 1]
    assert draft.sources[:4] == ("suffix",) * 3 + ("lm",)
    assert len(draft.note.pass_rows) == 2


def test_a_row_without_spare_pages_gets_the_better_chain() -> None:
    for survival, expected in (((0.9, 0.8, 0.7), [9, 10, 11]), ((0.2, 0.1, 0.1), [5])):
        tree = grown(looked_up(9, 10, 11, survival=survival, num_spare=0))
        tree.expand(ROOT, CLOSE)
        draft = draft_of(tree, 2)
        assert (list(draft.token_ids), draft.note.num_uncached) == (expected, 2)
        assert any(draft.survival) == (expected == [5])


def test_a_chain_beside_one_that_was_looked_up_needs_scores_though_rows_have_no_price() -> None:
    """At a fixed depth, too: a token that is drawn alone seems certain, and would always win."""
    row = with_drafts(looked_up(9, 10, survival=(0.2, 0.1), num_spare=0), row_prices=())
    assert grown(row).wants_best
    assert not grown(with_drafts(row, draft=Draft())).wants_best


def test_the_target_may_walk_from_looked_up_tokens_to_the_models() -> None:
    tree = grown(looked_up(9, 10, survival=(0.6, 0.3), max_draft=12))
    tree.expand(ROOT, CLOSE)
    for node in tree.open(frontier_of(tree)):
        tree.expand(node, CLEAR)
    slots = {tree.nodes[node].token_id: tree.nodes[node].slot for node in (0, 1)}
    assert slots == {9: 6, 10: 7}
    assert tree.judge([9, 1]) == [(6, 6)]
    assert tree.judge([9, 10, 1]) == [(6, 6), (7, 7)]


# -- the proposer ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    torch.set_num_threads(1)
    folders = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)
    target, draft = (load_decoder(folder, exact="batch") for folder in folders)
    return target, draft


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids


class Doubting:
    """Compares every tree with one that a newcomer grows from nothing."""

    def __init__(self, proposer: LmProposer, draft: Decoder) -> None:
        self._proposer, self._draft = proposer, draft
        self.forget, self.observe = proposer.forget, proposer.observe
        self.traits, self.taps = proposer.traits, proposer.taps
        self.num_trees = 0

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        pool = self._draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
        newcomer = LmProposer(self._draft, pool, window=10_000)
        newcomer._grower.gap_models = self._proposer._grower.gap_models
        drafts = self._proposer.propose(rows)
        for draft, right in zip(drafts, newcomer.propose(rows), strict=True):
            assert draft == right or not draft.token_ids, "not caught up is the only excuse"
            self.num_trees += len(draft.runs) > 1
        return drafts


def served(
    target: Decoder, proposer: object, requests: Sequence[Request], num_pages: int, size: int
) -> dict[str, list[int]]:
    limits = SchedulerLimits(
        max_batch_tokens=120, max_running=4, max_queued=9, max_model_len=300,
        vocab_size=VOCAB_SIZE,
    )  # fmt: skip
    pool = target.make_pool(num_pages, page_size=PAGE_SIZE)
    runner = ModelRunner(target, pool, proposer)  # type: ignore[arg-type]
    scheduler = Scheduler(PrefixCache(num_pages, PAGE_SIZE), limits, TreeDepth(size))
    driver = Driver(scheduler, runner)  # type: ignore[arg-type]
    driver.add(*requests)
    driver.run()
    return driver.served


def asked(temperature: float = 1.0) -> list[Request]:
    params = TokenSamplingParams(temperature=temperature, max_tokens=50)
    return [
        Request(
            request_id=str(index),
            tokens=array("q", prompt_of(9 + index, index)),
            sampling=SamplingMetadata(params=params, seed=index, prompt_len=9 + index),
        )
        for index in range(4)
    ]


@pytest.mark.parametrize("num_pages", [120, 44])
def test_trees_are_those_of_a_newcomer_whatever_path_was_taken_before(pair, num_pages) -> None:
    """A slot of the draft's KV that is not its position's, or another path's, would show."""
    target, draft = pair
    proposer = LmProposer(draft, draft.make_pool(num_pages, page_size=PAGE_SIZE), window=24)
    doubting = Doubting(proposer, draft)
    requests = asked()
    told = served(target, doubting, requests, num_pages, 8)
    assert doubting.num_trees > 20
    assert told == served(target, None, asked(), num_pages, 0)
    assert sum(request.usage.accepted_tokens for request in requests) > 60


def test_what_was_looked_up_is_not_computed_before_its_request_is_caught_up(pair) -> None:
    """Its KV would stand behind a hole, and be counted for positions that have none."""
    _, draft = pair
    proposer = LmProposer(draft, draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE), window=3)
    row = looked_up(9, 10, survival=(0.9, 0.8), num_tokens=20, max_draft=6)
    (found,) = proposer.propose([row])
    assert list(found.token_ids) == [9, 10]
    assert found.note == DraftNote((), num_uncached=16)


def test_a_tree_is_accepted_further_than_a_chain_of_as_many_nodes(pair) -> None:
    target, draft = pair
    steps = {}
    for kind in ("chain", "tree"):
        proposer = LmProposer(draft, draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE))
        if kind == "chain":
            propose = proposer.propose
            proposer.propose = lambda rows, propose=propose: propose(  # type: ignore[method-assign]
                [replace(row, spare_page_ids=array("q")) for row in rows]
            )
        requests = asked()
        served(target, proposer, requests, NUM_PAGES, 12)
        steps[kind] = sum(request.usage.verify_steps for request in requests)
    assert steps["tree"] < steps["chain"]


def test_growing_ends_where_a_pass_would_not_pay(pair) -> None:
    _, draft = pair
    counts = []
    for pass_price in (0.0, 0.5, 100.0):  # however many rows it has
        proposer = LmProposer(draft, draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE))
        passes: list[int] = []
        run = proposer._grower.run
        proposer._grower.run = lambda *args, n=passes, do=run: n.append(1) or do(*args)  # type: ignore[method-assign]
        row = row_of(
            max_draft=12,
            num_spare=3,
            row_prices=(0.001,),
            pass_prices=(pass_price,) * 6,
        )
        (found,) = proposer.propose([row])
        assert found.token_ids
        counts.append(len(passes))
    assert counts[0] > counts[1] > counts[2] == 1
