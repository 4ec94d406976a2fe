"""Measurements of the lab: each prints its options, and leaves its report where it was told to."""

from __future__ import annotations

import argparse
import inspect
from importlib import import_module
from pathlib import Path

import pytest

from foretoken.bench import lab
from foretoken.bench.common.report import read_options

FOLDER = Path(lab.__file__).parent


def with_options() -> list[str]:
    """Return the names of the lab's modules whose command takes arguments."""
    texts = {each.stem: each.read_text(encoding="utf-8") for each in FOLDER.glob("*.py")}
    return sorted(name for name, text in texts.items() if "\ndef main(argv" in text)


@pytest.mark.parametrize("name", with_options())
def test_each_measurement_prints_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = import_module(f"foretoken.bench.lab.{name}").main
    assert "argv" in inspect.signature(command).parameters
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    assert ended.value.code == 0
    assert "options:" in capsys.readouterr().out


def test_the_file_of_a_report_is_an_option_and_the_machine_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    options = read_options(parser, ["--out", str(tmp_path / "a.json")])
    assert options.out == tmp_path / "a.json"
    assert "machine: " in capsys.readouterr().out
    assert read_options(argparse.ArgumentParser(), []).out is None
