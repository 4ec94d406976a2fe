"""The line that shows that a model is being loaded."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Coroutine

import pytest

from foretoken.api.build import model_files
from foretoken.api.cli.commands import main
from foretoken.api.cli.terminal import progress
from foretoken.core.startup import COMPILING, LOADING, STARTUP, WeightReader, on_progress


class Screen(io.StringIO):
    """A terminal; ``rewritten`` is set once its line was written three times."""

    def __init__(self) -> None:
        super().__init__()
        self.rewritten = asyncio.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\r") >= 3:
            self.rewritten.set()
        return written


@pytest.fixture(autouse=True)
def _slow(monkeypatch) -> None:
    """Every load is a long one."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "TICK", 0.0)


def watch(monkeypatch, screen: io.StringIO, model: str, loading: Coroutine[None, None, None]):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    asyncio.run(progress.watch_loading(model, loading))


async def load() -> None:
    return None


async def load_long(screen: Screen, share: float, step: str = LOADING) -> None:
    on_progress.get()(step, share)
    await asyncio.wait_for(screen.rewritten.wait(), 10)


def test_a_terminal_shows_how_much_is_read_and_then_the_seconds(monkeypatch):
    screen = Screen()
    watch(monkeypatch, screen, "builtin", load_long(screen, 0.25))
    *parts, last = screen.getvalue().split(progress.CLEAR)
    line = r"loading foretoken-builtin \(\d.*iB\)"
    assert len(parts) >= 3
    for part in parts[1:]:
        assert re.fullmatch(line + r" \[#{6}-{18}\]  25% \d+\.\d s", part)
    assert re.fullmatch(line + r" \.\.\. \d+\.\d s\n", last)


def test_a_terminal_shows_how_many_kernels_are_compiled(monkeypatch):
    screen = Screen()
    watch(monkeypatch, screen, "builtin", load_long(screen, 0.5, COMPILING))
    shown = screen.getvalue().split(progress.CLEAR)[1:-1]
    assert len(shown) >= 2
    for part in shown:
        assert re.fullmatch(r"compiling the kernels \[#{12}-{12}\]  50% \d+\.\d s", part)


def test_elsewhere_a_line_says_that_kernels_are_compiled_before_they_are(monkeypatch):
    async def compile_kernels() -> None:
        for share in (0.0, 0.5, 1.0):
            on_progress.get()(COMPILING, share)
        on_progress.get()(LOADING, 1.0)

    file = io.StringIO()
    watch(monkeypatch, file, "builtin", compile_kernels())
    first, last = file.getvalue().splitlines()
    assert first == "compiling the kernels, once for this version and CPU"
    assert last.startswith("loading foretoken-builtin (")


def test_elsewhere_a_line_is_written_at_the_end(monkeypatch):
    file = io.StringIO()
    watch(monkeypatch, file, "builtin", load())
    assert re.fullmatch(r"loading foretoken-builtin \(.*\) \.\.\. \d+\.\d s\n", file.getvalue())


@pytest.mark.parametrize("screen", [io.StringIO, Screen])
def test_a_short_load_shows_nothing(screen, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    stderr = screen()
    watch(monkeypatch, stderr, "builtin", load())
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_fails_leaves_the_line_to_the_error(is_terminal, monkeypatch):
    stderr = Screen() if is_terminal else io.StringIO()

    async def fail() -> None:
        if is_terminal:
            await load_long(stderr, 0.5)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        watch(monkeypatch, stderr, "builtin", fail())
    assert stderr.getvalue().endswith(progress.CLEAR) == is_terminal
    assert bool(stderr.getvalue()) == is_terminal


def test_a_model_that_may_be_downloaded_has_a_bar_once_its_weights_are_read(monkeypatch):
    screen = Screen()
    watch(monkeypatch, screen, "owner/name", load())
    assert screen.getvalue() == ""
    watch(monkeypatch, screen, "owner/name", load_long(screen, 1.0))
    assert f"loading owner/name [{'#' * progress.WIDTH}] 100% " in screen.getvalue()


INTERRUPTED = """
import asyncio, os, signal, threading
from foretoken.api.cli.terminal.progress import watch_loading

def load():
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(100)

asyncio.run(watch_loading("builtin", asyncio.to_thread(load)))
"""


def test_ctrl_c_does_not_wait_for_the_model():
    """Once, the process ended only when the model was loaded."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=60)
    assert ended.returncode == 130
    assert ended.stderr == b""


def test_behind_the_load_ctrl_c_is_as_before(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    watch(monkeypatch, io.StringIO(), "builtin", load())
    assert signal.getsignal(signal.SIGINT) is before


def test_the_size_is_that_of_the_weights(tmp_path):
    for name in ("a.safetensors", "b.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x" * 10)
    assert model_files.name_and_bytes(str(tmp_path)) == (tmp_path.name, 20)
    file = tmp_path / "one.gguf"
    file.write_bytes(b"x" * 7)
    assert model_files.name_and_bytes(str(file)) == ("one.gguf", 7)


def test_the_steps_of_a_start_are_told_where_they_are_wanted(here, say, pipe, capsys) -> None:
    say("hello")
    pipe("hi")
    started = logging.getLogger(STARTUP)
    try:
        assert main(["run", "--verbose"]) == 0
    finally:
        started.setLevel(logging.NOTSET)
        started.handlers.clear()
        started.propagate = True
    out, err = capsys.readouterr()
    assert out == "hello\n"
    lines = [re.fullmatch(r"(.+?) +(\d+\.\d\d) s", line) for line in err.splitlines()[:-1]]
    names = [found[1] for found in lines if found]
    assert [names[0], names[-1]] == ["imports of the command", "tokenizer"]
    assert err.splitlines()[-1].startswith("total ")


def test_reading_is_told_by_the_share_of_all_weights(tmp_path) -> None:
    shares: list[tuple[str, float]] = []
    before = on_progress.set(lambda *told: shares.append(told))
    reader = WeightReader({"a": (2, 3), "b": (2,)})
    on_progress.reset(before)
    read = reader.counted(str.upper)
    assert [read("b"), read("a"), read("a")] == ["B", "A", "A"]
    assert shares == [(LOADING, 0.25), (LOADING, 1.0), (LOADING, 1.0)], "a tensor may be read twice"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_computation_shows_the_seconds_that_are_left(monkeypatch, is_terminal: bool):
    times = iter([0.0, 10.0, 30.0, 40.0])
    screen = Screen() if is_terminal else io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    shown = progress.Progress("400 tokens", lambda: next(times))
    for share in (0.25, 0.75, 1.0):
        shown.note(share)
    lines = [
        "400 tokens [######------------------]  25% about 30 s left",
        "400 tokens [##################------]  75% about 10 s left",
    ]
    if is_terminal:
        assert screen.getvalue().split(progress.CLEAR) == ["", *lines, ""]
    else:
        last = "400 tokens [########################] 100% about 0 s left"
        assert screen.getvalue().splitlines() == [*lines, last]
