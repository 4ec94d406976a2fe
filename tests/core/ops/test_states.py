"""Recurrent states: the bits of a row in any cut, beside any drafts, from any kept state."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from foretoken.core.ops.base import DeltaShape, Ops
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.state_pool import DRAFT_ROOM
from foretoken.core.ops.torch.torch_ops import TorchOps
from support.delta_fixture import SHAPE, Rows, Sequences, make_weights
from support.native_variants import every_variant

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 150
SHAPES = {
    "grouped": SHAPE,
    "tiled": SHAPE._replace(is_tiled=True),
    "three taps": DeltaShape(1, 3, key_dim=16, value_dim=16, conv_len=3),
    "real": DeltaShape(1, 2, key_dim=128, value_dim=128, conv_len=4),
}


@pytest.fixture(params=["torch"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    torch.manual_seed(0)
    if request.param == "torch":
        yield TorchOps()
        return
    library = native_library(request.param)
    if library is None:
        pytest.skip("no native kernels on this machine")
    yield NativeOps(library)
    library.set_threads(1)


def random_cuts(chance: random.Random, length: int = LENGTH) -> Iterator[tuple[int, int, int]]:
    """Start, final rows and drafts of passes: chunks, and single rows with drafts."""
    at = 0
    while at < length:
        count = chance.choice((1, 1, 1, 2, 5, 16, chance.randint(1, 60)))
        count = min(count, length - at)
        drafts = chance.choice((0, 1, 7, DRAFT_ROOM)) if count == 1 else 0
        yield at, count, drafts
        at += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, 32])
def test_bits_of_a_row_are_those_of_any_cut_and_of_any_drafts(
    page_size: int, dtype: torch.dtype, ops: Ops
) -> None:
    weights = [make_weights()]
    sequences = Sequences(ops, weights, length=LENGTH, page_size=page_size, dtype=dtype)
    expected = sequences.one_by_one()
    for seed in range(6):
        sequences.reset()
        cuts = random_cuts(random.Random(seed))
        found = [sequences.run(Rows(0, *cut))[0] for cut in cuts]
        assert torch.equal(torch.cat(found), expected), seed


def test_accepted_drafts_are_not_computed_again(ops: Ops) -> None:
    """A pass may begin behind rows that were drafts, more than one page end behind the state."""
    sequences = Sequences(ops, [make_weights()], length=LENGTH)
    expected = sequences.one_by_one()
    sequences.reset()
    sequences.run(Rows(0, 0, 16))
    run_as_drafts(sequences, start=16, count=1, accepted=DRAFT_ROOM)
    (found,) = sequences.run(Rows(0, 17 + DRAFT_ROOM, LENGTH - 17 - DRAFT_ROOM))
    assert torch.equal(found, expected[17 + DRAFT_ROOM :])


def run_as_drafts(sequences: Sequences, start: int, count: int, accepted: int) -> None:
    """A pass whose drafts are the rows that follow."""
    draw = sequences.draft_rows
    sequences.draft_rows = lambda sequence, at, n: (
        sequences.mixed[sequence, at : at + n],
        sequences.ba[sequence, at : at + n],
    )
    sequences.run(Rows(0, start, count, accepted))
    sequences.draft_rows = draw


@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_has_the_bits_of_each_of_its_sequences_alone(name: str, ops: Ops) -> None:
    weights = [make_weights(SHAPES[name])]
    sequences = Sequences(ops, weights, length=80, count=3)
    expected = [sequences.one_by_one(sequence) for sequence in range(3)]
    sequences.reset()
    cuts = [list(random_cuts(random.Random(seed), 80)) for seed in range(3)]
    found: list[list[Tensor]] = [[], [], []]
    while any(cuts):
        rows = [Rows(index, *each.pop(0)) for index, each in enumerate(cuts) if each]
        for each, out in zip(rows, sequences.run(*rows), strict=True):
            found[each.sequence].append(out)
    for outs, alone in zip(found, expected, strict=True):
        assert torch.equal(torch.cat(outs), alone)


@pytest.mark.parametrize("num_drafts", [0, 20])
def test_a_kept_state_continues_with_the_same_bits(num_drafts: int, ops: Ops) -> None:
    """Kept within a chunk, at its very end, and at the start of a pass."""
    sequences = Sequences(ops, [make_weights()], length=LENGTH, num_slots=8)
    expected = sequences.one_by_one()
    sequences.reset()
    sequences.run(Rows(0, 0, 16, 0, ((0, 1), (16, 2))))
    sequences.run(Rows(0, 16, 32, 0, ((16, 3), (32, 4), (48, 5))))
    sequences.run(Rows(0, 48, 15))
    sequences.run(Rows(0, 63, 1, num_drafts, ((64, 6),)))
    assert sequences.states.at[:, 0].tolist() == [48, 0, 16, 16, 32, 48, 64, 0]
    for position, slot in ((0, 1), (16, 2), (16, 3), (32, 4), (48, 5), (64, 6)):
        sequences.states.logs.fill_(255)
        sequences.states.copy_slot(slot, 0)
        (found,) = sequences.run(Rows(0, position, LENGTH - position))
        assert torch.equal(found, expected[position:]), position


def test_a_decode_step_that_failed_half_way_may_run_again(ops: Ops) -> None:
    """One layer has folded and written its rows, the other has not."""
    weights = [make_weights(), make_weights(layer=1)]
    sequences = Sequences(ops, weights, length=60)
    sequences.run(Rows(0, 0, 32), layers=(0, 1))
    expected = sequences.run(Rows(0, 32, 1, 20), layers=(0, 1))
    rest = sequences.run(Rows(0, 33, 27), layers=(0, 1))
    sequences.reset()
    sequences.run(Rows(0, 0, 32), layers=(0, 1))
    sequences.run(Rows(0, 32, 1, 20), layers=(0,))
    assert sequences.states.at[0].tolist() == [32, 16]
    for layers in ((0, 1), (1, 0)):
        found = sequences.run(Rows(0, 32, 1, 20), layers=layers)
    sequences.run(Rows(0, 32, 1), layers=(0, 1))
    found = sequences.run(Rows(0, 32, 1), layers=(0, 1))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(sequences.run(Rows(0, 33, 27), layers=(0, 1))[0], rest[0])


def test_a_rejected_draft_over_page_ends_moves_no_state(ops: Ops) -> None:
    sequences = Sequences(ops, [make_weights()], length=60)
    sequences.run(Rows(0, 0, 30))
    before = sequences.states.slots.clone()
    sequences.run(Rows(0, 30, 1, DRAFT_ROOM))
    assert sequences.states.at[0].tolist() == [16]
    assert torch.equal(sequences.states.slots, before)


def test_states_that_stand_behind_a_pass_are_refused(ops: Ops) -> None:
    sequences = Sequences(ops, [make_weights()], length=100)
    sequences.run(Rows(0, 0, 40))
    with pytest.raises(ValueError, match="slot 0 stands at \\[32\\]"):
        sequences.run(Rows(0, 31, 1))
    with pytest.raises(ValueError, match="does not reach the rows from 81 on"):
        sequences.run(Rows(0, 81, 1))
