"""Every command and program of docs/images.md is run, with a tiny model in place of its own."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.api.cli.commands import _parser
from foretoken.core.config import EngineConfig
from foretoken.core.model.images.vision import MODEL_TYPES
from support.forked import code as run_code
from support.forked import command as foretoken
from support.forked import run_forked
from support.image_folders import picture, write_image_folder
from support.server_process import running

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "images.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
SHELL = [code for language, code in BLOCKS if language == "sh"]
MODEL = "HuggingFaceTB/SmolVLM-Instruct"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    write_image_folder(made, "smolvlm")
    return str(made)


@pytest.fixture(scope="module")
def url(folder: str) -> Iterator[str]:
    with running(model=folder) as server:
        yield server.url


def test_the_commands_are_as_they_are_written(folder: str) -> None:
    for block in SHELL:
        words = shlex.split(block.replace(MODEL, folder), comments=True)
        if words[:2] == ["foretoken", "serve"]:
            assert _parser().parse_args(words[1:]).model == folder
        elif words[0] == "foretoken":
            done = run_forked(foretoken, *words[1:], cwd=ROOT)
            assert done.returncode == 0, done.stderr
            assert "\nimages    yes, a tower of 0.0426 million parameters; " in done.stdout
            assert "512 x 512 pixels take 20 tokens\n" in done.stdout
        else:
            assert words[0] == "curl"


def test_the_request_is_answered(url: str) -> None:
    (block,) = [block for block in SHELL if block.startswith("curl")]
    command = block.replace("http://127.0.0.1:8000", url).replace("curl", "curl -sS --fail", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["prompt_tokens_details"]["image_tokens"] == 4


def test_the_program_runs(folder: str, tmp_path: Path) -> None:
    (program,) = [code for language, code in BLOCKS if language == "python"]
    picture(1).save(tmp_path / "picture.png")
    done = run_forked(run_code, program.replace(MODEL, folder), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(" 20")


def test_the_page_has_every_type_and_the_defaults_of_the_flags() -> None:
    for name in MODEL_TYPES:
        assert f"`{name}`" in PAGE
    config = EngineConfig()
    for name in ("max_images", "max_image_pixels", "image_cache"):
        row = re.search(rf"\| `--{name.replace('_', '-')} \w+` \| (\w+) \|", PAGE)
        assert row is not None
        assert row[1] == str(getattr(config, name))
