"""A decoder's layers as graphs: captured once, replayed for every pass that fits, to its bits."""

from __future__ import annotations

import gc
import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.drafting.rough_copy import rough_decoder
from foretoken.core.ops.batch import Segment, Wanted
from foretoken.core.ops.kv_pool import KVPool

pytest.importorskip("triton")

from foretoken.core.ops.triton.attention import tile_schedule
from foretoken.core.ops.triton.graph import plan, step
from foretoken.core.ops.triton.graph.lm_head import FusedLmHead
from foretoken.core.ops.triton.graph.step import TritonStep
from foretoken.core.ops.triton.graph_inputs import GraphInputs
from support.fake_graph import fake_graphs
from support.graph_fixture import (
    NUM_PAGES,
    PAGE_SIZE,
    SIZE,
    VOCAB,
    CountedGraph,
    Graphs,
    make_decoder,
    make_pool,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Rows of a bucket that are not there are void, and so are lanes of a tile without a row.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows are a long chunk already, 256 positions a stretch: the interpreter is slow."""
    for module in (step, plan, tile_schedule):
        monkeypatch.setattr(module, "NARROW_LEN", 4)
    monkeypatch.setattr(plan, "KV_SPLIT_GROUP", 1)


class Twins:
    """A decoder with graphs and one without, each over a pool of its own with the same content."""

    def __init__(self, kv_dtype: KvDtype = "auto", *, has_experts: bool = False) -> None:
        self.graphs = Graphs()
        self.graphed, self.eager = (
            make_decoder(graphs, has_experts=has_experts) for graphs in (self.graphs, None)
        )
        self.pools = make_pool(self.graphed, kv_dtype), make_pool(self.eager, kv_dtype)

    def check(self, segments: Sequence[Segment]) -> None:
        """The next pass leaves the same rows, logits and pools."""
        hidden, logits = run(self.graphed, self.pools[0], segments)
        expected, expected_logits = run(self.eager, self.pools[1], segments)
        assert hidden.isfinite().all()
        assert torch.equal(hidden, expected)
        assert torch.equal(logits, expected_logits)
        assert torch.equal(self.pools[0].data, self.pools[1].data)


def run(decoder: Decoder, pool: KVPool, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    batch = decoder.batch(segments, page_size=PAGE_SIZE)
    output = decoder.forward(batch, pool)
    return output.hidden.clone(), output.logits


def segment(start: int, count: int, pages: Sequence[int], num_logits: int = 1) -> Segment:
    token_ids = [(7 * start + index) % VOCAB for index in range(count)]
    return Segment(token_ids, start, array("q", pages), num_logits)


TRUNK = range(17)  # a split and a page
DECODE = [segment(300, 1, range(19)), segment(5, 1, [40]), segment(256, 2, range(20, 37))]
PASSES = {
    "decode": DECODE,
    "fewer rows on other pages": [segment(17, 2, [50, 51]), segment(270, 1, range(30, 47))],
    "a chunk beside a row": [segment(252, 7, range(18)), segment(30, 1, [50, 51])],
    "sharers, one of them verifying": [
        segment(272, 1, [*TRUNK, 41]),
        segment(272, 3, [*TRUNK, 42], num_logits=3),
    ],
    "rows whose logits nobody wants": [segment(8, 3, [43], num_logits=0), segment(0, 1, [44])],
    "one row": [segment(64, 1, range(45, 50))],
    "decode again": DECODE,
}


@pytest.mark.parametrize(
    ("kv_dtype", "names", "num_graphs"),
    [("auto", tuple(PASSES), 3), ("int8", tuple(PASSES)[1:4], 2)],
)
def test_passes_one_after_another_have_the_bits_of_kernels_launched_one_by_one(
    kv_dtype: KvDtype, names: Sequence[str], num_graphs: int
) -> None:
    twins = Twins(kv_dtype)
    for name in names:
        twins.check(PASSES[name])
    assert twins.graphs.num_replayed == len(names)
    assert len(twins.graphs.made) == num_graphs, "one for each number of rows"


def test_a_copy_in_4_bits_has_graphs_of_its_own_over_the_pages_of_its_model() -> None:
    graphs = Graphs()
    target, eager = make_decoder(graphs), make_decoder(None)
    pools = make_pool(target), make_pool(eager)
    copies = rough_decoder(target), rough_decoder(eager)
    for number, name in enumerate(("decode", "fewer rows on other pages"), 1):
        run(target, pools[0], PASSES[name])
        run(eager, pools[1], PASSES[name])
        found, expected = (
            run(copy, pool, PASSES[name]) for copy, pool in zip(copies, pools, strict=True)
        )
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert torch.equal(pools[0].data, pools[1].data)
        assert [graph.num_replayed for graph in graphs.made[:2]] == [number, number]
    assert [*graphs_of(copies[0])] == [*graphs_of(target)] == [pools[0]]


def test_a_graph_has_room_for_whatever_experts_its_rows_choose() -> None:
    """Rows of its bucket that are not there choose none."""
    twins = Twins(has_experts=True)
    for name in ("decode", "fewer rows on other pages", "decode again"):
        twins.check(PASSES[name])
    assert twins.graphs.num_replayed == 3


def test_rows_given_as_vectors_are_those_of_kernels_launched_one_by_one() -> None:
    """A second pass has fewer rows; graphs whose rows are all of tokens are beside it."""
    twins = Twins()
    names = ("decode", "fewer rows on other pages", "decode again")
    for number, name in enumerate(names):
        twins.check(PASSES[name])
        found = []
        for decoder, pool in zip((twins.graphed, twins.eager), twins.pools, strict=True):
            batch = decoder.batch(PASSES[name], page_size=PAGE_SIZE)
            ids = batch.token_ids.clone()
            ids[number % 2 :: 2] = -1
            torch.manual_seed(number)
            vectors = torch.randn(batch.num_rows, SIZE)
            output = decoder.forward(replace(batch, token_ids=ids), pool, Wanted(inputs=vectors))
            found.append((output.hidden.clone(), output.logits))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
    assert twins.graphs.num_replayed == 2 * len(names)


def test_taps_of_graphs_are_those_of_kernels_launched_one_by_one_and_outlive_other_graphs() -> None:
    twins, taps = Twins(), (2, 0)
    found = [
        decoder.forward(decoder.batch(DECODE, page_size=PAGE_SIZE), pool, Wanted(taps=taps))
        for decoder, pool in zip((twins.graphed, twins.eager), twins.pools, strict=True)
    ]
    twins.check([segment(5, 1, [40])])
    assert found[0].taps is not None
    assert found[1].taps is not None
    assert torch.equal(found[0].taps, found[1].taps)
    embedding = twins.eager.weights.embedding
    rows = [token_id for each in DECODE for token_id in each.token_ids]
    assert torch.equal(found[0].taps[:, SIZE:], embedding[torch.tensor(rows)])
    assert twins.graphs.num_replayed == 2


def test_a_chunk_and_rows_of_many_requests_have_graphs_of_their_own() -> None:
    twins = Twins()
    twins.check([segment(0, 5, [3])])
    twins.check([segment(0, 3, [3]), segment(0, 3, [4])])
    assert len(twins.graphs.made) == 2
    assert twins.graphs.num_replayed == 2


def test_rows_of_a_bucket_that_are_not_there_write_nothing() -> None:
    decoder = make_decoder(Graphs())
    pool = make_pool(decoder)
    run(decoder, pool, DECODE)
    before = pool.data.clone()
    run(decoder, pool, DECODE)
    assert torch.equal(pool.data, before), "the same rows have the same KV"
    run(decoder, pool, [segment(12, 3, [55])])
    written = (pool.data != before).any(dim=-1).any(dim=(1, 2, 3)).nonzero().tolist()
    assert written == [[55, 12], [55, 13], [55, 14]]


@pytest.mark.parametrize(
    ("module", "limit", "value"),
    [
        (step, "BUCKETS", (1, 2)),
        (step, "MAX_WORDS", 20),
        (plan, "MAX_PARTIAL_SUMS", 4 * 4 * 2 * 18),
    ],
)
def test_a_pass_that_no_graph_has_room_for_is_computed_without(
    module: ModuleType, limit: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, value)
    twins = Twins()
    twins.check(DECODE)  # four rows, 37 pages, seven splits
    assert twins.graphs.num_replayed == 0
    twins.check([segment(5, 1, [40])])
    assert twins.graphs.num_replayed == 1


def test_positions_beyond_the_table_that_a_graph_reads_are_computed_without_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twins = Twins()
    twins.check([segment(5, 1, [40])])
    (shared,) = graphs_of(twins.graphed).values()
    assert shared.num_positions == NUM_PAGES * PAGE_SIZE, "no pool has more"
    ((shape, captured),) = shared.captured.items()
    short = replace(captured, num_positions=6, num_partials=100)
    monkeypatch.setitem(shared.captured, shape, short)
    for _ in range(2):
        twins.check([segment(6, 1, [40])])
    assert twins.graphs.num_replayed == 1
    twins.check([segment(5, 1, [40])])
    assert twins.graphs.num_replayed == 2
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "no CUDA graph fits 1 rows, 1 pages, 7 positions"
    ]


def graphs_of(decoder: Decoder) -> Any:
    assert isinstance(decoder._compiled, TritonStep)
    return decoder._compiled._graphs


def test_each_pool_has_graphs_of_its_own_which_go_with_it() -> None:
    graphs = Graphs()
    decoder, row = make_decoder(graphs), [segment(5, 1, [40])]
    pools = [make_pool(decoder) for _ in range(2)]
    untouched = pools[1].data.clone()
    run(decoder, pools[0], row)
    assert torch.equal(pools[1].data, untouched)
    first = run(decoder, pools[1], row)[0]
    assert torch.equal(pools[0].data, pools[1].data)
    assert torch.equal(first, run(decoder, pools[0], row)[0])
    assert [graph.num_replayed for graph in graphs.made] == [2, 1]
    assert len(graphs_of(decoder)) == 2
    pools.clear()
    gc.collect()
    assert len(graphs_of(decoder)) == 0


def test_warming_up_captures_every_graph_the_largest_first_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "BUCKETS", (1, 4, 5))
    graphs = Graphs()
    decoder = make_decoder(graphs)
    pool = make_pool(decoder)
    before = pool.data.clone()
    decoder.warm_up(pool, NUM_PAGES * PAGE_SIZE)
    (shared,) = graphs_of(decoder).values()
    assert [shape[:2] for shape in shared.captured] == [
        (5, True), (5, False), (4, False), (1, False),
    ]  # fmt: skip
    assert torch.equal(pool.data, before)
    run(decoder, pool, DECODE)
    assert len(graphs.made) == 4
    assert graphs.num_replayed == 1


def test_warming_up_for_longer_contexts_captures_graphs_that_read_the_longer_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "BUCKETS", (1,))
    graphs = Graphs()
    decoder = make_decoder(graphs)
    pool = decoder.make_pool(300, page_size=PAGE_SIZE)
    found = []
    for max_len in (100, 100, 4500, 100):
        decoder.warm_up(pool, max_len)
        found.append((len(graphs.made), graphs_of(decoder)[pool].num_positions))
    assert found == [(1, 4096), (1, 4096), (2, 4800), (2, 4800)]


def test_where_capturing_fails_kernels_are_launched_one_by_one_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    twins, row = Twins(), [segment(5, 1, [40])]
    twins.check(row)
    monkeypatch.setattr(CountedGraph, "capture", fail)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            twins.check([segment(17, 2, [50, 51])])
    twins.check(row)
    assert twins.graphs.num_replayed == 2, "a graph from before is still used"
    assert [record.message for record in caplog.records] == [
        "cannot capture a CUDA graph of 2 rows: no CUDA graphs are captured any more"
    ]


def test_a_graph_that_fails_with_a_head_is_captured_without_one_and_so_are_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    twins = Twins()
    with monkeypatch.context() as patch:
        patch.setattr(FusedLmHead, "compute", fail)
        for _ in range(2):
            twins.check([segment(17, 2, [50, 51])])
    twins.check([segment(5, 1, [40])])
    (shared,) = graphs_of(twins.graphed).values()
    has_head = {shape[:2]: captured.head is not None for shape, captured in shared.captured.items()}
    assert has_head == {(2, False): False, (1, False): True}
    assert (len(twins.graphs.made), twins.graphs.num_replayed) == (3, 3)
    assert [record.message for record in caplog.records] == [
        "cannot capture a CUDA graph of 2 rows with sampling"
    ]


class NoWaiting(TorchFunctionMode):
    """Refuses what waits for the value of a tensor. (`numpy` does not: a device's has none.)"""

    REFUSED = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in self.REFUSED:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("graphs", [Graphs(), None])
def test_nothing_waits_for_the_device_in_a_pass_and_one_copy_goes_there(
    graphs: Graphs | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder(graphs)
    pool = make_pool(decoder)
    run(decoder, pool, DECODE)
    copies: list[GraphInputs] = []
    upload = GraphInputs.upload

    def counted(self: GraphInputs, num_last: int | None = None) -> None:
        copies.append(self)
        upload(self, num_last)

    monkeypatch.setattr(GraphInputs, "upload", counted)
    batch = decoder.batch([segment(8, 3, [43]), segment(0, 1, [44])], page_size=PAGE_SIZE)
    found, compute = [], decoder._compiled
    monkeypatch.setattr(decoder, "_compiled", lambda *of: found.append(compute(*of)) or found[0])
    with NoWaiting():
        logits = decoder.forward(batch, pool).logits
    assert logits.shape == (2, VOCAB)
    (graph_inputs,) = copies
    assert found[0].logit_rows.data_ptr() == graph_inputs.device["logit_rows"].data_ptr()
    with pytest.raises(AssertionError, match="item waits"), NoWaiting():
        logits[0, 0].item()


def test_the_fake_replays_numbers_as_they_were_and_tensors_as_they_are() -> None:
    number, tensor, graph = [2.0], torch.ones(3, device="cpu"), fake_graphs()()
    out = graph.capture(lambda: tensor * number[0] + 1)
    assert out.isnan().all()
    tensor.fill_(5.0)
    number[0] = 7.0
    graph.replay()
    assert out.tolist() == [11.0, 11.0, 11.0]
    with pytest.raises(RuntimeError, match="reads the device"):
        fake_graphs()().capture(lambda: tensor * tensor[0].item())


def test_what_fakes_of_one_factory_leave_holds_until_any_of_them_is_replayed() -> None:
    tensor, make = torch.ones(3, device="cpu"), fake_graphs()
    graphs = [make(), make(), fake_graphs()()]
    sums = [graph.capture(lambda: (tensor + 1, torch.empty_like(tensor))) for graph in graphs]
    seen = []
    for graph, (_, unwritten) in zip(graphs, sums, strict=True):
        for _ in range(2):
            graph.replay()
            assert unwritten.isnan().all()
            unwritten.fill_(7.0)
        seen.append([bool(total.isfinite().all()) for total, _ in sums])
    assert seen == [[True, False, False], [False, True, False], [False, True, True]]


def test_others_may_work_once_the_device_has_the_graph_and_not_before() -> None:
    graphs = Graphs()
    decoder = make_decoder(graphs)
    pool, told = make_pool(decoder), list[int]()
    wanted = Wanted(on_kernels_started=lambda: told.append(graphs.num_replayed))
    for _ in range(2):
        decoder.forward(decoder.batch([segment(8, 1, [43])], page_size=PAGE_SIZE), pool, wanted)
    assert told == [1, 2]
