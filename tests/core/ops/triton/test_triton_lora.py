"""Adapters beside the Triton kernels: graphs for any adapters, and the same bits for each row."""

from __future__ import annotations

import gc
import weakref
from array import array
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.lora import LoraBlock, LoraUpdate, LoraWeights
from foretoken.core.ops.mixers.attention import AttentionWeights
from foretoken.core.ops.row_extras import RowExtras
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.triton.triton_ops import TritonOps
from foretoken.core.ops.weights import DecoderWeights, MlpWeights, PackedLinear
from support.graph_fixture import CONFIG, PAGE_SIZE, CountedGraph, Graphs, make_decoder, make_pool

RANK = 3
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Rows of a bucket that are not there are void.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]


def make_updates(
    decoder: OwnDecoder, seed: int = 2, rank: int = RANK
) -> dict[PackedLinear, LoraUpdate]:
    torch.manual_seed(seed)
    found = {}
    for layer in decoder.weights.layers:
        for linear in layer.linears:
            outs, ins = linear.weight.shape
            block = LoraBlock(0, 0, torch.randn(outs, rank) / 8)
            found[linear] = LoraUpdate(torch.randn(rank, ins) / 8, (block,), outs)
    return found


def merged(decoder: OwnDecoder, updates: dict[PackedLinear, LoraUpdate]) -> OwnDecoder:
    def changed(linear: PackedLinear) -> PackedLinear:
        update = updates[linear]
        return decoder.ops.pack_linear(linear.weight + update.blocks[0].b @ update.a)

    layers = []
    for layer in decoder.weights.layers:
        mixer, mlp = layer.mixer, layer.mlp
        assert isinstance(mixer, AttentionWeights)
        assert isinstance(mlp, MlpWeights)
        mixer = replace(mixer, qkv=changed(mixer.qkv), o=changed(mixer.o))
        mlp = replace(mlp, gate_up=changed(mlp.gate_up), down=changed(mlp.down))
        layers.append(replace(layer, mixer=mixer, mlp=mlp))
    weights: DecoderWeights = replace(decoder.weights, layers=tuple(layers))
    return OwnDecoder(CONFIG, weights, decoder.ops)


def make_adapter(decoder: OwnDecoder, seed: int = 2, rank: int = RANK) -> LoraWeights:
    updates = make_updates(decoder, seed, rank)
    return LoraWeights(
        {each: decoder.ops.pack_lora(update, decoder.dtype) for each, update in updates.items()}
    )


class Adapted:
    """A decoder over a pool, whose segments may have adapters."""

    def __init__(self, graphs: Graphs | None) -> None:
        made = make_decoder(graphs, exact="spec")
        assert isinstance(made, OwnDecoder)
        self.decoder, self.pool = made, make_pool(made)

    def logits(self, *adapters: LoraWeights | None, start: int = 0, count: int = 3) -> torch.Tensor:
        """Logits of one segment for each adapter or none, on pages of its own."""
        segments = [
            Segment(
                [5, 7, 11][:count],
                start,
                array("q", [page]),
                count,
                extras=each and RowExtras(adapter=each),
            )
            for page, each in enumerate(adapters)
        ]
        batch = self.decoder.batch(segments, page_size=PAGE_SIZE)
        return self.decoder.forward(batch, self.pool).logits.clone()


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


@pytest.fixture
def adapted(graphs: Graphs) -> Adapted:
    return Adapted(graphs)


def test_a_step_with_an_adapter_is_that_of_merged_weights(adapted: Adapted, graphs: Graphs) -> None:
    decoder = adapted.decoder
    adapter = make_adapter(decoder)
    plain = adapted.logits(None)
    other = Adapted(None)
    other.decoder = merged(decoder, make_updates(decoder))
    expected = other.logits(None)
    assert float((expected - plain).abs().max()) > 0.1
    num_replayed = graphs.num_replayed
    for _ in range(2):
        found = adapted.logits(adapter, None)
        torch.testing.assert_close(found[:3], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[3:], plain, rtol=1e-5, atol=1e-5)
        assert torch.equal(adapted.logits(None), plain)
    assert graphs.num_replayed == num_replayed + 4


