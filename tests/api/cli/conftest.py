"""Commands in this process, over the fake engine and with a given standard input."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def here(monkeypatch, built):
    """Commands find the fake engine instead of building a model; gives what they asked for."""
    asked = []

    def build(model, config):
        asked.append((model, config))
        built.engine.draining = False  # the command before has closed it
        return built

    monkeypatch.setattr("foretoken.api.runtime.engine_client._build", build)
    return asked


class Input(io.TextIOWrapper):
    """Standard input with these bytes, piped or typed."""

    def __init__(self, data: bytes, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def pipe(monkeypatch) -> Callable[[str | bytes], None]:
    """Pipe a text or bytes into the next command."""

    def give(data: str | bytes) -> None:
        raw = data.encode() if isinstance(data, str) else data
        monkeypatch.setattr(sys, "stdin", Input(raw))

    return give


@pytest.fixture
def keyboard(monkeypatch) -> Callable[[str], None]:
    """Type a text into the next command, at a terminal."""

    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", Input(text.encode(), is_terminal=True))

    return give
