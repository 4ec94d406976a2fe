"""The command that is asked for the results of calls: its limit of time, and what is left of it."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from pathlib import Path

import pytest

from foretoken.api.replay.forms import Call
from foretoken.api.replay.tools import ToolCommand
from foretoken.core.errors import ForetokenError

CALL = Call(id="c", name="weather", arguments='{"city": "Oslo"}')
DEADLINE = 20.0


def tool(folder: Path, text: str, seconds: float) -> ToolCommand:
    """Return the command of a program, which can start itself as its child."""
    program = folder / "tool.py"
    own = "import sys, time\nif sys.argv[1:] == ['child']:\n    time.sleep(600)\n"
    starts = "import subprocess\nsubprocess.Popen([sys.executable, __file__, 'child'])\n"
    program.write_text(own + starts + text)
    return ToolCommand(shlex.join([sys.executable, str(program)]), seconds)


def running(folder: Path) -> list[str]:
    """Return the processes that have the folder in their command."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_text("utf-8", "replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def check_none_is_left(folder: Path) -> None:
    """Wait until no process is left; Linux ends a killed process a moment later."""
    deadline = time.monotonic() + DEADLINE
    while running(folder):
        assert time.monotonic() < deadline, running(folder)


@pytest.mark.parametrize("text", ["time.sleep(600)", "pass"], ids=["hangs", "leaves its output"])
def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path, text: str) -> None:
    command = tool(tmp_path, text, 2)
    said = r"--tools: .* did not end within 2 s \(--tool-seconds\) for weather\(.*Oslo.*\)$"
    with pytest.raises(ForetokenError, match=said) as caught:
        asyncio.run(asyncio.wait_for(command.ask(CALL), DEADLINE))
    assert "\n" not in str(caught.value)
    check_none_is_left(tmp_path)


def test_an_interrupted_command_is_killed_with_its_children(tmp_path: Path) -> None:
    began = tmp_path / "began"

    async def act() -> None:
        command = tool(tmp_path, f"open({str(began)!r}, 'w')\ntime.sleep(600)", 600)
        asked = asyncio.create_task(command.ask(CALL))
        await asyncio.to_thread(_wait_for, began)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(act())
    check_none_is_left(tmp_path)


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not file.exists():
        assert time.monotonic() < deadline


def test_the_result_is_what_the_command_prints() -> None:
    assert asyncio.run(ToolCommand("echo sleet", 60).ask(CALL)) == "sleet"
