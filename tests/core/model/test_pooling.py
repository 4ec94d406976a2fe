"""Checkpoints for vectors and scores, by their files, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.build.engine_builder import build
from foretoken.api.build.model_files import check_model
from foretoken.core.config import EngineConfig
from foretoken.core.errors import ModelLoadError
from foretoken.core.model.pooling import NO_POOLING, PoolingSpec, read_pooling
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf

MODEL = "sentence_transformers.models."
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}


def folder_of(
    folder: Path, *modules: str, config: dict[str, Any] | None = None, **configs: dict[str, Any]
) -> Path:
    """A folder with a config, and modules in folders such as 1_Pooling, with their configs."""
    write(folder / "config.json", config or {})
    entries = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}" * bool(index),
         "type": MODEL + name}
        for index, name in enumerate(modules)
    ]  # fmt: skip
    if modules:
        write(folder / "modules.json", entries)
    for name, values in configs.items():
        write(folder / f"1_{name}" / "config.json", values)
    return folder


def write(file: Path, value: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value), "utf-8")


def test_last_token_pooling_embeds(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "Transformer", "Pooling", "Normalize", Pooling=LAST)
    assert read_pooling(folder) == PoolingSpec(embeds=True)
    write(folder / "1_Pooling/config.json", {"pooling_mode": "lasttoken"})
    assert read_pooling(folder).embeds


def test_a_model_without_such_files_is_none(tmp_path: Path) -> None:
    assert read_pooling(folder_of(tmp_path)) == NO_POOLING
    assert read_pooling(tmp_path / "nowhere") == NO_POOLING


@pytest.mark.parametrize(
    ("config", "cuts"),
    [
        ({"matryoshka_dimensions": [32, 64]}, (32, 64)),
        ({"is_matryoshka": True}, None),
        ({"is_matryoshka": False}, ()),
    ],
)
def test_the_config_names_the_lengths_of_vectors(
    config: dict[str, Any], cuts: tuple[int, ...] | None, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "Transformer", "Pooling", config=config, Pooling=LAST)
    assert read_pooling(folder).cuts == cuts


def test_a_reranker_names_its_tokens(tmp_path: Path) -> None:
    ids = {"true_token_id": 9, "false_token_id": 4}
    folder = folder_of(tmp_path, "Transformer", "LogitScore", LogitScore=ids)
    assert read_pooling(folder) == PoolingSpec(score_ids=(4, 9))
    write(folder / "1_LogitScore/config.json", ids | {"false_token_id": None})
    with pytest.raises(ModelLoadError, match="false_token_id is missing"):
        read_pooling(folder)


@pytest.mark.parametrize(
    ("reason", "modules", "config", "pooling"),
    [
        ("not mean_tokens", ("Pooling",), {}, {"pooling_mode_mean_tokens": True}),
        ("not cls", ("Pooling",), {}, {"pooling_mode": "cls"}),
        ("not mean_tokens and lasttoken", ("Pooling",), {}, LAST | {
            "pooling_mode_mean_tokens": True}),
        ("not none", ("Pooling",), {}, {}),
        ("type Dense is not supported", ("Pooling", "Dense"), {}, LAST),
        ("is_causal is False: attention in both directions", (), {"is_causal": False}, LAST),
        ("use_bidirectional_attention is True", (), {"use_bidirectional_attention": True}, LAST),
        ("Python code of the model", ("Pooling",), {"auto_map": {"AutoModel": "m.M"}}, LAST),
    ],
)  # fmt: skip
def test_other_vectors_are_refused_with_the_reason_and_what_serves_them(
    reason: str,
    modules: tuple[str, ...],
    config: dict[str, Any],
    pooling: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = folder_of(tmp_path, "Transformer", *modules, config=config, Pooling=pooling)
    with pytest.raises(ModelLoadError, match=reason):
        read_pooling(folder)
    with pytest.raises(ModelLoadError, match=reason):
        build(folder, EngineConfig())
    assert check_model(str(folder)) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("refused   ")
    assert reason in printed
    assert "text-embeddings-inference serve such models" in printed


@pytest.mark.parametrize("text", ["{", "{}", '["a"]', '[{"path": 3, "type": "a.Pooling"}]', "[{}]"])
def test_a_damaged_list_of_modules_is_named(text: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "modules.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        read_pooling(folder)


def test_check_prints_what_it_embeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "qwen3", hidden_size=64)
    assert check_model(str(tmp_path)) == 0
    assert "pooling" not in capsys.readouterr().out
    config = json.loads((tmp_path / "config.json").read_text())
    folder_of(tmp_path, "Transformer", "Pooling", "Normalize", config=config, Pooling=LAST)
    assert check_model(str(tmp_path)) == 0
    assert "\npooling   embeds, last token, 64 dimensions\n" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "embeds"), [(0, False), (3, True), (4, False)])
def test_a_gguf_file_has_it_in_its_metadata(kind: int, embeds: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "qwen3")
    file = write_gguf(folder, tmp_path / "m.gguf", qwen3__pooling_type=("add_uint32", kind))
    assert read_pooling(file).embeds == embeds


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("qwen3__pooling_type", ("add_uint32", 1), "not mean"),
        ("qwen3__attention__causal", ("add_bool", False), "attention in both directions"),
    ],
)
def test_a_gguf_file_of_other_vectors_is_refused(
    name: str, value: tuple[str, object], reason: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "hf", "qwen3")
    file = write_gguf(folder, tmp_path / "m.gguf", **{name: value})
    with pytest.raises(ModelLoadError, match=reason):
        read_pooling(file)
