"""Adapters beside the Triton kernels: steps without graphs, and the same bits for each row."""

from __future__ import annotations

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
from foretoken.core.ops.triton.triton_ops import TritonOps
from support.graph_fixture import CONFIG, PAGE_SIZE, Graphs, make_decoder, make_pool

RANK = 3
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Rows of a bucket that are not there are void.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


def make_updates(decoder: OwnDecoder) -> dict[PackedLinear, LoraUpdate]:
    torch.manual_seed(2)
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


def test_a_step_with_an_adapter_uses_no_graph_and_is_that_of_merged_weights() -> None:
    graphs = Graphs()
    decoder = make_decoder(graphs)
    assert isinstance(decoder, OwnDecoder)
    updates = make_updates(decoder)
    adapter = LoraWeights(
        {each: decoder.ops.pack_lora(update, decoder.dtype) for each, update in updates.items()}
    )
    pages = [array("q", [index]) for index in range(2)]

    def logits(of: OwnDecoder, *adapters: LoraWeights | None) -> torch.Tensor:
        segments = [
            Segment([5, 7, 11], 0, page, 3, adapter=each)
            for page, each in zip(pages, adapters, strict=False)
        ]
        batch = of.batch(segments, page_size=PAGE_SIZE)
        return of.forward(batch, make_pool(of)).logits.clone()

    plain = logits(decoder, None)
    num_replayed = graphs.num_replayed
    assert num_replayed > 0
    found = logits(decoder, adapter, None)
    assert graphs.num_replayed == num_replayed
    expected = logits(merged(decoder, updates), None)
    torch.testing.assert_close(found[:3], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[3:], plain, rtol=1e-5, atol=1e-5)
    assert float((expected - plain).abs().max()) > 0.1
    num_replayed = graphs.num_replayed
    logits(decoder, None)
    assert graphs.num_replayed == num_replayed + 1


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
