"""Start-up measurements, on pools of any size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from foretoken.core.model.decoder import Decoder, sequence_pool
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.torch import experts
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.verifier import Best
from foretoken.draft.control import profiler as profiler_module
from foretoken.draft.control.cost_model import CostModel
from foretoken.draft.control.profiler import profile_proposer, profile_step
from foretoken.draft.proposers.lm_proposer import LmProposer
from foretoken.draft.proposers.self_draft import SelfProposer
from support.checkpoints import make_checkpoint
from support.tiny_pair import write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    folders: tuple[Path, Path] = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=256)
    target, draft = (load_decoder(folder, dtype="float32") for folder in folders)
    return target, draft


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 1), (2, 1), (1, 16), (5, 4), (200, 4)])
def test_every_pool_can_be_measured(pair, num_pages, page_size) -> None:
    models = [(model, model.make_pool(num_pages, page_size=page_size)) for model in pair]
    profile = profile_step(models[0], LmProposer(*models[1]))
    assert profile.forward[1] > 0
    assert profile.draft[1] > 0
    assert max(profile.forward) < max(2, num_pages * page_size)
    costs = CostModel()
    costs.load(profile)
    assert costs.step_seconds(1) > 0
    assert costs.is_ready


def test_without_a_draft_model_only_the_target_is_measured(pair) -> None:
    target = pair[0]
    profile = profile_step((target, target.make_pool(50, page_size=4)), None)
    assert profile.forward
    assert not profile.draft


def test_a_draft_pass_is_timed_as_drafts_compute_it(pair, monkeypatch) -> None:
    """A row of each request and the choice of what follows it, in one call where there is one."""
    target, draft = pair
    pool = draft.make_pool(400, page_size=4)
    pool.data.fill_(7.0)
    timed: set[tuple[int, ...]] = set()

    class OneCall:
        def best(
            self, segments: Sequence[Segment], rows: Sequence[DraftedRow], num_best: int
        ) -> list[Best]:
            assert len(rows) == len(segments)
            assert num_best > 1
            timed.add(tuple(len(segment.token_ids) for segment in segments))
            pages = [page_id for segment in segments for page_id in segment.page_ids]
            assert len(set(pages)) == len(pages), "each has pages of its own"
            assert len({segment.token_ids[0] for segment in segments}) > len(segments) // 2
            assert not pool.data[pages].any(), "pages are written before passes read them"
            return [Best((), ())] * len(segments)

    monkeypatch.setattr(draft, "row_passes", lambda _: OneCall())
    profile = profile_step((target, target.make_pool(200, page_size=4)), LmProposer(draft, pool))
    assert timed == {(1,) * num_rows for num_rows in profile.draft}
    assert len(timed) > 3


def test_no_more_drafts_are_timed_than_there_are_recurrent_states(tmp_path: Path) -> None:
    target = load_decoder(make_checkpoint(tmp_path, "qwen3_5"))
    pool = sequence_pool(target, 40, 4, page_size=16)
    assert set(profile_proposer(SelfProposer(target, pool), repeats=1)) == {1, 2, 4}


def test_pages_are_written_before_passes_read_them(pair, monkeypatch) -> None:
    """Pages never written are one page of zeros, which stays in the processor's cache."""
    target = pair[0]
    pool = target.make_pool(200, page_size=4)
    pool.data.fill_(7.0)
    read: list[float] = []

    def look(decoder: Decoder, pool: KVPool, segments: Sequence[Segment]) -> None:
        pages = [page_id for each in segments for page_id in each.page_ids]
        read.append(float(pool.data[pages].abs().max()))

    monkeypatch.setattr(profiler_module, "_compute", look)
    profile_step((target, pool), None)
    assert read
    assert max(read) == 0.0
    assert pool.data[-1].max() == 7.0, "no page is written that no pass reads"


KEY_S = 2e-8  # that a token behind a request takes for each row after the first


class Machine:
    """Stands in for the clock: what a pass takes is known, and how slow the machine is when."""

    def __init__(self, slow: dict[int, float]) -> None:
        self.num_passes = 0
        self._slow = slow  # by the number of the pass
        self._seconds = 0.0

    def compute(self, decoder: Decoder, pool: KVPool, segments: Sequence[Segment]) -> None:
        rows = sum(len(segment.token_ids) for segment in segments)
        seen = sum(segment.start for segment in segments)
        keys = sum(segment.start * (len(segment.token_ids) - 1) for segment in segments)
        seconds = 1e-3 + 1e-4 * rows + 1e-6 * seen + KEY_S * keys
        self._seconds = seconds * self._slow.get(self.num_passes, 1.0)
        self.num_passes += 1

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float:
        return self._seconds


@pytest.mark.parametrize(
    "slow",
    [{}, {0: 300.0}, dict.fromkeys(range(12, 20), 50.0), dict.fromkeys(range(25), 2.0)],
    ids=["quiet", "cold", "a stall", "slow for long"],
)
def test_a_slow_spell_of_the_machine_is_no_price(pair, monkeypatch, slow) -> None:
    machine = Machine(slow)
    monkeypatch.setattr(profiler_module, "_compute", machine.compute)
    monkeypatch.setattr(profiler_module, "make_stopwatch", lambda device: machine)
    target = pair[0]
    profile = profile_step((target, target.make_pool(400, page_size=16)), None)
    for num_rows, seconds in profile.forward.items():
        keys_s = 32 * (num_rows - 1) * KEY_S
        assert seconds == pytest.approx(1e-3 + 1e-4 * num_rows + 32e-6 + keys_s)
    assert profile.key_s == pytest.approx(KEY_S)


def test_the_ends_of_the_first_tiles_are_timed_and_the_rows_behind_them(pair) -> None:
    """Between 4 rows and 8 a line would be wrong by a third where a tile ends at 6."""
    target = pair[0]
    tile = target.ops.tile_rows
    profile = profile_step((target, target.make_pool(400, page_size=16)), None)
    assert {tile, tile + 1, 2 * tile, 2 * tile + 1} <= set(profile.forward)


def test_rows_that_are_timed_choose_different_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price of a row then holds what drafts cost a mixture of experts: weights of others."""
    counts = {"num_experts": 32, "num_local_experts": 32}
    target = load_decoder(make_checkpoint(tmp_path, "qwen3_moe", **counts))
    touched: dict[int, list[int]] = {}
    route = experts.route

    def counted(logits: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        scores, chosen = route(logits, *more)
        touched.setdefault(len(logits), []).append(len(chosen.unique()))
        return scores, chosen

    monkeypatch.setattr(experts, "route", counted)
    monkeypatch.setattr(profiler_module, "SECONDS", 0.0)  # one round
    profile_step((target, target.make_pool(50, page_size=16)), None)
    fewest = {num_rows: min(found) for num_rows, found in touched.items()}
    assert fewest[8] >= 12, "of 32; rows of one token choose 5, and no more than 10 in any number"
    assert fewest[8] < fewest[16] < fewest[32]
    assert fewest[128] >= 28
