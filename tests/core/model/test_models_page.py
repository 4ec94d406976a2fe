"""docs/model-types.md is what the code says; what `foretoken show` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as GgmlType

from foretoken.api.cli.commands import main
from foretoken.core.model.report import inspect_model
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf
from support.models_page import PAGE, page
from support.quantized_checkpoints import quantize_checkpoint
from support.tiny_models import save_tiny, tiny_config


@pytest.mark.filterwarnings("ignore")
def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: PYTHONPATH=tests python -m support.models_page"


def test_check_prints_what_an_own_model_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path)
    assert main(["show", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "qwen3" in printed
    assert "own decoder" in printed
    # 3 layers, 2 heads of 32 items of 4 bytes, keys and values
    assert "KV        1.5 KiB per token" in printed
    assert "context   1,024 tokens" in printed


def test_check_prints_what_a_model_of_transformers_modules_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path, "axk1")
    assert main(["show", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "transformers' modules" in printed
    # 2 layers of 4 heads of 24 items of 4 bytes, keys and values padded to them
    assert "KV        1.5 KiB per token" in printed
    assert "safetensors" in printed


def test_check_prints_that_latents_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path, "deepseek_v3")
    assert main(["show", str(folder)]) == 0
    # 2 layers of 24 + 8 items of 4 bytes
    assert "KV        256 bytes per token; 1 GiB holds 4,194,304 tokens; latent KV\n" in (
        capsys.readouterr().out
    )


def test_check_prints_the_state_of_a_sequence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """9 of 12 layers: 32 heads of 128 x 128, and three inputs of 8,192 channels in bfloat16."""
    values = {"model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "num_hidden_layers": 12}
    values |= {"vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4}
    values |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    values |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["show", str(tmp_path)]) == 2  # it has no weights
    printed = capsys.readouterr().out
    # 3 layers of 2 heads of 256 items of 2 bytes, keys and values
    assert "KV        6 KiB per token" in printed
    assert "; state 18.4 MiB per sequence\n" in printed
    assert "for a copy in 4 bits" in printed, "it drafts for itself"


def test_check_prints_how_weights_are_quantised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path / "awq", intermediate_size=96)
    quantize_checkpoint(folder, "awq_32")
    assert main(["show", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "safetensors, AWQ, 4 bits, computed in bfloat16" in printed
    plain = save_tiny(tmp_path / "plain", "olmo2")
    file = write_gguf(plain, tmp_path / "model.gguf", kind=GgmlType.Q8_0)
    assert main(["show", str(file)]) == 0
    assert "GGUF, Q8_0, computed in " in capsys.readouterr().out


def test_check_says_why_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config("recurrent_gemma").save_pretrained(tmp_path)
    assert main(["show", str(tmp_path)]) == 2
    assert "keep a state outside transformers' cache" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "nowhere")]) == 2


def test_check_of_a_config_alone_prints_what_it_implies_and_that_weights_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config("stablelm").save_pretrained(tmp_path)
    assert main(["show", str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert "context   512 tokens" in printed
    assert f"refused   {tmp_path} has neither model.safetensors nor model." in printed


def test_check_without_a_folder_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["models", "check"])
    assert "models check needs MODEL" in capsys.readouterr().err


def test_a_checkpoint_without_some_tensors_is_reported(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "lacks tensors: model.norm.weight" in str(inspect_model(folder).problem)
