"""Sums over ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from foretoken.core.errors import RankLost
from foretoken.core.ops import parallel
from foretoken.core.ops.parallel import in_rank_order, summed
from support.rank_threads import gloo_comms, on_ranks, thread_comms


def drawn(rank: int, rows: int = 8, width: int = 576) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("shared_items", [1, 8 * 576, parallel.SHARED_ITEMS])
def test_a_row_has_the_same_bits_beside_any_rows_and_all_reduce_gives_it_others(
    tmp_path, monkeypatch, shared_items: int
) -> None:
    """Why `Comm.sum` is not all_reduce: the sum of a row must not depend on the batch."""
    monkeypatch.setattr(parallel, "SHARED_ITEMS", shared_items)
    comms = gloo_comms(tmp_path, 4)

    def of_rank(rank: int) -> list[torch.Tensor]:
        part, comm = drawn(rank), comms[rank]
        row = part[2:3].contiguous()
        return [
            comm.sum(part, torch.float32)[2],
            comm.sum(row, torch.float32)[0],
            comm.all_reduce(part)[2],
            comm.all_reduce(row)[0],
        ]

    found = on_ranks(of_rank, range(4))
    for beside, alone, reduced_beside, reduced_alone in found:
        assert torch.equal(beside, alone)
        assert not torch.equal(reduced_beside, reduced_alone)
        assert torch.equal(beside, found[0][0]), "every rank has the same sum"
    torch.testing.assert_close(found[0][0], found[0][2])


@pytest.mark.parametrize("shared_items", [1, parallel.SHARED_ITEMS])
def test_a_sum_is_in_rank_order_and_rounded_once(tmp_path, monkeypatch, shared_items: int) -> None:
    monkeypatch.setattr(parallel, "SHARED_ITEMS", shared_items)
    comms = gloo_comms(tmp_path, 3)
    parts = [drawn(rank) * 10.0**rank for rank in range(3)]
    found = on_ranks(lambda rank: comms[rank].sum(parts[rank], torch.bfloat16), range(3))
    expected = ((parts[0] + parts[1]) + parts[2]).bfloat16()
    assert all(torch.equal(each, expected) for each in found)
    uneven = on_ranks(lambda rank: comms[rank].sum(parts[rank][:7, :575], torch.float32), range(3))
    assert torch.equal(uneven[2], ((parts[0] + parts[1]) + parts[2])[:7, :575])
    narrow = on_ranks(lambda rank: summed(parts[rank].bfloat16(), comms[rank]), range(3))
    wide = in_rank_order(torch.stack([part.bfloat16().float() for part in parts]))
    assert torch.equal(narrow[0], wide.bfloat16())


def test_a_rank_that_is_gone_ends_the_sum_of_the_others(tmp_path) -> None:
    comms = gloo_comms(tmp_path, 2)
    del comms[1]
    with pytest.raises(RankLost, match="a rank is gone"):
        comms[0].sum(drawn(0), torch.float32)


def test_a_sum_before_the_engine_starts_does_not_wait_without_end(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "CONNECT_TIMEOUT", timedelta(seconds=2))
    comms = gloo_comms(tmp_path, 2)
    with pytest.raises(RankLost, match=r"[Tt]imed out"):
        comms[0].sum(drawn(0), torch.float32)
    assert comms[1]._group is not None, "it was there all the time"


def test_without_ranks_a_part_is_the_sum() -> None:
    part = drawn(0)
    assert summed(part, None) is part
    comms = thread_comms(2)
    found = on_ranks(lambda rank: summed(drawn(rank), comms[rank]), range(2))
    assert torch.equal(found[1], drawn(0) + drawn(1))
