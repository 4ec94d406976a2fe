"""Loading: what is refused, with which words, before memory is spent; what is cast and packed."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.formats.safetensors import TensorFiles
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.opening import read_config
from support.checkpoints import ModelDriver, make_checkpoint, make_reference, save

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
IDS = list(range(3, 23))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def saved_in_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    return save(make_reference("qwen3"), folder, max_shard_size="100KB")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def shards(saved_in_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_in_shards, tmp_path / "shards"))


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors must be found before any tensor is read."""

    def read(self: TensorFiles, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(TensorFiles, "read", read)


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    driver = ModelDriver(load_decoder(folder, **options), num_pages=4)
    return driver.prefill(driver.add(IDS), len(IDS))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_shards_load_the_same_model_as_one_file(saved: Path, saved_in_shards: Path) -> None:
    assert len(list(saved_in_shards.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(saved), logits_of(saved_in_shards))


def test_tied_checkpoints_use_the_embedding_whether_or_not_they_store_it_twice(
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    expected = logits_of(folder)
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t[name].clone()}))
    assert torch.equal(logits_of(folder), expected)


def test_an_untied_checkpoint_without_output_matrix_is_refused(
    folder: Path, no_reading: None
) -> None:
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"lacks tensors: lm_head\.weight$"):
        load_decoder(folder)


def test_auto_keeps_the_stored_dtype_and_a_name_casts(tmp_path: Path) -> None:
    folder = save(make_reference("qwen3").to(torch.bfloat16), tmp_path)
    assert load_decoder(folder).dtype == torch.bfloat16
    wide = load_decoder(folder, dtype="float32")
    assert wide.dtype == torch.float32
    assert wide.make_pool(1, page_size=4).dtype == torch.float32


def test_float16_is_computed_in_float32_on_the_cpu_and_refused_by_name(tmp_path: Path) -> None:
    folder = save(make_reference("qwen3").half(), tmp_path)
    assert load_decoder(folder).dtype == torch.float32
    with pytest.raises(ModelLoadError, match="float16 is not supported on the CPU"):
        load_decoder(folder, dtype="float16")
    with pytest.raises(ModelLoadError, match="dtype 'int8' is not one of auto, float32"):
        load_decoder(folder, dtype="int8")


