"""Experts by the native kernels: what the oracle says, and the bits of every row on its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foretoken.core.errors import ModelLoadError
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.quantize import Quantize
from foretoken.core.ops.torch.experts import route, run_experts
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.weights import Activation, ExpertWeights, Routing
from support.expert_weights import CLOSE, COUNT, HIDDEN, ROUTINGS, make_experts
from support.native_variants import every_variant

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=every_variant())
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    torch.manual_seed(0)
    library = native_library(request.param)
    if library is None:
        pytest.skip("no native kernels on this machine")
    yield NativeOps(library)
    library.set_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_equal_the_oracle_and_rows_stand_alone(
    name: str, dtype: torch.dtype, ops: NativeOps
) -> None:
    """From one row to more than there are experts, on one thread and on two."""
    x = torch.randn(70, HIDDEN).to(dtype)
    weights = make_experts(ops, ROUTINGS[name], dtype)
    whole = ops.experts(x, weights)
    expected = TorchOps().experts(x, make_experts(TorchOps(), ROUTINGS[name], dtype))
    torch.testing.assert_close(whole, expected, **CLOSE[dtype])
    for threads in (1, 2):
        ops.set_threads(threads)
        for at, count in ((0, 1), (13, 1), (5, 2), (3, 9), (20, 41)):
            assert torch.equal(ops.experts(x[at : at + count], weights), whole[at : at + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_experts_with_biases_equal_the_oracle(dtype: torch.dtype, ops: NativeOps) -> None:
    x = torch.randn(9, HIDDEN).to(dtype) * 2
    clamped = Activation("clamped_swiglu", True, 0.5)
    made = [
        make_experts(each, Routing(4), dtype, activation=clamped, bias=True)
        for each in (ops, TorchOps())
    ]
    found = ops.experts(x, made[0])
    torch.testing.assert_close(found, TorchOps().experts(x, made[1]), **CLOSE[dtype])


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_experts_are_those_of_one_linear_after_another(
    quantize: Quantize, ops: NativeOps
) -> None:
    """The router is never quantised: it would choose other experts."""
    quantised = NativeOps(ops.library, quantize)
    x = torch.randn(33, HIDDEN).bfloat16()
    weights = make_experts(quantised, Routing(3, renorm=0.0), torch.bfloat16)
    found = quantised.experts(x, weights)
    torch.testing.assert_close(found, run_experts(quantised, x, weights), **CLOSE[torch.bfloat16])
    plain = make_experts(ops, Routing(3, renorm=0.0), torch.bfloat16)
    assert torch.equal(quantised.logits(x, weights.router), ops.logits(x, plain.router))
    for at, count in ((0, 1), (4, 20)):
        assert torch.equal(quantised.experts(x[at : at + count], weights), found[at : at + count])


def test_a_row_of_nan_stays_so_and_harms_no_other(ops: NativeOps) -> None:
    x = torch.randn(3, HIDDEN)
    weights = make_experts(ops, Routing(3, renorm=0.0), torch.float32)
    expected = ops.experts(x, weights)
    x[1] = torch.nan
    found = ops.experts(x, weights)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_of_equal_experts_the_first_are_chosen(ops: NativeOps) -> None:
    """A router of zeros: the same experts as the oracle's, in the same order."""
    weights, x = make_experts(ops, Routing(3), torch.float32), torch.randn(4, HIDDEN)
    still = ops.pack_linear(torch.zeros(COUNT, HIDDEN), plain=True)
    even = ExpertWeights(still, Routing(3), weights.experts)
    _, chosen = route(torch.zeros(4, COUNT), Routing(3), None)
    assert chosen.tolist() == [[0, 1, 2]] * 4
    torch.testing.assert_close(ops.experts(x, even), run_experts(ops, x, even))


def test_more_experts_than_there_is_room_for_are_refused(ops: NativeOps) -> None:
    weights = make_experts(ops, Routing(3), torch.float32)
    router = ops.pack_linear(torch.zeros(COUNT * 100, HIDDEN), plain=True)
    many = ExpertWeights(router, Routing(3), weights.experts * 100)
    with pytest.raises(ModelLoadError, match="1024 experts"):
        ops.experts(torch.randn(1, HIDDEN), many)
