"""Codex CLI on a real model as a GGUF file, which FORETOKEN_QWEN_GGUF names."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from clients.agent_programs import ARE_INSTALLED, EDITOR, KEY, NOT_INSTALLED, codex
from support.server_process import running

FILE = os.environ.get("FORETOKEN_QWEN_GGUF", "")
SECONDS = 120  # of Codex; the server needs up to a minute to start and to end on a busy machine
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS + 120),
    pytest.mark.skipif(not FILE, reason="FORETOKEN_QWEN_GGUF names no file"),
    pytest.mark.skipif(not ARE_INSTALLED, reason=NOT_INSTALLED),
]
PROGRAM = "# Says hello.\nprint('hello')\n"
TASK = f"""greet.py has these lines:

{PROGRAM}
Replace the line print('hello') by print('good day'). Use apply_patch."""
# The documentation has these settings, too (docs/clients/codex.md). With all of Codex's own
# instructions the first prompt has 8,000 tokens, more than two cores prefill in five minutes.
SETTINGS = (
    'model_instructions_file="instructions.md"',
    'web_search="disabled"',
    "include_permissions_instructions=false",
    "include_environment_context=false",
    "skills.include_instructions=false",
    "tools.view_image=false",
    "features.goals=false",
    "features.multi_agent=false",
    "features.tool_search=false",
    "features.unified_exec=false",
    "features.shell_tool=false",
    "model_providers.foretoken.stream_idle_timeout_ms=3600000",
)
INSTRUCTIONS = """You are a coding agent. Change files with the tool apply_patch. It takes a patch:

*** Begin Patch
*** Update File: notes.txt
@@
-the old line
+the new line
*** End Patch

Lines of the file that stay have a space before them. When the file is changed, say so and stop.
"""


def test_codex_edits_a_file_as_a_small_model_writes_the_patch(tmp_path: Path) -> None:
    """The tool's grammar makes each patch well-formed; its content is the model's."""
    (tmp_path / "greet.py").write_text(PROGRAM)
    (tmp_path / "instructions.md").write_text(INSTRUCTIONS)
    command = [sys.executable, "-m", "foretoken", "serve", FILE, "--served-model-name", EDITOR]
    options = ["--port", "0", "--api-key", KEY, "--max-model-len", "8192"]
    options += ["--override-generation-config", '{"temperature": 0}']
    settings = [each.replace("instructions.md", f"{tmp_path}/instructions.md") for each in SETTINGS]
    with running(started_by=[*command, *options]) as server, contextlib.suppress(TimeoutExpired):
        # A model of this size goes on calling the tool after the file is changed: Codex then runs
        # until its time is over.
        codex(TASK, server.url, tmp_path, model=EDITOR, settings=settings, timeout=SECONDS)
    assert (tmp_path / "greet.py").read_text() == "# Says hello.\nprint('good day')\n"
