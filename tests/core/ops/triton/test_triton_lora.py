"""Adapters beside the Triton kernels: graphs of one adapter, and the same bits for each row."""

from __future__ import annotations

import gc
import weakref
from array import array
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.ops.base import AttentionWeights, DecoderWeights, MlpWeights, PackedLinear
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.lora import LoraBlock, LoraUpdate, LoraWeights
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.triton.graph import step
from foretoken.core.ops.triton.triton_ops import TritonOps
from support.graph_fixture import CONFIG, PAGE_SIZE, Graphs, make_decoder, make_pool

RANK = 3
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Rows of a bucket that are not there are void.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


def make_updates(decoder: OwnDecoder, seed: int = 2) -> dict[PackedLinear, LoraUpdate]:
    torch.manual_seed(seed)
    found = {}
    for layer in decoder.weights.layers:
        for linear in layer.linears:
            outs, ins = linear.weight.shape
            block = LoraBlock(0, 0, torch.randn(outs, RANK) / 8)
            found[linear] = LoraUpdate(torch.randn(RANK, ins) / 8, (block,), outs)
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


def make_adapter(decoder: OwnDecoder, seed: int = 2) -> LoraWeights:
    updates = make_updates(decoder, seed)
    return LoraWeights(
        {each: decoder.ops.pack_lora(update, decoder.dtype) for each, update in updates.items()}
    )


class Adapted:
    """A decoder over a pool, whose segments may have adapters."""

    def __init__(self, graphs: Graphs | None) -> None:
        made = make_decoder(graphs)
        assert isinstance(made, OwnDecoder)
        self.decoder, self.pool = made, make_pool(made)

    def logits(self, *adapters: LoraWeights | None, start: int = 0, count: int = 3) -> torch.Tensor:
        """Logits of one segment for each adapter or none, on pages of its own."""
        segments = [
            Segment([5, 7, 11][:count], start, array("q", [page]), count, adapter=each)
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


def test_several_adapters_in_a_pass_use_no_graph(adapted: Adapted, graphs: Graphs) -> None:
    first, second = (make_adapter(adapted.decoder, seed) for seed in (2, 3))
    alone = [adapted.logits(each) for each in (first, second)]
    assert float((alone[0] - alone[1]).abs().max()) > 0.1
    num_replayed = graphs.num_replayed
    together = adapted.logits(first, second)
    assert graphs.num_replayed == num_replayed
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_an_adapter_takes_its_graphs_along(adapted: Adapted, graphs: Graphs) -> None:
    adapter = make_adapter(adapted.decoder)
    adapted.logits(adapter)
    kept = [weakref.ref(adapter), weakref.ref(graphs.made.pop())]
    del adapter
    gc.collect()
    assert [each() for each in kept] == [None, None]
    assert len(graphs.made) == 1, "that of the base"


def test_an_adapter_whose_graph_cannot_be_captured_is_computed_without(
    adapted: Adapted, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no memory")

    expected = adapted.logits(make_adapter(adapted.decoder))
    monkeypatch.setattr(step, "masked_ops", refuse)
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
        masked = before.clone()
        ops.add_lora(masked, x, torch.tensor([True, False, True, True, False]), lora)
        assert torch.equal(masked, out)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)
