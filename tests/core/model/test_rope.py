"""RoPE's table by position, beyond the pieces in which it grows."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.model.description.rope import RopeSpec, RopeTable, inverse_frequencies

DIM = 8


def test_every_position_has_its_own_angle_however_far_the_table_has_grown() -> None:
    spec = RopeSpec(theta=100.0)
    positions = torch.tensor([0, 1, 4095, 4096, 4097, 8191, 8192, 9000])
    cos, sin = RopeTable(spec, DIM, "cpu").rows(positions, 9001)
    angles = positions.float()[:, None] * inverse_frequencies(spec, DIM)
    assert torch.equal(cos, angles.cos())
    assert torch.equal(sin, angles.sin())


@pytest.mark.parametrize("stops", [[1, 9001], [4096, 4097, 9001]])
def test_the_bits_do_not_depend_on_when_the_table_grew(stops: list[int]) -> None:
    positions = torch.tensor([3, 4096, 9000])
    at_once = RopeTable(RopeSpec(), DIM, "cpu").rows(positions, 9001)
    table = RopeTable(RopeSpec(), DIM, "cpu")
    for stop in stops[:-1]:
        table.rows(torch.tensor([stop - 1]), stop)
    in_steps = table.rows(positions, stops[-1])
    assert all(torch.equal(*pair) for pair in zip(at_once, in_steps, strict=True))


def test_the_table_stays_where_it_is_until_it_must_grow() -> None:
    """A graph reads it at an address."""
    table = RopeTable(RopeSpec(), DIM, "cpu")
    cos, sin = table.table(5000)
    assert len(cos) >= 5000
    table.rows(torch.tensor([len(cos) - 1]), len(cos))
    assert table.table(1)[0] is cos
    assert table.table(len(cos))[1] is sin
    assert torch.equal(table.table(len(cos) + 1)[0][: len(cos)], cos)
