"""The line that shows that a model is being loaded."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from collections.abc import Coroutine

import pytest

from foretoken.api.build import model_files
from foretoken.api.cli.terminal import progress


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


def watch(monkeypatch, screen: io.StringIO, model: str, loading: Coroutine[None, None, None]):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    asyncio.run(progress.watch_loading(model, loading))


async def load() -> None:
    return None


def test_a_terminal_shows_the_seconds_as_they_pass(monkeypatch):
    monkeypatch.setattr(progress, "TICK", 0.0)
    screen = Screen()

    async def wait() -> None:
        await asyncio.wait_for(screen.rewritten.wait(), 10)

    watch(monkeypatch, screen, "builtin", wait())
    *parts, last = screen.getvalue().split("\r")
    assert len(parts) >= 3
    line = r"loading foretoken-builtin \(\d.*iB\) \.\.\. \d+\.\d s"
    assert all(re.fullmatch(line, part) for part in parts[1:])
    assert re.fullmatch(line + "\n", last)


def test_elsewhere_it_is_written_once(monkeypatch):
    file = io.StringIO()
    watch(monkeypatch, file, "builtin", load())
    assert re.fullmatch(r"loading foretoken-builtin \(.*\) \.\.\. \d+\.\d s\n", file.getvalue())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_fails_ends_the_line(is_terminal, monkeypatch):
    stderr = Screen() if is_terminal else io.StringIO()

    async def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        watch(monkeypatch, stderr, "builtin", fail())
    line = r"loading foretoken-builtin \(.*\) \.\.\. \n" if is_terminal else ""
    assert re.fullmatch(line, stderr.getvalue()), "elsewhere the error is the only line"


def test_a_model_of_the_hub_and_one_that_is_missing_have_no_line(monkeypatch, tmp_path):
    screen = Screen()
    for model in ("owner/name", str(tmp_path), str(tmp_path / "none.gguf")):
        watch(monkeypatch, screen, model, load())
    assert screen.getvalue() == ""


def test_the_size_is_that_of_the_weights(tmp_path):
    for name in ("a.safetensors", "b.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x" * 10)
    assert model_files.name_and_bytes(str(tmp_path)) == (tmp_path.name, 20)
    file = tmp_path / "one.gguf"
    file.write_bytes(b"x" * 7)
    assert model_files.name_and_bytes(str(file)) == ("one.gguf", 7)
