"""The sampling values of a model: generation_config.json, GGUF's metadata, the shipped SmolLM2."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from gguf.constants import Keys

from foretoken.api.build import model_files
from foretoken.api.build.model_files import ModelSource, find_model
from foretoken.api.build.sampling_defaults import GGUF_NAMES, described, sampling_defaults
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


QWEN2 = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
QWEN3 = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
GEMMA = {"temperature": 1.0, "top_p": 0.95, "top_k": 64}
USUAL = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}


def named(folder: Path, architecture: str, template: str, name: str = "Some model") -> Path:
    """Write a file that has metadata alone."""
    writer = GGUFWriter(folder / "m.gguf", architecture)
    writer.add_name(name)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


@pytest.mark.parametrize(
    ("architecture", "mark", "name", "values"),
    [
        ("qwen2", "<|im_start|>", "Qwen2.5 Coder 1.5B Instruct", QWEN2),
        ("qwen2", "<|im_start|>", "QwQ 32B", {"temperature": 0.6, "top_p": 0.95, "top_k": 40}),
        ("qwen2", "<｜Assistant｜>", "DeepSeek R1", {"temperature": 0.6, "top_p": 0.95}),
        ("qwen3moe", "<think>", "Qwen3 30B A3B", QWEN3),
        ("qwen3", "<|im_start|>", "Qwen3 2507", {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
        ("qwen3moe", "<function=", "Qwen3 Coder", QWEN2),
        ("llama", "<|start_header_id|>", "Llama 3.2 1B", {"temperature": 0.6, "top_p": 0.9}),
        ("llama", "<|im_start|>", "SmolLM2 360M", {"temperature": 0.2, "top_p": 0.9}),
        ("smollm3", "<|im_start|>", "x", {"temperature": 0.6, "top_p": 0.95}),
        ("gemma3", "<start_of_turn>", "Gemma 3", GEMMA),
        ("llama", "[INST]", "Mistral 7B", {"temperature": 0.7}),
        ("llama", "[INST]", "Mistral Nemo", {"temperature": 0.3}),
        ("llama", "[INST] <<SYS>>", "Llama 2", {"temperature": 0.6, "top_p": 0.9}),
        ("gpt-oss", "<|start|>", "x", {"temperature": 1.0, "top_p": 1.0}),
        ("lfm2", "x", "x", {"temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05}),
        ("falcon", "<|im_start|>", "Falcon", USUAL),
        ("qwen2", "", "Qwen2.5 1.5B", {}),
    ],
)  # fmt: skip
def test_a_gguf_file_that_names_none_has_those_of_its_family(
    tmp_path: Path, architecture: str, mark: str, name: str, values: dict[str, float]
) -> None:
    file = named(tmp_path, architecture, mark, name)
    assert found(file) == values
    assert found(file, generation_config="none") == {}
    override = found(file, override_generation_config={"top_k": 3})
    assert override == {**values, "top_k": 3}
    assert found(file, override_generation_config='{"top_k": 3.0}') == override


def test_where_values_come_from_is_told(checkpoint: Path, tmp_path: Path) -> None:
    def told(path: Path, **options: Any) -> str:
        return described(sampling_defaults(ModelSource(path, "m"), EngineConfig(**options)))

    file = named(tmp_path, "gemma3", "<start_of_turn>")
    assert told(file) == "temperature 1, top_p 0.95, top_k 64 (published for Gemma)"
    assert told(file, override_generation_config={"top_k": 3}).endswith(
        "top_k 3 (published for Gemma; top_k: override_generation_config)"
    )
    own = write_gguf(
        checkpoint, tmp_path / "own.gguf", general__sampling__temp=("add_float32", 0.6)
    )
    assert told(own) == "temperature 0.6 (general.sampling.* in the file)"
    assert told(tmp_path) == "temperature 1 (OpenAI's defaults)"
    folder_with(tmp_path, temperature=0.5, top_k=20.0)
    assert told(tmp_path) == "temperature 0.5, top_k 20 (generation_config.json)"


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
        ("top_k", ("add_float32", 40.5), "must be an integer, not 40.5"),
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
    values = "temperature 0.2, top_p 0.9 (generation_config.json)"
    assert caplog.messages == [f"sampling defaults of the model: {values}"]
