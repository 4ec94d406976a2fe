"""The arithmetic of the replicas' benchmark."""

import pytest

from foretoken.bench.lab.replicas import carry_row, kill_row


def test_a_move_lasts_from_the_kill_to_the_next_token() -> None:
    moved = [0.0, 0.1, 0.2, 1.05, 3.0, 3.1]  # a token that was on its way came after the kill
    other = [0.0, 0.1, 0.9, 1.3, 1.4]
    row = kill_row(1.0, [moved, other], [True, False])
    assert row["until the first goes on, s"] == row["until the last, s"] == pytest.approx(2.0)
    assert row["longest gap of the others, s"] == pytest.approx(0.4)
    assert row["longest gap before, s"] == pytest.approx(0.8)


def test_a_kill_that_moves_nothing_measures_nothing() -> None:
    with pytest.raises(SystemExit):
        kill_row(1.0, [[0.5, 1.5]], [False])


def test_rounds_become_a_spread() -> None:
    carried = carry_row("front", 100.0, [(90.0, 20.0, 5.0)], [15.0])
    assert str(carried["tokens/s of a whole core"]) == "50000 [50000 .. 50000]"
    assert str(carried["more than one server"]) == "5 [5 .. 5]"
