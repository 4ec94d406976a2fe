"""The scripts of the pages, in Node: their syntax, their types, and the Markdown."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from foretoken.api.server.routes.pages import FOLDER

HERE = Path(__file__).parent
TSC = HERE / "node_modules" / ".bin" / "tsc"
NODE = shutil.which("node")
MAX_LINES = 45  # of a function
SCRIPTS = sorted(FOLDER.glob("*.js"))
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def done(*command: str) -> None:
    """Run a command, which must succeed."""
    result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


@needs_node
def test_markdown() -> None:
    done("node", "--test", "markdown.test.mjs")


@needs_node
@pytest.mark.skipif(not TSC.exists(), reason="TypeScript is not installed (make lint)")
def test_the_types_of_the_scripts() -> None:
    done(str(TSC), "-p", ".")


def test_no_function_is_long() -> None:
    """A function ends at the first brace that is indented as its first line."""
    long = []
    for script in SCRIPTS:
        lines = script.read_text("utf-8").splitlines()
        for start, line in enumerate(lines):
            if not re.match(r"\s*(export )?(async )?(static )?(function\b|[#\w]+\(.*\) \{$)", line):
                continue
            indent = len(line) - len(line.lstrip())
            end = lines.index(" " * indent + "}", start) if not line.endswith("}") else start
            if end - start > MAX_LINES:
                long.append(f"{script.name}: {line.strip()}")
    assert long == []
