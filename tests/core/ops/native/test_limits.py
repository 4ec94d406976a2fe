"""The roofline's measurements, and memory in huge pages."""

from __future__ import annotations

import pytest

from foretoken.core.ops.native import limits, native_library
from foretoken.core.ops.native.memory import HugeArena
from support.native_variants import every_variant


@pytest.mark.parametrize("variant", every_variant())
def test_limits_are_positive_and_count_all_the_work(variant, monkeypatch):
    library = native_library(variant)
    if library is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(limits, "_READ_BYTES", 2 << 20)
    monkeypatch.setattr(limits, "_ROUNDS", 1)
    assert limits.read_bandwidth(library) > 0
    assert limits.matrix_rate(library) > 0
    # Of a vector's pairs, or of two tiles: 16 x 16 sums of 32 products each.
    has_tiles = variant in ("amx", "amx-emulated")
    operations = 2 * 16 * 16 * 32 if has_tiles else 4 * library.lanes
    num_rounds = 1 if variant == "amx-emulated" else 1000
    assert library.c.ft_multiply(2) == 2 * num_rounds * 12 * operations


def test_tensors_of_an_arena_do_not_overlap_and_are_aligned():
    arena = HugeArena()
    made = []
    for i, size in enumerate((1, 63, 1000, 70 << 20, 5)):
        tensor = arena.zeros((size,))
        assert not tensor.any()
        made.append((tensor.fill_(i), i))
    for tensor, i in made:
        assert tensor.data_ptr() % 64 == 0
        assert tensor.eq(i).all()


def test_a_large_tensor_begins_at_a_huge_page():
    tensor = HugeArena().zeros((3, 4 << 20))
    assert tensor.shape == (3, 4 << 20)
    assert tensor.data_ptr() % (2 << 20) == 0
