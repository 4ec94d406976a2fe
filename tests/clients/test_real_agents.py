"""Codex CLI on a real model as a GGUF file, which FORETOKEN_QWEN_GGUF names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from clients.agent_programs import ARE_INSTALLED, EDITOR, KEY, NOT_INSTALLED, codex
from support.server_process import running

FILE = os.environ.get("FORETOKEN_QWEN_GGUF", "")
SECONDS = 7200  # Codex's first prompt has thousands of tokens
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS),
    pytest.mark.skipif(not FILE, reason="FORETOKEN_QWEN_GGUF names no file"),
    pytest.mark.skipif(not ARE_INSTALLED, reason=NOT_INSTALLED),
]
TASK = 'In greet.py, change the text "hello" to "good day". Use apply_patch.'


def test_codex_edits_a_file_as_a_small_model_writes_the_patch(tmp_path: Path) -> None:
    """The tool's grammar makes each patch well-formed; its content is the model's."""
    (tmp_path / "greet.py").write_text('def greet():\n    return "hello"\n')
    command = [sys.executable, "-m", "foretoken", "serve", FILE, "--served-model-name", EDITOR]
    options = ["--port", "0", "--api-key", KEY, "--max-model-len", "32768"]
    with running(started_by=[*command, *options]) as server:
        told = codex(TASK, server.url, tmp_path, model=EDITOR, timeout=SECONDS)
    assert (tmp_path / "greet.py").read_text() == 'def greet():\n    return "good day"\n', told