def test_random_weights_need_only_a_config_and_are_the_same_every_time(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    first = logits_of(folder, load_format="random")
    assert torch.equal(first, logits_of(folder, load_format="random"))
    assert torch.isfinite(first).all()
    assert load_decoder(folder, load_format="random", dtype="bfloat16").dtype == torch.bfloat16


def test_random_weights_do_not_collapse_to_one_repeated_token(folder: Path) -> None:
    driver = ModelDriver(load_decoder(folder, load_format="random"), num_pages=8)
    stream = driver.add([5, 6, 7], capacity=60)
    driver.prefill(stream, 2)
    for _ in range(40):
        (logits,) = driver.step([(stream, stream.tokens[stream.num_computed :], 1)])
        stream.num_computed = len(stream.tokens)
        stream.tokens.append(int(logits.argmax()))
    assert len(set(stream.tokens[3:])) > 8


def test_end_tokens_of_both_config_files_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    edit_config(folder, eos_token_id=7)
    assert read_config(folder).eos_token_ids == (7, 2, 9)


def test_rope_and_dtype_are_read_in_the_old_spelling(folder: Path) -> None:
    path = folder / "config.json"
    old = json.loads(path.read_text())
    for name in ("rope_parameters", "dtype"):
        old.pop(name, None)
    old |= {"rope_theta": 5e5, "torch_dtype": "bfloat16"}
    old["rope_scaling"] = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    path.write_text(json.dumps(old))
    config = read_config(folder)
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("yarn", 5e5, 2.0)
    assert config.rope.original_max_len == 512
    assert config.dtype == "bfloat16"


def test_yarn_stretches_the_context_where_the_config_does_not(folder: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    edit_config(folder, rope_parameters=None, rope_scaling=scaling)
    assert read_config(folder).max_model_len == 4096


BAD_CONFIGS = {
    "unknown family": (
        {"model_type": "gpt2"},
        r"'gpt2' is not supported; supported: arcee, bamba, cohere",
    ),
    "no family": ({"model_type": None}, "model_type is missing"),
    "dynamic rope": ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic', which is not"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor must be a list"),
    "linear without factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    "zero factor": ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be"),
    "zero theta": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
    "quantized": (
        {"quantization_config": {"bits": 4}},
        "quantization_config: quant_method is missing",
    ),
    "gelu": ({"hidden_act": "gelu"}, "'gelu' is not supported; supported: silu, swish"),
    "encoder": ({"is_encoder_decoder": True}, "only decoders are"),
    "text size": ({"hidden_size": "big"}, "hidden_size must be an integer"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, not 0"),
    "uneven heads": ({"num_key_value_heads": 3}, "is 3, which does not divide 4 attention heads"),
    "odd head": ({"head_dim": 31}, "head_dim must be even"),
    "int8": ({"dtype": "int8"}, "'int8' is not supported; supported: float32, bfloat16, float16"),
    "bad eos": ({"eos_token_id": "</s>"}, "eos_token_id must be an integer or a list"),
    "bad layer types": (
        {"layer_types": ["linear_attention"] * 3},
        "layer_types must be a list of 3 names from",
    ),
    "no window": (
        {
            "layer_types": ["sliding_attention"] * 3,
            "use_sliding_window": True,
            "sliding_window": None,
        },
        "sliding_window is missing",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_unsupported_configs_are_refused_by_name(case: str, folder: Path, no_reading: None) -> None:
    changes, message = BAD_CONFIGS[case]
    edit_config(folder, **changes)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_decoder(folder, impl="own")
    assert "config.json" in str(caught.value)


def damage_shape(header: dict[str, Any]) -> None:
    entry = header["model.norm.weight"]
    entry["shape"] = [32, 2]


def in_fp8(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "damaged config": (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "a JSON object"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"neither {WEIGHTS} nor {INDEX}"),
    "pickles only": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        "pytorch_model.bin, a pickle .* only safetensors",
    ),
    "empty file": (lambda f: (f / WEIGHTS).write_bytes(b""), "its header does not fit the file"),
    "huge header": (
        lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 64),
        "its header does not fit the file",
    ),
    "header is no JSON": (
        lambda f: (f / WEIGHTS).write_bytes(struct.pack("<Q", 4) + b"abcd"),
        "is damaged",
    ),
    "cut download": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]),
        "do not lie within the file",
    ),
    "incomplete entry": (
        lambda f: edit_header(f, lambda h: h["model.norm.weight"].pop("shape")),
        "the header of model.norm.weight is incomplete",
    ),
    "fp8": (
        lambda f: edit_tensors(f, in_fp8),
        "dtype F8_E4M3; only F32, F16, BF16 are supported in a checkpoint without quantization_c",
    ),
    "missing tensors": (
        lambda f: edit_tensors(f, lambda t: [t.pop(k) for k in list(t) if "layers.2." in k]),
        r"lacks tensors: model\.layers\.2\.input_layernorm\.weight, .* and 7 more",
    ),
    "extra tensor": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.mtp.weight": torch.zeros(2)})),
        r"has unexpected tensors: model\.mtp\.weight$",
    ),
    "misshaped tensor": (
        lambda f: edit_header(f, damage_shape),
        r"model\.norm\.weight has shape \[32, 2\], but its config implies \[64\]",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_damaged_checkpoints_are_refused_before_a_tensor_is_read(
    case: str, folder: Path, no_reading: None
) -> None:
    damage, message = BAD_FILES[case]
    damage(folder)
    with pytest.raises(ModelLoadError, match=message):
        load_decoder(folder)


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def edit_index(folder: Path, **changes: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


BAD_SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: first_shard(f).unlink(), "has no model-00001-of-"),
    "damaged index": (lambda f: (f / INDEX).write_text("nonsense"), "index.json cannot be read"),
    "no map": (lambda f: (f / INDEX).write_text("{}"), "weight_map must name a file"),
    "another folder": (
        lambda f: edit_index(f, **{"model.norm.weight": "../secret.safetensors"}),
        "'../secret.safetensors' is not a plain file name",
    ),
    "wrong shard": (
        lambda f: edit_index(f, **{"model.norm.weight": first_shard(f).name}),
        r"lacks model\.norm\.weight, which should be there according to model",
    ),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_damaged_shards_are_refused_before_a_tensor_is_read(
    case: str, shards: Path, no_reading: None
) -> None:
    damage, message = BAD_SHARDS[case]
    damage(shards)
    with pytest.raises(ModelLoadError, match=message):
        load_decoder(shards)


def test_frequencies_stored_by_old_checkpoints_are_ignored(folder: Path) -> None:
    expected = logits_of(folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(16)}))
    assert torch.equal(logits_of(folder), expected)


def test_a_device_that_is_not_there_is_refused(folder: Path, no_reading: None) -> None:
    with pytest.raises(ModelLoadError, match="device meta is not supported"):
        load_decoder(folder, device="meta")


def test_loading_is_silent_without_a_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load_decoder(folder)
    assert capfd.readouterr() == ("", "")
