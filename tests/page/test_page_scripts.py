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
MAX_LINES = 40  # of a function
SCRIPTS = sorted(FOLDER.glob("*.js"))
FUNCTION = re.compile(r"\s*(export )?(async )?(function\b.*|[#\w]+\(.*\)|const \w+ = .* =>) \{$")
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
            if not FUNCTION.match(line):
                continue
            indent = line[: len(line) - len(line.lstrip())]
            end = next(
                at for at, each in enumerate(lines[start:]) if each.startswith(f"{indent}}}")
            )
            if end > MAX_LINES:
                long.append(f"{script.name}: {line.strip()}")
    assert long == []
