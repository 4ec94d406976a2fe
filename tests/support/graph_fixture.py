"""A small decoder over the Triton kernels, whose layers are graphs that are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.model.description.config import DecoderConfig, LayerSpec
from foretoken.core.model.description.rope import RopeSpec
from foretoken.core.ops.base import Exactness, Ops
from foretoken.core.ops.kv_pool import KvLayer, KVPool
from foretoken.core.ops.mixers.attention import AttentionWeights
from foretoken.core.ops.triton.graph.graphs import Graph, MakeGraph, cuda_graphs
from foretoken.core.ops.triton.triton_ops import TritonOps
from foretoken.core.ops.weights import (
    DecoderWeights,
    ExpertWeights,
    HeadNorm,
    LayerWeights,
    MlpWeights,
    Norm,
    Routing,
)
from support.fake_graph import fake_graphs

PAGE_SIZE, NUM_PAGES, SIZE, VOCAB = 16, 60, 16, 20
CONFIG = DecoderConfig(
    model_type="qwen3",
    vocab_size=VOCAB,
    hidden_size=SIZE,
    intermediate_size=SIZE,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    norm_eps=1e-6,
    rope=RopeSpec(),
    max_model_len=NUM_PAGES * PAGE_SIZE,
    layers=(LayerSpec(), LayerSpec(window=40)),
)


class CountedGraph:
    """A graph that counts its replays."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.num_replayed = 0

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        return self._graph.capture(work)

    def replay(self) -> None:
        self.num_replayed += 1
        self._graph.replay()


class Graphs:
    """Makes graphs that share memory, and keeps them: CUDA's where the tests run on a GPU."""

    def __init__(self) -> None:
        self.made: list[CountedGraph] = []

    def __call__(self) -> CountedGraph:
        self.made.append(CountedGraph(self._make()))
        return self.made[-1]

    @cached_property
    def _make(self) -> MakeGraph:
        """The maker of graphs, chosen when a test runs: only then the device is known."""
        return cuda_graphs() if torch.get_default_device().type == "cuda" else fake_graphs()

    @property
    def num_replayed(self) -> int:
        return sum(graph.num_replayed for graph in self.made)


def make_decoder(
    graphs: MakeGraph | None, *, has_experts: bool = False, exact: Exactness = "off"
) -> Decoder:
    """Seeded weights; linears are the library's, which the interpreter does not slow down.

    But for the output layer: a graph computes it for as many rows as it has.
    """
    ops = TritonOps(exact=exact, graphs=graphs or "off")
    torch.manual_seed(0)
    layers = tuple(
        make_layer(ops, layer.window, index) for index, layer in enumerate(CONFIG.layers)
    )
    if has_experts:
        layers = (layers[0], replace(layers[1], mlp=make_mixture(ops)))
    embedding = torch.randn(VOCAB, SIZE)
    head = TritonOps(exact="spec").pack_linear(embedding)
    weights = DecoderWeights(embedding, layers, make_norm(), head)
    return OwnDecoder(CONFIG, weights, ops)


def make_layer(ops: Ops, window: int | None, index: int) -> LayerWeights:
    return LayerWeights(
        mixer_norm=make_norm(),
        mixer=AttentionWeights(
            qkv=ops.pack_linear(torch.randn(4 * 16, SIZE) / 4),
            head_norm=HeadNorm(torch.rand(3, 16) + 0.5, 1e-6),
            o=ops.pack_linear(torch.randn(SIZE, 2 * 16) / 4),
            window=window,
            kv=KvLayer(0, index),
        ),
        mlp_norm=make_norm(),
        mlp=make_mlp(ops),
    )


def make_mlp(ops: Ops) -> MlpWeights:
    return MlpWeights(
        gate_up=ops.pack_linear(torch.randn(2 * SIZE, SIZE) / 4),
        down=ops.pack_linear(torch.randn(SIZE, SIZE) / 4),
    )


def make_mixture(ops: Ops) -> ExpertWeights:
    return ExpertWeights(
        router=ops.pack_linear(torch.randn(5, SIZE), plain=True),
        routing=Routing(2, renorm=0.0),
        experts=tuple(make_mlp(ops) for _ in range(5)),
        shared=make_mlp(ops),
    )


def make_norm() -> Norm:
    return Norm(torch.rand(SIZE) + 0.5, CONFIG.norm_eps)


def make_pool(decoder: Decoder, kv_dtype: KvDtype = "auto") -> KVPool:
    """Every page holds something, as if it had been computed before."""
    pool = decoder.make_pool(NUM_PAGES, page_size=PAGE_SIZE, kv_dtype=kv_dtype)
    torch.manual_seed(1)
    pool.store(
        pool.blocks,
        (slice(None), slice(None)),
        torch.randn(len(pool.blocks), pool.page_size, pool.head_dim),
    )
    return pool
