"""``python -m foretoken.bench.lab.profile``: its parts are those of a round and add up to it."""

from __future__ import annotations

import json

import pytest

from foretoken.bench.lab import profile
from foretoken.bench.lab.profile import HOST, Timer


def test_a_part_inside_another_is_counted_once() -> None:
    now = 0.0

    class Machine:
        def inner(self) -> str:
            nonlocal now
            now += 2.0
            return "done"

        def outer(self) -> str:
            nonlocal now
            now += 1.0
            return self.inner()

    timer, machine = Timer(lambda: now), Machine()
    timer.wrap(machine, "inner", "inner")
    timer.wrap(machine, "outer", "outer")
    assert machine.outer() == "done"
    assert dict(timer.seconds) == {"inner": 2.0, "outer": 1.0}


def test_the_time_of_what_fails_is_counted_too() -> None:
    now = 0.0

    class Machine:
        def fail(self) -> None:
            nonlocal now
            now += 2.0
            raise ZeroDivisionError

    timer, machine = Timer(lambda: now), Machine()
    timer.wrap(machine, "fail", "part")
    with pytest.raises(ZeroDivisionError):
        machine.fail()
    assert dict(timer.seconds) == {"part": 2.0}


def test_the_parts_of_a_round_add_up_to_it(tmp_path, capsys) -> None:
    out = tmp_path / "profile.json"
    profile.main(
        [
            "--streams",
            "2",
            "--length",
            "6",
            "--temperatures",
            "0",
            "--threads",
            "1",
            "--out",
            str(out),
        ]
    )
    (row,) = json.loads(out.read_text())["rows"]
    parts = sum(row[part] for part in (*HOST, "forward"))
    assert parts == pytest.approx(row["ms a round"], rel=1e-6)
    assert min(row["forward"], row["schedule"], row["commit"], row["verify"], row["batch"]) > 0
    assert "milliseconds a round of builtin" in capsys.readouterr().out
