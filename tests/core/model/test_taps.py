"""Taps: the residual stream between the layers, from every backend, and what they are checked by.

A decoder of the first ``b`` layers alone normalises what a whole one has at boundary ``b``.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import ForwardOutput, Segment, Wanted
from foretoken.core.ops.layers import run_layers
from support.checkpoints import make_checkpoint
from support.native_variants import BACKENDS

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE_SIZE = 16
SEGMENTS = [
    Segment([5, 6, 7, 8, 9, 10, 11], 0, array("q", [3]), 1),
    Segment([12], 0, array("q", [1]), 0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("taps"), "qwen3")


@pytest.fixture(params=BACKENDS)
def decoder(request: pytest.FixtureRequest, folder: Path) -> Decoder:
    return load_decoder(folder, dtype="float32", backend=request.param)


def compute(decoder: Decoder, *taps: int) -> ForwardOutput:
    pool = decoder.make_pool(8, page_size=PAGE_SIZE)
    batch = decoder.batch(SEGMENTS, page_size=PAGE_SIZE)
    return decoder.forward(batch, pool, Wanted(taps=taps))


def columns(output: ForwardOutput, number: int) -> Tensor:
    width = output.hidden.shape[1]
    assert output.taps is not None
    return output.taps[:, number * width : (number + 1) * width]


def first_layers(decoder: Decoder, count: int) -> Decoder:
    weights = replace(decoder.weights, layers=decoder.weights.layers[:count])
    layers = decoder.config.layers[:count]
    config = replace(decoder.config, num_layers=count, layers=layers)
    return OwnDecoder(config, weights, decoder.ops)


def test_every_boundary_is_what_a_decoder_of_the_layers_below_it_normalises(
    decoder: Decoder,
) -> None:
    num_layers = decoder.config.num_layers
    output = compute(decoder, *range(1, num_layers + 1))
    for count in range(1, num_layers + 1):
        tap = columns(output, count - 1).contiguous()
        normed = decoder.ops.norm(tap, decoder.weights.final_norm)
        assert torch.equal(normed, compute(first_layers(decoder, count)).hidden)


def test_the_first_boundary_is_the_embedding(decoder: Decoder) -> None:
    token_ids = torch.tensor([each for segment in SEGMENTS for each in segment.token_ids])
    assert torch.equal(compute(decoder, 0).taps, decoder.weights.embedding[token_ids])


def test_taps_come_in_the_order_in_which_they_are_wanted_and_change_nothing_else(
    decoder: Decoder,
) -> None:
    last = decoder.config.num_layers
    plain, both = compute(decoder), compute(decoder, last, 0)
    assert plain.taps is None
    assert torch.equal(both.hidden, plain.hidden)
    assert torch.equal(both.logits, plain.logits)
    assert torch.equal(columns(both, 0), compute(decoder, last).taps)
    assert torch.equal(columns(both, 1), compute(decoder, 0).taps)


def test_all_layers_in_one_call_leave_the_taps_of_one_operation_after_another(
    decoder: Decoder,
) -> None:
    if decoder._compiled is None:
        pytest.skip("this backend has no such call")
    taps = (0, 1, decoder.config.num_layers)
    pool = decoder.make_pool(8, page_size=PAGE_SIZE)
    batch = decoder.batch(SEGMENTS, page_size=PAGE_SIZE)
    plans = decoder.plans(batch, pool)
    found = run_layers(decoder.ops, decoder.weights, batch.token_ids, plans, taps)
    assert torch.equal(found.taps, compute(decoder, *taps).taps)


@pytest.mark.parametrize("taps", [(-1,), (99,), (1, 1)])
def test_taps_that_there_are_not_are_refused(decoder: Decoder, taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="taps"):
        compute(decoder, *taps)
