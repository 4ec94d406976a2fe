"""Steps overlap where the device launches them, and only there may a user ask for it."""

from __future__ import annotations

import pytest

from foretoken import LLM
from foretoken.api.cli.commands import main
from foretoken.core.errors import InvalidRequest


def test_steps_of_a_cpu_cannot_be_made_to_overlap() -> None:
    with pytest.raises(InvalidRequest, match="overlap on needs a GPU") as refused:
        LLM("builtin", overlap="on", threads=1)
    assert refused.value.param == "overlap"


def test_the_command_ends_with_code_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["run", "builtin", "Hello", "--overlap", "on", "--threads", "1"]) == 2
    assert "overlap on needs a GPU" in capsys.readouterr().err.splitlines()[-1]
