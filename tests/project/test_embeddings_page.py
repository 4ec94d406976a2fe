"""Every command and program of docs/embeddings.md is run, with tiny models in place of its own."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.api.cli.commands import _parser
from support.embedders import write_embedder, write_reranker
from support.forked import code as run_code
from support.forked import command as foretoken
from support.forked import run_forked
from support.server_process import running

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "embeddings.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
SHELL = [code for language, code in BLOCKS if language == "sh"]
PYTHON = [code for language, code in BLOCKS if language == "python"]
EMBEDDER, RERANKER = "Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Reranker-0.6B"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folder that stands for each model of the page."""
    made = {EMBEDDER: write_embedder, RERANKER: write_reranker}
    folders = {}
    for name, write in made.items():
        folder = tmp_path_factory.mktemp("model")
        write(folder)
        folders[name] = str(folder)
    return folders


@pytest.fixture(scope="module")
def urls(folders: dict[str, str]) -> Iterator[dict[str, str]]:
    """The address of a server of each, by that of the page."""
    with running(model=folders[EMBEDDER]) as one, running(model=folders[RERANKER]) as other:
        yield {"http://127.0.0.1:8000": one.url, "http://127.0.0.1:8001": other.url}


def shown(code: str, names: dict[str, str]) -> str:
    for name, own in names.items():
        code = code.replace(name, own)
    return code


def test_every_shell_block_is_of_a_kind_that_is_run() -> None:
    kinds = {shlex.split(block, comments=True)[0] for block in SHELL}
    assert kinds == {"foretoken", "curl"}


def test_the_commands_are_as_they_are_written(folders: dict[str, str]) -> None:
    for block in SHELL:
        words = shlex.split(shown(block, folders), comments=True)
        if words[:2] == ["foretoken", "serve"]:
            assert _parser().parse_args(words[1:]).port in (8000, 8001)
        elif words[0] == "foretoken":
            done = run_forked(foretoken, *words[1:], cwd=ROOT)
            assert done.returncode == 0, done.stderr
            assert "\npooling   embeds, last token, 64 dimensions\n" in done.stdout


@pytest.mark.parametrize("block", [block for block in SHELL if block.startswith("curl")])
def test_the_requests_are_answered(block: str, urls: dict[str, str]) -> None:
    command = shown(block, urls).replace("curl", "curl -sS --fail", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = answer["data"] if "data" in answer else answer["results"]
    assert len(found) == 2
    assert answer["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("program", PYTHON)
def test_the_programs_run(program: str, folders: dict[str, str]) -> None:
    done = run_forked(run_code, shown(program, folders), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
