"""The tuner of linear tiles: its plan needs no GPU, its figures no more than small shapes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from foretoken.bench.lab.gpu import tune_linear
from foretoken.core.ops.triton.linear.tiles import linear_launch, linear_tiles

pytestmark = pytest.mark.slow


def test_the_plan_is_printed_without_triton_or_a_gpu() -> None:
    code = (
        "import sys; from foretoken.bench.lab.gpu.tune_linear import main; code = main(['--plan']);"
        "sys.exit(code or any(name.split('.')[0] == 'triton' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    for name in tune_linear.SHAPES:
        assert f"| {name} " in done.stdout


def test_what_is_in_use_comes_first_and_nothing_twice() -> None:
    for bits, num_rows in [(bits, n) for bits, each in tune_linear.ROWS.items() for n in each]:
        found = tune_linear.choices(4096, 4096, num_rows, bits=bits)
        tiles = linear_tiles(4096, 4096, torch.bfloat16, bits=bits)
        assert [each.is_used for each in found] == [True] + [False] * (len(found) - 1)
        assert found[0].tiles == tiles
        assert found[0].launch == linear_launch(tiles, 4096, num_rows)
        assert len({(each.tiles, each.launch) for each in found}) == len(found) > 8


def test_a_shape_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune_linear.main(["--plan", "8b q"])
    assert "8b q is not one of" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_a_shape_is_timed_beside_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    small = {"SHAPES": {"tiny": (70, 40)}, "ROWS": {0: (1, 2)}, "REPEATS": 1, "COLD_BYTES": 1}
    for name, value in (small | {"READ_BYTES": 4096}).items():
        monkeypatch.setattr(tune_linear, name, value)
    all_choices = tune_linear.choices
    first_two = lambda *shape, **kinds: all_choices(*shape, **kinds)[:2]  # noqa: E731
    monkeypatch.setattr(tune_linear, "choices", first_two)
    monkeypatch.setattr(tune_linear, "choose_device", lambda _: torch.device("cpu"))
    assert tune_linear.main(["--json", str(tmp_path / "out.json")]) == 0
    lines = json.loads((tmp_path / "out.json").read_text())["lines"]
    assert [line["rows"] for line in lines if line["tiles"] == "F.linear"] == [1, 2]
    assert all(line["bits of those in use"] for line in lines if line["in use"])
    assert "| tiny " in capsys.readouterr().out
