"""Long chunks behind long prefixes: their stretches are computed apart and merged to fixed bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.interface.kv_codec import SCALED, KvDtype
from foretoken.core.ops.base import Exactness
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.kv_pool import KVPool

pytest.importorskip("triton")

from foretoken.core.ops.triton.attention import tile_schedule
from foretoken.core.ops.triton.graph import plan as plans
from foretoken.core.ops.triton.triton_ops import TritonOps
from support.attention_fixture import (
    HEADS,
    PAGE_SIZE,
    TURNS,
    assert_attention_agrees,
    filled_pool,
    make_batch,
    page_ids,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Lanes of a tile that hold no row divide nothing by nothing; they are not stored.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]
PLACE_BYTES = 4 * 6 * 18
TABLE = page_ids(*range(20, 78))
CASES = {  # positions of stretches: 256, or 512
    "into its second": Segment(range(24), 500, TABLE, 1),
    "in its first": Segment(range(6), 250, TABLE, 1),
    "behind many": Segment(range(6), 800, TABLE, 1),
}
BESIDE = [
    Segment([1], 520, page_ids(*range(33)), 1),
    Segment(range(4), 515, page_ids(*range(32), 79), 4),
]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows are a long chunk already: the interpreter is slow."""
    monkeypatch.setattr(tile_schedule, "NARROW_LEN", 4)
    torch.manual_seed(0)


def set_stretch(monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    monkeypatch.setattr(plans, "KV_SPLIT_GROUP", num_splits)


@pytest.mark.parametrize(
    ("kv_split_group", "window", "name"),
    [
        (1, None, "into its second"),
        (1, None, "behind many"),
        (2, None, "into its second"),
        (2, None, "behind many"),
        (2, None, "in its first"),
        (1, 40, "into its second"),
        (1, 300, "behind many"),
        (2, 300, "into its second"),
    ],
)
def test_a_chunk_agrees_with_the_oracle(
    kv_split_group: int, window: int | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stretch(monkeypatch, kv_split_group)
    beside = BESIDE if name == "into its second" else []
    assert_attention_agrees([*beside, CASES[name]], filled_pool(), window)


@pytest.mark.parametrize("kv_dtype", [codec.name for codec in SCALED])
def test_scaled_vectors_are_read_as_the_oracle_does(
    kv_dtype: KvDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stretch(monkeypatch, 1)
    assert_attention_agrees([CASES["into its second"]], filled_pool(kv_dtype), None)


class Scene:
    """One sequence, 58 pages long, whose queries and keys are known."""

    def __init__(self, exact: Exactness) -> None:
        self.pool: KVPool = filled_pool()
        self._ops = TritonOps(exact=exact)
        self._q = torch.randn(len(TABLE) * PAGE_SIZE, HEADS.num_heads * HEADS.head_dim)

    def rows(self, start: int, stop: int, window: int | None, beside: int = 0) -> Tensor:
        """The output of these rows in one chunk, behind rows of others."""
        others = BESIDE[:beside]
        plan = self.plan([*others, Segment(range(stop - start), start, TABLE, 1)])
        num_others = sum(len(each.token_ids) for each in others)
        q = torch.cat((torch.randn(num_others, self._q.shape[1]), self._q[start:stop]))
        if len(q) < 4:  # the fewest of a batch here
            q = torch.cat((q, q[-1:].expand(4 - len(q), -1)))
        out = self._ops.attention(q, 1, plan, window)
        return out[num_others : num_others + stop - start].clone()

    def plan(self, segments: list[Segment]) -> Any:
        return self._ops.plan(make_batch(segments), self.pool, HEADS, TURNS)


@pytest.mark.parametrize("window", [None, 300])
def test_a_rows_bits_are_the_same_beside_others_and_in_another_long_chunk(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stretch(monkeypatch, 2)
    scene = Scene("spec")
    chunk = scene.rows(506, 518, window)
    assert torch.equal(scene.rows(506, 518, window, beside=2), chunk)
    assert torch.equal(scene.rows(509, 518, window), chunk[3:])


@pytest.mark.parametrize("window", [None, 300])
def test_with_exact_batch_it_has_the_bits_of_a_row_alone_and_of_any_chunk(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stretch(monkeypatch, 2)
    scene = Scene("batch")
    chunk = scene.rows(506, 518, window)
    assert torch.equal(scene.rows(506, 518, window, beside=2), chunk)
    pieces = [scene.rows(506, 509, window), scene.rows(509, 518, window)]
    assert torch.equal(torch.cat(pieces), chunk)
    deep = scene.rows(900, 906, window)
    alone = [scene.rows(900 + index, 901 + index, window) for index in (0, 5)]
    assert torch.equal(torch.cat(alone), deep[[0, 5]])


@pytest.mark.parametrize("room", [66, 81])  # a tile has 22 places for each of three stretches
def test_a_pass_whose_sums_exceed_their_room_is_computed_in_parts_to_the_same_bits(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stretch(monkeypatch, 1)
    monkeypatch.setattr(plans, "WIDE_TILE", 64)
    scene = Scene("spec")
    whole = scene.rows(500, 524, None, beside=2)
    monkeypatch.setattr(plans, "MAX_PARTIAL_SUMS", room * PLACE_BYTES)
    assert torch.equal(scene.rows(500, 524, None, beside=2), whole)
    segments = [*BESIDE, Segment(range(24), 500, TABLE, 1)]
    device = scene.plan(segments).on_device((None,))
    assert len(device.works[None]) > 1
    assert device.partial_sums.num_partials <= room
    sums = device.partial_sums
    assert sums.acc.nbytes + 2 * sums.max_score.nbytes <= plans.MAX_PARTIAL_SUMS


def test_room_that_is_there_is_used_and_a_row_that_needs_more_gets_more() -> None:
    scene = Scene("spec")
    there = plans.PartialSums.of(2, HEADS, scene.pool.data.device)
    short = scene.plan([Segment([1], 300, TABLE, 1), Segment([1], 5, TABLE, 1)])
    assert short.on_device((None,), partial_sums=there).partial_sums is there
    assert len(short.on_device((None,)).works[None]) == 2
    long = scene.plan([Segment([1], 600, TABLE, 1)])
    assert long.on_device((None,), partial_sums=there).partial_sums.num_partials == 3


def test_the_first_stretch_of_a_prompt_leaves_no_sums() -> None:
    plan = Scene("spec").plan([Segment(range(58 * PAGE_SIZE), 0, TABLE, 1)])
    device = plan.on_device((None,))
    assert [work.kinds for work in device.works[None]] == [(False, True, False)]
    assert device.partial_sums.num_partials <= 1
