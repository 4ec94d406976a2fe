"""Every command and program of docs/lora.md is run, with a tiny model and adapters in its place."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.api.cli.commands import _parser
from support.forked import code as run_code
from support.forked import run_forked
from support.lora_models import AdaptedModel
from support.plain_http import get
from support.server_process import free_port, front_at, running, start_replica

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "lora.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
SHELL = [code for language, code in BLOCKS if language == "sh"]
PYTHON = [code for language, code in BLOCKS if language == "python"]
BASE, FOLDER = "Qwen/Qwen3-0.6B", "./adapters"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders that stand for the names of the page."""
    made = AdaptedModel(tmp_path_factory.mktemp("adapters"))
    return {BASE: str(made.base), FOLDER: str(made.folder)}


def shown(code: str, names: dict[str, str]) -> str:
    for name, own in names.items():
        code = code.replace(name, own)
    return code


@pytest.fixture(scope="module")
def urls(names: dict[str, str]) -> Iterator[dict[str, str]]:
    """The address of each server of the page, started by its command."""
    found = {}
    commands = [block for block in SHELL if block.startswith("foretoken serve")]
    words = [shlex.split(shown(block, names)) for block in commands if "replica" not in block]
    first, second = (running(each[3:-2], model=each[2]) for each in words)
    with first as one, second as other:
        for each, server in zip(words, (one, other), strict=True):
            found[f"http://127.0.0.1:{_parser().parse_args(each[1:]).port}"] = server.url
        yield found


def test_a_front_and_its_replica_serve_an_adapter(names: dict[str, str]) -> None:
    [block] = [block for block in SHELL if "foretoken replica" in block]
    address = f"tcp://127.0.0.1:{free_port()}"
    lines = shown(block.replace("tcp://127.0.0.1:5570", address), names).splitlines()
    front, replica = map(shlex.split, lines)
    process = start_replica(address, replica[5:], model=replica[2])
    try:
        with front_at(address, front[5:-2], model=front[2]) as server:
            listed = get(server.url, "/v1/models").json["data"]
            assert [each["id"] for each in listed][1:] == ["sql"]
    finally:
        process.kill()
        process.wait()


def test_every_shell_block_is_of_a_kind_that_is_run() -> None:
    assert {block.split()[0] for block in SHELL} == {"foretoken", "curl"}


def test_the_requests_are_answered(urls: dict[str, str]) -> None:
    answers = []
    for block in SHELL:
        if block.startswith("curl"):
            command = shown(block, urls).replace("curl", "curl -sS --fail", 1)
            done = subprocess.run(
                ["bash", "-c", command], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            answers.append(json.loads(done.stdout))
    completion, models, loaded, unloaded = answers
    assert completion["model"] == "sql"
    assert [each["parent"] is None for each in models["data"]] == [True, False, False]
    assert loaded["rank"] == 4
    assert unloaded == {"lora_name": "sql"}


@pytest.mark.parametrize("program", PYTHON)
def test_the_programs_run(program: str, names: dict[str, str]) -> None:
    done = run_forked(run_code, shown(program, names), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
