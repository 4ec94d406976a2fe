"""bfloat16 weights weights as float32: right, exact by rows, and taken where they are faster."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from foretoken.core.ops.backends import choose_ops
from foretoken.core.ops.native import native_library, products
from foretoken.core.ops.native.library import NativeLibrary
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.native.products import SETTING, bfloat16_products, choose_products
from foretoken.core.ops.native.structs.linear import (
    NativeLinear,
    Products,
    linear,
    pack_linear,
)
from support.native_variants import every_variant

SHAPES = [(64, 128), (37, 51), (1, 32), (130, 33)]


@pytest.fixture(params=every_variant())
def library(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    found = native_library(request.param)
    if found is None:
        pytest.skip("no C compiler")
    yield found
    found.set_threads(1)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)
    bfloat16_products.cache_clear()
    yield
    bfloat16_products.cache_clear()


def make(library: NativeLibrary, shape: tuple[int, int], kind: Products) -> NativeLinear:
    generator = torch.Generator().manual_seed(sum(shape))
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0])
    return pack_linear(library, weight.bfloat16(), bias.zero_(), products=kind)


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_products_of_bfloat16_weights_agree_with_float64(library, shape):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).bfloat16()
    bias, x = torch.randn(shape[0], generator=generator), rows(29, shape[1])
    packed = pack_linear(library, weight, bias, products="float32")
    expected = x.double() @ weight.double().T + bias.double()
    error = (linear(library, x, packed, torch.float32) - expected).norm() / expected.norm()
    assert error < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(library, shape):
    packed = make(library, shape, "float32")
    x = rows(67, shape[1])
    together = linear(library, x, packed, torch.float32)
    for count, threads in ((1, 1), (2, 2), (5, 1), (12, 2), (13, 1), (40, 2), (64, 1)):
        library.set_threads(threads)
        assert torch.equal(linear(library, x[-count:], packed, torch.float32), together[-count:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_an_instruction_for_pairs_both_kinds_are_the_same_bits(library, shape):
    if library.variant not in ("avx2", "scalar"):
        pytest.skip("its instruction for pairs adds in another order")
    x = rows(13, shape[1])
    packed = [make(library, shape, kind) for kind in ("bfloat16", "float32")]
    assert torch.equal(*(linear(library, x, each, torch.float32) for each in packed))


def test_what_is_not_finite_stays_in_its_own_row(library):
    x = rows(4, 51)
    x[1, 50], x[2, 8] = torch.nan, torch.inf
    out = linear(library, x, make(library, (37, 51), "float32"))
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()
    assert out[[0, 3]].isfinite().all()


class WithPairs:
    """Stands for a library whose CPU has the instruction."""

    variant = "avx512"


@pytest.mark.parametrize(
    ("bfloat16", "float32", "chosen"),
    [
        (100e-6, 50e-6, "float32"),
        (50e-6, 100e-6, "bfloat16"),
        (100e-6, 95e-6, "bfloat16"),  # no clear win: the choice must not change by chance
    ],
)
def test_the_clearly_faster_kind_is_chosen_and_logged(bfloat16, float32, chosen, caplog):
    seconds = {"bfloat16": bfloat16, "float32": float32}
    with caplog.at_level(logging.INFO):
        found = choose_products(WithPairs(), lambda _, kind: seconds[kind])
    assert found == chosen
    assert f"weights as {chosen}" in caplog.text
    assert f"{bfloat16 * 1e6:.0f} us as bfloat16, {float32 * 1e6:.0f} as float32" in caplog.text


def test_a_disturbance_during_some_rounds_changes_no_choice():
    disturbed = {
        "bfloat16": iter([900, 900, 50, 900, 900]),
        "float32": iter([100, 900, 900, 100, 100]),
    }
    found = choose_products(WithPairs(), lambda _, kind: next(disturbed[kind]) * 1e-6)
    assert found == "bfloat16"


def test_nothing_is_measured_where_there_is_no_instruction_for_pairs():
    library = WithPairs()
    library.variant = "avx2"
    assert choose_products(library, lambda *_: pytest.fail("measured")) == "float32"


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_the_environment_overrides_the_measurement(monkeypatch, kind):
    monkeypatch.setenv(SETTING, kind)
    monkeypatch.setattr(products, "choose_products", lambda _: pytest.fail("measured"))
    assert bfloat16_products(WithPairs()) == kind


def test_an_unknown_setting_is_refused(monkeypatch):
    monkeypatch.setenv(SETTING, "fp16")
    with pytest.raises(ValueError, match="must be auto, bfloat16 or float32"):
        bfloat16_products(WithPairs())


def test_one_measurement_serves_the_whole_process(monkeypatch):
    calls = []
    monkeypatch.setattr(products, "choose_products", lambda each: calls.append(each) or "float32")
    library = WithPairs()
    assert [bfloat16_products(library) for _ in range(2)] == ["float32", "float32"]
    assert calls == [library]


def test_the_engines_operations_pack_the_chosen_kind(monkeypatch):
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    monkeypatch.setenv(SETTING, "float32")
    ops = choose_ops("cpu", backend="native", dtype=torch.bfloat16)
    assert isinstance(ops, NativeOps)
    assert ops.pack_linear(torch.ones(3, 4).bfloat16()).struct.kind == 6  # as in linear_weight.h
    assert ops.pack_linear(torch.ones(3, 4)).struct.kind == 0
