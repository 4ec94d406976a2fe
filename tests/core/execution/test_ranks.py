"""Ranks: what rank 0 tells the others, and what becomes of them when one fails."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.core.errors import RankLost
from foretoken.core.execution.ranks import TpDecoder
from foretoken.core.execution.tp_worker import (
    batch_of,
    copy_message,
    pass_message,
    pool_message,
    serve_rank,
)
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.rough_copy import NoRoughCopyError, rough_decoder
from foretoken.core.ops.batch import RaggedBatch, Segment, Wanted, build_batch
from support.checkpoints import make_checkpoint
from support.rank_threads import tp_decoder

PAGES = array("q", range(8))


def make_batch() -> RaggedBatch:
    """A chunk, a decode, and rows in spare slots as those of a tree are."""
    segments = [
        Segment([5, 6, 7], 0, PAGES[:1], 1),
        Segment([9], 20, PAGES[2:5], 1),
        Segment([1, 2, 3], 8, PAGES[5:7], 3, tail=[99, 101, 100]),
    ]
    return build_batch(segments, page_size=8, device="cpu", min_rows=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


@pytest.fixture
def decoder(folder: Path) -> Iterator[TpDecoder]:
    with tp_decoder(folder, 2) as found:
        yield found


def test_a_pass_is_told_in_integers_and_comes_whole() -> None:
    batch = make_batch()
    found = batch_of(np.frombuffer(bytearray(pass_message(batch).tobytes()), dtype=np.int64))
    for name in ("token_ids", "positions", "slots"):
        assert torch.equal(getattr(found, name), getattr(batch, name)), name
    for name in (
        "starts", "lens", "first_rows", "page_counts", "pages", "tail_lens", "tails",
    ):  # fmt: skip
        assert np.array_equal(getattr(found, name), getattr(batch, name)), name
    assert (found.page_size, found.turned_until) == (batch.page_size, batch.turned_until)
    assert found.num_logits == 0, "the other ranks compute no logits"
    assert np.array_equal(found.page_table, batch.page_table)


def test_slots_are_copied_on_every_rank(folder: Path, decoder: TpDecoder) -> None:
    """Rows that lie elsewhere first give the logits of rows in their place."""
    alone = load_decoder(folder)
    found = []
    for each in (alone, decoder):
        pool = each.make_pool(8, page_size=8)

        def run(segment: Segment, decoder=each, pool=pool) -> torch.Tensor:
            batch = decoder.batch([segment], page_size=8)
            return decoder.forward(batch, pool).logits.clone()

        run(Segment([5, 6, 7], 0, PAGES[:1], 0))
        run(Segment([8, 9], 3, PAGES[:1], 2, tail=[40, 41]))
        pool.copy_slots([40, 41], [3, 4])
        found.append(run(Segment([10], 5, PAGES[:1], 1)))
    torch.testing.assert_close(*found, atol=3e-5, rtol=0)


def test_a_rank_has_a_part_of_the_pool_and_the_whole_is_counted(
    folder: Path, decoder: TpDecoder
) -> None:
    alone = load_decoder(folder)
    assert decoder.bytes_per_page(page_size=8) == alone.bytes_per_page(page_size=8)
    part, whole = (each.make_pool(4, page_size=8).num_bytes for each in (decoder, alone))
    assert 2 * part == whole
    assert decoder.identity["ranks"] == "2"
    assert decoder.config == alone.config, "drafts are made for the whole model"


def test_a_pass_over_another_pool_or_of_vectors_is_refused(decoder: TpDecoder) -> None:
    first = decoder.make_pool(8, page_size=8)
    pool = decoder.make_pool(8, page_size=8)
    batch = decoder.batch([Segment([5], 0, PAGES[:1], 1)], page_size=8)
    vectors = torch.zeros(batch.num_rows, decoder.config.hidden_size)
    for refused, wanted in ((first, Wanted()), (pool, Wanted(inputs=vectors))):
        with pytest.raises(ValueError, match="the pool that was made last"):
            decoder.forward(batch, refused, wanted)
    assert decoder.forward(batch, pool).logits.isfinite().all(), "nothing was sent for them"


def test_a_rank_that_fails_in_a_pass_is_lost_for_good(
    decoder: TpDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = decoder.make_pool(8, page_size=8)
    batch = decoder.batch([Segment([5], 0, PAGES[:1], 1)], page_size=8)

    def fail(*_: object) -> None:
        raise MemoryError("no memory for attention")

    with monkeypatch.context() as broken:
        broken.setattr(decoder, "plans", fail)
        with pytest.raises(RankLost, match="no memory for attention"):
            decoder.forward(batch, pool)
    with pytest.raises(RankLost):
        decoder.forward(batch, pool)
    with pytest.raises(RankLost):
        pool.copy_slots([0], [1])


def test_a_part_of_a_model_has_no_rough_copy(decoder: TpDecoder) -> None:
    with pytest.raises(NoRoughCopyError, match="has no part on the other processes"):
        rough_decoder(decoder)


def test_a_message_that_a_rank_cannot_compute_ends_it(folder: Path) -> None:
    """The process ends with it, so its socket closes: by that rank 0 knows."""
    ours, theirs = Pipe()
    rank = load_decoder(folder)
    ours.send_bytes(pool_message(2, 8, "auto").tobytes())
    ours.send_bytes(copy_message([1], [1]).tobytes())
    with pytest.raises(ValueError, match="cannot be copied"):
        serve_rank(theirs, rank)
    ours.close()
    serve_rank(theirs, rank)  # returns: rank 0 is gone
