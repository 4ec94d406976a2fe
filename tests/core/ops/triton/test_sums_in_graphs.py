"""Sums over ranks inside graphs: each rank asks for the same ones in the same order.

Collectives of a GPU meet by their order alone. So the graphs of all ranks must be captured in one
order, hold the same sums, and be replayed in one order, with no sum that the host asks for between.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.ops.batch import NOTHING_MORE, Segment, Wanted
from foretoken.core.ops.mixers.attention import AttentionWeights
from foretoken.core.ops.weights import MlpWeights
from support.graph_fixture import CONFIG, PAGE_SIZE, SIZE, Graphs, make_decoder, make_pool

ON_DEVICE: list[tuple[int, int]] = []  # rank and rows of each sum, as the device does them
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Rows of a bucket that are not there are void.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]


@torch.library.custom_op("foretoken_tests::sum_over_ranks", mutates_args=())
def sum_over_ranks(part: Tensor, rank: int) -> Tensor:
    """In place of a collective: what a graph records, and notes when it is done."""
    ON_DEVICE.append((rank, len(part)))
    return part * 2.0


class RecordedComm:
    """A `Comm` that counts what the host asks for."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.num_asked = 0

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        self.num_asked += 1
        found: Tensor = sum_over_ranks(part, self.rank)
        return found.to(dtype)


class Rank:
    """A decoder whose layers are shared with other ranks, over a pool."""

    def __init__(self, rank: int, wanted: Wanted) -> None:
        self.comm, self.graphs, self.wanted = RecordedComm(rank), Graphs(), wanted
        made = make_decoder(self.graphs)
        assert isinstance(made, OwnDecoder)
        layers = []
        for layer in made.weights.layers:
            mixer, mlp = layer.mixer, layer.mlp
            assert isinstance(mixer, AttentionWeights)
            assert isinstance(mlp, MlpWeights)
            mixer, mlp = replace(mixer, comm=self.comm), replace(mlp, comm=self.comm)
            layers.append(replace(layer, mixer=mixer, mlp=mlp))
        weights = replace(made.weights, layers=tuple(layers))
        self.decoder = OwnDecoder(CONFIG, weights, made.ops)
        self.pool = make_pool(self.decoder)

    def compute(self, *lens: int) -> None:
        """A pass over chunks of these lengths, each on pages of its own."""
        segments = [
            Segment([5] * count, 0, array("q", range(8 * place, 8 * place + 8)), 1)
            for place, count in enumerate(lens)
        ]
        batch = self.decoder.batch(segments, page_size=PAGE_SIZE)
        self.decoder.forward(batch, self.pool, self.wanted)

    def done(self) -> list[int]:
        """Rows of the sums that were done since the last call, and were all its own."""
        found = [rows for rank, rows in ON_DEVICE if rank == self.comm.rank]
        assert len(found) == len(ON_DEVICE)
        ON_DEVICE.clear()
        return found


PASSES = ((1,), (1, 1, 1), (7,), (1,), (1, 1))
NUM_SUMS = 2 * CONFIG.num_layers


def test_all_ranks_capture_and_replay_the_same_sums_in_one_order() -> None:
    """The first one may want more of a pass, as it does for its drafters."""
    assert RecordedComm.size <= SIZE
    ON_DEVICE.clear()
    found = []
    for rank, wanted in enumerate((Wanted(taps=(0, 1)), NOTHING_MORE)):
        each = Rank(rank, wanted)
        each.compute(1)
        captured = each.done()
        steps = []
        for lens in PASSES:
            each.compute(*lens)
            steps.append(each.done())
        found.append((captured, steps))
    assert found[0] == found[1]


def test_a_replay_does_its_sums_without_the_host() -> None:
    ON_DEVICE.clear()
    rank = Rank(0, NOTHING_MORE)
    for lens in PASSES:
        rank.compute(*lens)
    rank.done()
    num_asked = rank.comm.num_asked
    for lens in PASSES:
        rank.compute(*lens)
        rows = rank.done()
        assert len(rows) == NUM_SUMS
        assert len(set(rows)) == 1, "a bucket's"
    assert rank.comm.num_asked == num_asked
    assert rank.graphs.num_replayed == 2 * len(PASSES)
