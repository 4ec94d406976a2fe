"""``--draft mtp`` and ``auto``: a layer of the checkpoint that predicts a further token drafts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from foretoken.api.build.drafts import parse_draft
from foretoken.api.build.engine_builder import LocalBuilt, build
from foretoken.api.build.model_files import check_model
from foretoken.api.cli.commands import main
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest
from support.mtp_checkpoints import BEHIND, drop_tensor, save_mtp
from support.tiny_models import save_tiny

LOOK_UPS = ("radix", "suffix")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_mtp(tmp_path)


def built(folder: Path, **options: object) -> LocalBuilt:
    return build(folder, EngineConfig(device="cpu", kv_tokens=512, **options))  # type: ignore[arg-type]


def test_auto_takes_the_layer_and_the_log_names_its_memory(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = built(folder)
    assert (found.drafters, found.no_self_draft) == ((*LOOK_UPS, "mtp"), "")
    assert "MTP: 1 layer" in caplog.text
    assert "bytes of KV per token" in caplog.text


def test_the_layer_is_named_alone_or_in_a_list(folder: Path) -> None:
    assert built(folder, draft="mtp").drafters == ("mtp",)
    assert built(folder, draft="auto,mtp").drafters == (*LOOK_UPS, "mtp")
    assert built(folder, draft="mtp", speculation=2).drafters == ("mtp",)
    assert built(folder, draft="suffix").drafters == ("suffix",)


def test_the_layers_pages_are_paid_for_out_of_the_same_memory(folder: Path) -> None:
    sizes = [
        build(folder, EngineConfig(device="cpu", kv_memory="1MiB", draft=draft)).settings
        for draft in ("none", "mtp")
    ]
    plain, drafting = (int(str(each["kv_tokens"])) for each in sizes)
    assert 0.5 * plain < drafting < 0.75 * plain, "of two layers there are three, and features"


def test_without_a_layer_mtp_is_refused_and_auto_goes_on(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    with pytest.raises(InvalidRequest, match=r"^draft 'mtp': .* has no layers for multi-token"):
        built(folder, draft="mtp")
    assert built(folder).drafters == LOOK_UPS


def test_a_layer_that_is_not_whole_is_named_and_auto_goes_on_without(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = f"{BEHIND}eh_proj.weight"
    drop_tensor(folder, missing)
    with pytest.raises(InvalidRequest, match=rf"^draft 'mtp': .* lacks tensors: {missing}$"):
        built(folder, draft="mtp")
    with caplog.at_level(logging.WARNING):
        found = built(folder)
    assert found.drafters == LOOK_UPS
    assert f"draft auto does not use 'mtp': {folder} lacks tensors: {missing}" in caplog.text


def test_modules_of_transformers_have_no_such_layer(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="computed by transformers' modules"):
        built(folder, draft="mtp", model_impl="transformers")
    assert built(folder, model_impl="transformers").drafters == LOOK_UPS


def test_a_list_takes_one_model() -> None:
    with pytest.raises(InvalidRequest, match="one model, not 2: mtp, self"):
        parse_draft(EngineConfig(draft="mtp,self"), own_draft=None)


def test_models_check_prints_the_layer_or_what_it_lacks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_model(str(folder)) == 0
    assert "\nMTP       1 layer\n" in capsys.readouterr().out
    drop_tensor(folder, f"{BEHIND}enorm.weight")
    assert check_model(str(folder)) == 0
    assert f"lacks tensors: {BEHIND}enorm.weight\n" in capsys.readouterr().out


def test_the_command_ends_with_one_line_and_the_code_of_a_wrong_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    monkeypatch.setattr("sys.stdin", None)
    assert main(["run", str(folder), "hello", "--draft", "mtp"]) == 2
    assert "draft 'mtp': " in capsys.readouterr().err
