"""Experts by the Triton kernels under the interpreter: the oracle's, and rows that stand alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretoken.core.ops.torch.experts import route as oracle_route
from foretoken.core.ops.torch.experts import run_experts as run_oracle
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.weights import Activation, ExpertWeights, Routing
from support.expert_weights import CLOSE, COUNT, HIDDEN, ROUTINGS, make_experts

pytest.importorskip("triton")

from foretoken.core.ops.triton.linear import experts
from foretoken.core.ops.triton.linear.experts import ExpertTables, route, run_experts
from foretoken.core.ops.triton.triton_ops import TritonOps

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("softmax", torch.float32), ("groups", torch.float32), ("renormed", torch.float16)],
)
def test_experts_equal_the_oracle_and_rows_stand_alone(name: str, dtype: torch.dtype) -> None:
    x, ops = torch.randn(13, HIDDEN).to(dtype), TritonOps()
    weights = make_experts(ops, ROUTINGS[name], dtype)
    whole = ops.experts(x, weights)
    expected = TorchOps().experts(x, make_experts(TorchOps(), ROUTINGS[name], dtype))
    torch.testing.assert_close(whole, expected, **CLOSE[dtype])
    for at, count in ((0, 1), (12, 1), (3, 7)):
        assert torch.equal(ops.experts(x[at : at + count], weights), whole[at : at + count])


def test_rows_of_an_expert_with_more_than_a_tile_stand_alone() -> None:
    """A router of zeros: all rows choose the first experts."""
    ops, x = TritonOps(), torch.randn(67, HIDDEN)
    weights = make_experts(ops, Routing(2), torch.float32)
    still = replace(weights, router=ops.pack_linear(torch.zeros(COUNT, HIDDEN), plain=True))
    whole = ops.experts(x, still)
    torch.testing.assert_close(whole, run_oracle(ops, x, still), **CLOSE[torch.float32])
    for at, count in ((0, 1), (60, 7)):
        assert torch.equal(ops.experts(x[at : at + count], still), whole[at : at + count])


@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_choose_what_the_oracle_chooses_and_the_first_of_equals(name: str) -> None:
    routing = ROUTINGS[name]
    logits = torch.randn(20, COUNT).mul_(4).round_()  # so that many are equal
    bias = torch.randn(COUNT).round_() if routing.score == "sigmoid" else None
    weights, chosen = route(logits, routing, bias)
    expected, numbers = oracle_route(logits, routing, bias)
    assert torch.equal(chosen.long(), numbers)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


def test_clamped_experts_with_biases_equal_the_oracle() -> None:
    x, ops = torch.randn(9, HIDDEN) * 2, TritonOps()
    clamped = Activation("clamped_swiglu", True, 0.5)
    made = [
        make_experts(each, Routing(4), torch.float32, activation=clamped, bias=True)
        for each in (ops, TorchOps())
    ]
    found = ops.experts(x, made[0])
    expected = TorchOps().experts(x, made[1])
    torch.testing.assert_close(found, expected, **CLOSE[torch.float32])


@pytest.mark.parametrize("bias", [False, True])
def test_int8_experts_are_those_of_one_linear_after_another(bias: bool) -> None:
    """The router is never quantised: it would choose other experts."""
    ops, x = TritonOps(quantize="int8"), torch.randn(9, HIDDEN).half()
    weights = make_experts(ops, Routing(3, renorm=0.0), torch.float16, bias=bias)
    found = ops.experts(x, weights)
    torch.testing.assert_close(found, run_oracle(ops, x, weights), **CLOSE[torch.float16])
    plain = make_experts(TritonOps(), Routing(3, renorm=0.0), torch.float16, bias=bias)
    assert torch.equal(ops.logits(x, weights.router), TritonOps().logits(x, plain.router))
    assert torch.equal(ops.experts(x[4:6], weights), found[4:6])


def test_experts_in_4_bits_are_those_of_one_linear_after_another() -> None:
    ops, x = TritonOps(), torch.randn(9, HIDDEN)
    weights = make_experts(ops, Routing(3, renorm=0.0), torch.float32, bias=True)
    rough = replace(
        weights,
        experts=tuple(
            replace(
                mlp,
                gate_up=ops.rough_copy(mlp.gate_up, x.dtype),
                down=ops.rough_copy(mlp.down, x.dtype),
            )
            for mlp in weights.experts
        ),
    )
    found = ops.experts(x, rough)
    torch.testing.assert_close(found, run_oracle(ops, x, rough), **CLOSE[torch.float32])
    error = (found - ops.experts(x, weights)).norm() / found.norm()
    assert 0.01 < float(error) < 0.3


def test_experts_that_the_library_would_multiply_are_the_same() -> None:
    """With exact off, weights are not in tiles; experts have no library."""
    x, routing = torch.randn(5, HIDDEN), Routing(3, renorm=0.0)
    found, expected = (
        ops.experts(x, make_experts(ops, routing, torch.float32))
        for ops in (TritonOps(exact="off"), TritonOps())
    )
    torch.testing.assert_close(found, expected, **CLOSE[torch.float32])


@pytest.mark.parametrize("count", [2, 7])
def test_rows_that_are_not_there_choose_no_expert_and_change_no_other(count: int) -> None:
    """With few pairs each may have a tile of its own; with many each expert has."""
    ops, x = TritonOps(), torch.randn(2 * count, HIDDEN)
    weights = make_experts(ops, Routing(3, renorm=0.0), torch.float32)
    alone = ops.experts(x[:count], weights)
    x[count:] = torch.nan
    slots = torch.tensor([*range(count), *[-1] * count], dtype=torch.int32)
    _, chosen = route(ops.logits(x, weights.router), weights.routing, None, slots)
    assert (chosen[count:] == COUNT).all()
    unshared = replace(weights, shared=None, shared_gate=None)
    for each, expected in ((weights, alone), (unshared, ops.experts(x[:count], unshared))):
        found = run_experts(ops, x, each, ExpertTables.of(each), slots)
        assert torch.equal(found[:count], expected)
    assert not found[count:].any(), "nothing is added up for them"


def test_a_row_of_nan_stays_so_and_harms_no_other() -> None:
    ops, x = TritonOps(), torch.randn(3, HIDDEN)
    weights = make_experts(ops, Routing(3, renorm=0.0), torch.float32)
    expected = ops.experts(x, weights)
    x[1] = torch.nan
    found = ops.experts(x, weights)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_every_pair_is_sorted_once_into_tiles_of_its_expert(num_rows: int) -> None:
    """All rows by one expert, by the last, or by any; tiles without rows say so."""
    chosen = torch.randint(COUNT, (num_rows, 2), dtype=torch.int32)
    for case in (chosen, torch.zeros_like(chosen), torch.full_like(chosen, COUNT - 1)):
        made = experts._sort(case, COUNT)
        number = case.flatten()
        assert made.order.tolist() == number.argsort(stable=True).tolist()
        found = [tile for tile in made.tiles.tolist() if tile[0] >= 0]
        rows = [(e, p) for e, begin, end in found for p in range(begin, min(begin + 64, end))]
        assert sorted(p for _, p in rows) == list(range(2 * num_rows))
        assert all(e == number[made.order[p]] for e, p in rows)
        assert {tile[0] for tile in made.tiles.tolist() if tile not in found} <= {-1}


def test_addresses_are_of_aligned_tensors_and_made_once() -> None:
    """Kernels load 16 bytes at once; a row of a stack of biases need not begin there."""
    rows = torch.randn(4, 37).unbind()
    made = experts.Addresses(rows)
    assert not (made.table % 16).any()
    assert all(torch.equal(*pair) for pair in zip(made._tensors, rows, strict=True))
    ops = TritonOps()
    weights: ExpertWeights = make_experts(ops, Routing(3), torch.float32)
    ops.experts(torch.randn(1, HIDDEN), weights)
    tables = ops._experts[weights]
    ops.experts(torch.randn(1, HIDDEN), weights)
    assert ops._experts[weights] is tables
    del weights
    assert not ops._experts, "they go with the weights"
