"""Ranks: what rank 0 tells the others, and what becomes of them when one fails."""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.core.errors import ModelLoadError, RankLost
from foretoken.core.execution.ranks import ranks as ranks_module
from foretoken.core.execution.ranks.ranks import Ranks, TpDecoder
from foretoken.core.execution.ranks.worker import (
    HERE,
    LOADED,
    batch_of,
    copy_message,
    pass_message,
    pool_message,
    serve_rank,
)
from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.model.drafting.rough_copy import NoRoughCopyError, rough_decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import RaggedBatch, Segment, Wanted, build_batch
from foretoken.core.tiers.page_records import PageRecords
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
    assert (found.page_size, found.rope_until) == (batch.page_size, batch.rope_until)
    assert found.num_logits == 0, "the other ranks compute no logits"
    assert np.array_equal(found.page_table, batch.page_table)


@pytest.mark.parametrize("shares_pools", [False, True])
def test_slots_are_copied_on_every_rank(folder: Path, shares_pools: bool) -> None:
    """Rows that lie elsewhere first give the logits of rows in their place."""
    with tp_decoder(folder, 2, shares_pools=shares_pools) as decoder:
        check_copies(load_decoder(folder), decoder)


def check_copies(*decoders: Decoder) -> None:
    found = []
    for each in decoders:
        pool = each.make_pool(8, page_size=8)

        def run(segment: Segment, decoder=each, pool=pool) -> torch.Tensor:
            batch = decoder.batch([segment], page_size=8)
            return decoder.forward(batch, pool).logits.clone()

        run(Segment([5, 6, 7], 0, PAGES[:1], 0))
        run(Segment([8, 9], 3, PAGES[:1], 2, tail=[40, 41]))
        pool.copy_slots([40, 41], [3, 4])
        found.append(run(Segment([10], 5, PAGES[:1], 1)))
    torch.testing.assert_close(*found, atol=3e-5, rtol=0)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_page_of_all_ranks_is_read_and_written_by_rank_0_where_pools_are_shared(
    folder: Path, kv_dtype: KvDtype
) -> None:
    with tp_decoder(folder, 2, shares_pools=True) as decoder:
        pool = decoder.make_pool(8, page_size=8, kv_dtype=kv_dtype)

        def logits(segment: Segment) -> torch.Tensor:
            return decoder.forward(decoder.batch([segment], page_size=8), pool).logits.clone()

        logits(Segment([5, 6, 7, 8, 9, 10, 11, 12], 0, PAGES[2:3], 0))
        expected = logits(Segment([13], 8, PAGES[2:4], 1))
        records = PageRecords(pool.stored)
        assert records.num_bytes == decoder.bytes_per_page(page_size=8, kv_dtype=kv_dtype)
        page = bytes(records.read(2))
        records.target(6)[:] = page
        records.write(6)
        assert torch.equal(logits(Segment([13], 8, array("q", [6, 1]), 1)), expected)
        assert decoder.make_pool(2, page_size=8).stored[1].count_nonzero() == 0


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
        with pytest.raises(ValueError, match="the KV pool that was made last"):
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
    with pytest.raises(NoRoughCopyError, match="cannot be combined with --tp"):
        rough_decoder(decoder)


def test_a_message_that_a_rank_cannot_compute_ends_it(folder: Path) -> None:
    """The process ends with it, so its socket closes: by that rank 0 knows."""
    ours, theirs = Pipe()
    rank = load_decoder(folder)
    assert isinstance(rank, OwnDecoder)
    ours.send_bytes(pool_message(2, 8, "auto").tobytes())
    ours.send_bytes(copy_message([1], [1]).tobytes())
    with pytest.raises(ValueError, match="cannot copy slots"):
        serve_rank(theirs, rank)
    ours.close()
    serve_rank(theirs, rank)  # returns: rank 0 is gone


# -- the start ------------------------------------------------------------------------------------


class Process:
    """A rank that does as a test says, in place of a process; ``code``: once it has ended."""

    made: list[Process]

    def __init__(
        self, words: Sequence[str], *, pass_fds: Sequence[int], stdin: int, env: dict[str, str]
    ) -> None:
        self.channel = Connection(os.dup(pass_fds[0]))
        self.code: int | None = None
        self.made.append(self)

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        return self.code or 0

    def kill(self) -> None:
        self.code = -9
        self.channel.close()


class Met:
    """Rank 0's part of the sums."""

    waits = False

    def __init__(self, *_: Any) -> None: ...

    def wait_in_sums(self) -> None:
        self.waits = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    monkeypatch.setattr(Process, "made", [], raising=False)
    monkeypatch.setattr(ranks_module.subprocess, "Popen", Process)
    monkeypatch.setattr(ranks_module, "GlooComm", Met)
    return Process.made


def say(monkeypatch: pytest.MonkeyPatch, *words: bytes) -> None:
    """Have each rank say these words when it starts."""
    start = Ranks._start

    def start_and_say(ranks: Ranks, job: dict[str, Any]) -> None:
        start(ranks, job)
        for word in words:
            Process.made[-1].channel.send_bytes(word)

    monkeypatch.setattr(Ranks, "_start", start_and_say)


def test_the_place_where_ranks_meet_lasts_until_the_last_one_is_loaded(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, HERE)
    ranks = Ranks(Path("model"), 3, {})
    job = json.loads(processes[1].channel.recv_bytes())
    folder = Path(job["folder"])
    assert folder.is_dir(), "this rank may still look for the others"
    for process in processes:
        process.channel.send_bytes(LOADED)
    ranks.wait_until_loaded()
    assert not folder.exists()
    ranks.end(at_once=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [((), "rank 1 did not start within"), ((HERE,), "could not load its part of the model within")],
)
def test_a_rank_that_says_nothing_is_not_waited_for_without_end(
    processes: list[Process],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[bytes, ...],
    told: str,
) -> None:
    monkeypatch.setattr(ranks_module, "START_SECONDS", 0.02)
    monkeypatch.setattr(ranks_module, "LOAD_SECONDS", 0.02)
    say(monkeypatch, *words)

    def start() -> None:
        ranks = Ranks(Path("model"), 2, {})
        try:
            ranks.wait_until_loaded()
        finally:
            ranks.end(at_once=True)

    with pytest.raises(ModelLoadError, match=told):
        start()
    assert processes[0].code == -9


def test_a_rank_that_ends_before_the_others_meet_it_is_not_waited_for(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    class Meeting(Met):
        def __init__(self, *_: Any) -> None:
            processes[0].code = 1
            is_over.wait(30)

    monkeypatch.setattr(ranks_module, "GlooComm", Meeting)
    say(monkeypatch, HERE)
    try:
        with pytest.raises(ModelLoadError, match="rank 1 exited before"):
            Ranks(Path("model"), 2, {})
        assert not is_over.is_set()
    finally:
        is_over.set()


def test_ranks_that_do_not_meet_are_a_model_that_cannot_be_loaded(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RankLost("the ranks did not meet: it took too long")

    monkeypatch.setattr(ranks_module, "GlooComm", fail)
    say(monkeypatch, HERE)
    with pytest.raises(ModelLoadError, match="did not meet"):
        Ranks(Path("model"), 2, {})
    assert processes[0].code == -9