def test_graphs_of_an_adapter_serve_whatever_rows_it_has(adapted: Adapted, graphs: Graphs) -> None:
    """The mask of each pass, and the inputs that are the base's, are those of the pass."""
    eager = Adapted(None)
    ours, theirs = (make_adapter(each.decoder) for each in (adapted, eager))
    for places in ((0, 1), (1,), (), (0,), (0, 1, 2), (2,)):
        rows = [ours if place in places else None for place in range(3)]
        wanted = [theirs if place in places else None for place in range(3)]
        found = adapted.logits(*rows, start=4, count=1)
        expected = eager.logits(*wanted, start=4, count=1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(graphs.made) == 2, "one of the base and one of the adapter, of as many rows"
    assert graphs.num_replayed == 6


def test_a_graph_serves_any_adapters_and_each_has_the_bits_that_it_has_alone(
    adapted: Adapted, graphs: Graphs
) -> None:
    """Rows of several adapters and of the base, in any order, and of adapters that came later."""
    first, second, third, fourth = (make_adapter(adapted.decoder, seed) for seed in range(2, 6))
    alone = {each: adapted.logits(each) for each in (None, first, second, third, fourth)}
    assert float((alone[first] - alone[second]).abs().max()) > 0.1
    num_made = len(graphs.made)
    for rows in (
        (first, None, second),
        (second, first, None),
        (third, fourth, third),
        (None, fourth, first),
    ):
        num_replayed = graphs.num_replayed
        together = adapted.logits(*rows)
        assert graphs.num_replayed == num_replayed + 1
        for place, each in enumerate(rows):
            assert torch.equal(together[3 * place : 3 * place + 3], alone[each])
    assert len(graphs.made) == num_made + 2, "of 9 rows: one without adapters, one for up to four"
    adapted.logits(*alone)
    assert len(graphs.made) == num_made + 4, "of 15 rows: one without, one for up to 16"


def test_passes_outside_of_graphs_have_the_same_bits(adapted: Adapted) -> None:
    eager = Adapted(None)
    ours, theirs = (
        [make_adapter(each.decoder, 2), None, make_adapter(each.decoder, 3)]
        for each in (adapted, eager)
    )
    assert torch.equal(adapted.logits(*ours), eager.logits(*theirs))


def test_graphs_are_made_anew_for_higher_ranks_and_for_linears_that_none_changed(
    adapted: Adapted, graphs: Graphs
) -> None:
    decoder = adapted.decoder
    updates = make_updates(decoder, 3)
    (linear, update), *_ = updates.items()
    small = LoraWeights({linear: decoder.ops.pack_lora(update, decoder.dtype)})
    before = adapted.logits(small, None)
    wider, wide = make_adapter(decoder, 4), make_adapter(decoder, 5, rank=20)
    for each in (wider, wide):
        alone, num_made = adapted.logits(each, None), len(graphs.made)
        assert torch.equal(adapted.logits(small, None), before)
        assert torch.equal(adapted.logits(each, small)[:3], alone[:3])
        assert len(graphs.made) == num_made + 1, "one for up to four"
    assert float((alone - before).abs().max()) > 0.1


def test_graphs_keep_no_adapter(adapted: Adapted, graphs: Graphs) -> None:
    adapter = make_adapter(adapted.decoder)
    adapted.logits(adapter)
    (part, *_), kept = adapter.parts.values(), [weakref.ref(adapter)]
    kept.append(weakref.ref(part))
    del adapter, part, _
    gc.collect()
    assert [each() for each in kept] == [None, None]
    later, num_made = make_adapter(adapted.decoder, 3), len(graphs.made)
    adapted.logits(later)
    assert len(graphs.made) == num_made, "the graph is the later one's, too"


def test_an_adapter_whose_graph_cannot_be_captured_is_computed_without(
    adapted: Adapted, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no memory")

    eager = Adapted(None)
    expected = eager.logits(make_adapter(eager.decoder))
    adapted.logits(None)
    monkeypatch.setattr(CountedGraph, "capture", refuse)
    adapter = make_adapter(adapted.decoder)
    num_replayed, num_made = graphs.num_replayed, len(graphs.made)
    for _ in range(2):
        torch.testing.assert_close(adapted.logits(adapter), expected, rtol=1e-5, atol=1e-5)
    assert (graphs.num_replayed, len(graphs.made)) == (num_replayed, num_made + 1), "tried once"
    adapted.logits(None)
    assert graphs.num_replayed == num_replayed + 1, "the base has its graph"


def test_updates_by_tiles_are_the_oracles_and_rows_stand_alone() -> None:
    torch.manual_seed(0)
    blocks = (
        LoraBlock(0, 0, torch.randn(20, RANK)),
        LoraBlock(20, RANK, torch.randn(12, RANK)),
    )
    update = LoraUpdate(torch.randn(2 * RANK, 24), blocks, 32)
    x, before = torch.randn(5, 24), torch.randn(5, 32)
    found = []
    for ops in (TritonOps(graphs="off"), TorchOps()):
        lora = ops.pack_lora(update, torch.float32)
        out = before.clone()
        ops.add_lora(out, x, torch.tensor([0, 2, 3]), lora)
        found.append(out)
        alone = before.clone()
        ops.add_lora(alone, x, torch.tensor([2]), lora)
        assert torch.equal(alone[2], out[2])
        assert torch.equal(out[[1, 4]], before[[1, 4]])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)
