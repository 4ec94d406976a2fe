"""Models that --kv-evict refuses before anything is served, and foretoken calibrate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.api.build.kv.packing import keep_policy_of
from foretoken.api.cli.commands import main
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest
from foretoken.core.execution.packing.policies import KeepWindow
from foretoken.core.execution.packing.triattention import KeepByTriAttention
from foretoken.core.model.loader import load_decoder
from support.checkpoints import make_checkpoint
from support.tiny_models import save_tiny

WINDOW = EngineConfig(kv_evict="window:512")


def test_nothing_is_made_unless_it_is_asked_for(tmp_path: Path) -> None:
    decoder = load_decoder(make_checkpoint(tmp_path, "qwen3"))
    assert keep_policy_of(EngineConfig(), decoder) is None
    assert isinstance(keep_policy_of(WINDOW, decoder), KeepWindow)


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("mistral_window", {}, "windows by layer"),
        ("qwen3_5", {}, "recurrent states"),
        ("qwen3", {"impl": "transformers"}, "transformers' modules"),
    ],
)
def test_a_model_whose_kv_cannot_be_packed_is_refused(
    kind: str, options: dict[str, str], told: str, tmp_path: Path
) -> None:
    decoder = load_decoder(make_checkpoint(tmp_path, kind), **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"kv_evict does not support a model with {told}"):
        keep_policy_of(WINDOW, decoder)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"kv_evict": "triattention:512"}, "kv_evict"),
        ({"kv_evict": "window:512", "kv_evict_stats": "x"}, "kv_evict_stats"),
        ({"kv_evict_stats": "x"}, "kv_evict_stats"),
    ],
)
def test_statistics_belong_to_triattention(options: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EngineConfig(**options)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_the_built_in_model_is_calibrated_and_served(tmp_path: Path, capsys) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "stats.safetensors"
    data.write_text(
        "".join(json.dumps({"text": f"def f{i}(): return {i}"}) + "\n" for i in range(9))
    )
    assert main(["calibrate", "builtin", "--data", str(data), "--out", str(out)]) == 0
    assert "concentration" in capsys.readouterr().out
    config = EngineConfig(kv_evict="triattention:512", kv_evict_stats=str(out))
    from foretoken.api.build.model_files import find_model

    decoder = load_decoder(find_model("builtin").path)
    assert isinstance(keep_policy_of(config, decoder), KeepByTriAttention)
    other = load_decoder(make_checkpoint(tmp_path / "other", "qwen3"))
    with pytest.raises(InvalidRequest, match="another model"):
        keep_policy_of(config, other)


def test_latent_kv_has_no_statistics(tmp_path: Path) -> None:
    decoder = load_decoder(save_tiny(tmp_path, "deepseek_v3"))
    config = EngineConfig(kv_evict="triattention:512", kv_evict_stats="x")
    assert isinstance(keep_policy_of(WINDOW, decoder), KeepWindow)
    with pytest.raises(InvalidRequest, match="latent KV"):
        keep_policy_of(config, decoder)


@pytest.mark.parametrize(
    ("name", "content"),
    [("nowhere.txt", None), ("bad.jsonl", "{"), ("other.jsonl", '{"a": 1}'), ("empty.txt", "")],
)
def test_data_without_text_is_exit_2(
    name: str, content: str | None, tmp_path: Path, capsys
) -> None:
    data = tmp_path / name
    if content is not None:
        data.write_text(content)
    arguments = ["--data", str(data), "--out", str(tmp_path / "out")]
    assert main(["calibrate", "builtin", *arguments]) == 2
    assert "foretoken calibrate:" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["", "nowhere/stats"], ids=["a folder", "below none"])
def test_a_file_that_cannot_be_written_is_exit_2_before_the_work(
    out: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    """Once, this was a traceback at the end."""
    monkeypatch.setattr("foretoken.api.cli.calibrate.load_decoder", None)
    data = tmp_path / "data.txt"
    data.write_text("some text")
    arguments = ["--data", str(data), "--out", str(tmp_path / out)]
    assert main(["calibrate", "builtin", *arguments]) == 2
    assert "foretoken calibrate: --out: " in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_an_error_of_one_line(tmp_path: Path, capsys) -> None:
    data = tmp_path / "data.txt"
    data.write_text("some text")
    assert main(["calibrate", "builtin", "--data", str(data), "--out", "/dev/full"]) == 1
    assert capsys.readouterr().err == "foretoken: /dev/full: No space left on device\n"
