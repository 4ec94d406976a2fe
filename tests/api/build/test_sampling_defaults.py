"""The sampling values of a model: generation_config.json, GGUF's metadata, the shipped SmolLM2."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import Keys

from foretoken.api.build import model_files
from foretoken.api.build.model_files import ModelSource, find_model
from foretoken.api.build.sampling_defaults import GGUF_NAMES, sampling_defaults
from foretoken.core.config import EngineConfig
from foretoken.core.errors import ModelLoadError
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf

VALUES = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}
FORMATS: dict[str, tuple[str, Any]] = {
    "general__sampling__temp": ("add_float32", 0.6),
    "general__sampling__top_p": ("add_float32", 0.95),
    "general__sampling__top_k": ("add_int32", 20),
    "general__sampling__min_p": ("add_float32", 0.05),
    "general__sampling__penalty_repeat": ("add_float32", 1.05),
}


def found(path: Path, **options: Any) -> dict[str, float]:
    """Return the sampling values that a model gives its requests, less those that are default."""
    return sampling_defaults(ModelSource(path, "m"), EngineConfig(**options)).given


def folder_with(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_a_folder_has_them_in_generation_config_json(tmp_path: Path) -> None:
    rest = {"eos_token_id": [2, 0], "do_sample": True, "max_new_tokens": 5, "typical_p": 0.3}
    assert found(folder_with(tmp_path, **VALUES, **rest)) == VALUES


def test_a_folder_without_the_file_or_the_fields_has_none(tmp_path: Path) -> None:
    assert found(tmp_path) == {}
    assert found(folder_with(tmp_path, eos_token_id=2, temperature=None)) == {}
    assert found(folder_with(tmp_path, temperature=0, top_k=-1)) == {"temperature": 0, "top_k": -1}


def test_a_gguf_file_has_them_under_llama_cpps_names(checkpoint: Path, tmp_path: Path) -> None:
    assert found(write_gguf(checkpoint, tmp_path / "full.gguf", **FORMATS)) == VALUES
    assert found(write_gguf(checkpoint, tmp_path / "none.gguf")) == {}
    general = Keys.General
    names = (general.SAMPLING_TEMP, general.SAMPLING_TOP_P, general.SAMPLING_TOP_K)
    names += (general.SAMPLING_MIN_P, general.SAMPLING_PENALTY_REPEAT)
    assert tuple(GGUF_NAMES.values()) == names


def test_a_negative_top_k_of_a_gguf_file_is_off(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(checkpoint, tmp_path / "m.gguf", general__sampling__top_k=("add_int32", -40))
    assert found(file) == {"top_k": -1}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"temperature": -1}, "temperature must be from 0 to 100, not -1"),
        ({"temperature": "warm"}, "temperature must be a number, not 'warm'"),
        ({"top_p": 0}, "top_p must be above 0, not 0"),
        ({"top_k": 2.5}, "top_k must be an integer, not 2.5"),
        ({"min_p": 7}, "min_p must be from 0 to 1, not 7"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 0.01 to 100, not 0"),
    ],
    ids=str,
)
def test_a_bad_value_names_file_field_and_the_flag(
    tmp_path: Path, values: dict[str, object], problem: str
) -> None:
    folder = folder_with(tmp_path, **values)
    with pytest.raises(ModelLoadError) as caught:
        found(folder)
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}: {problem}; ")
    assert "--generation-config none" in str(caught.value)
    assert found(folder, generation_config="none") == {}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temp", ("add_float32", 200.0), "must be from 0 to 100, not 200.0"),
        ("temp", ("add_string", "warm"), "must be a number, not 'warm'"),
        ("top_k", ("add_float32", 40.0), "must be an integer, not 40.0"),
        ("penalty_repeat", ("add_array", [1.0]), "must be a number, not a value of type list"),
    ],
)
def test_a_bad_value_of_a_gguf_file_goes_by_its_own_name(
    checkpoint: Path, tmp_path: Path, name: str, value: tuple[str, object], problem: str
) -> None:
    file = write_gguf(checkpoint, tmp_path / "m.gguf", **{f"general__sampling__{name}": value})
    with pytest.raises(ModelLoadError) as caught:
        found(file)
    assert str(caught.value).startswith(f"{file}: general.sampling.{name} {problem}; ")
    assert "--generation-config none" in str(caught.value)


def test_overrides_go_before_the_model_and_hold_without_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, temperature=0.6, top_k=20)
    override = '{"top_k": 0, "min_p": 0.1}'
    assert found(folder, override_generation_config=override) == {
        "temperature": 0.6, "top_k": 0, "min_p": 0.1,
    }  # fmt: skip
    without = {"generation_config": "none", "override_generation_config": {"top_p": 0.5}}
    assert found(folder, **without) == {"top_p": 0.5}


def test_the_shipped_smollm2_has_those_of_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "checked_smollm2", lambda: tmp_path / "s.gguf")
    source = find_model("smollm2")
    assert sampling_defaults(source, EngineConfig()).given == {"temperature": 0.2, "top_p": 0.9}
    assert sampling_defaults(source, EngineConfig(generation_config="none")).given == {}


def test_the_built_in_pair_has_none() -> None:
    assert sampling_defaults(find_model("builtin"), EngineConfig()).given == {}


def test_the_models_own_values_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "foretoken")
    found(tmp_path)
    assert not caplog.messages
    found(folder_with(tmp_path, temperature=0.2, top_p=0.9))
    assert caplog.messages == ["the model's own sampling: temperature 0.2, top_p 0.9"]
