"""Quantised safetensors: values by each format's published formula, in either kind of decoder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.formats.safetensors import TensorFiles
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.opening import open_model
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.structs.linear import NativeLinear
from foretoken.core.ops.quantize import QuantizedStack, QuantizedWeight
from foretoken.core.ops.weights import ExpertWeights
from support.checkpoints import ModelDriver, make_checkpoint
from support.quantized_checkpoints import FORMATS, quantize_checkpoint, write_plain
from support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = list(range(3, 23))
SHAPE = {"hidden_size": 64, "intermediate_size": 96}


def logits_of(path: Path, **options: Any) -> torch.Tensor:
    driver = ModelDriver(load_decoder(path, **options), num_pages=4)
    return driver.prefill(driver.add(IDS), len(IDS))


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_published_formula(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "packed", "qwen3", **SHAPE)
    expected = quantize_checkpoint(folder, name)
    files = TensorFiles(folder)
    assert dict(files.shapes) == {n: tuple(t.shape) for n, t in expected.items()}
    for tensor_name, value in expected.items():
        found = files.read(tensor_name)
        wide = found.dequantize() if isinstance(found, QuantizedWeight) else found.float()
        assert torch.equal(wide, value.float()), tensor_name


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_says_what_its_plain_weights_say(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "packed", "llama_biased", **SHAPE)
    plain = write_plain(folder, tmp_path / "plain", quantize_checkpoint(folder, name))
    options = {"dtype": "float32", "impl": "own"}
    assert torch.equal(logits_of(folder, **options), logits_of(plain, **options))
    assert load_decoder(folder).dtype == torch.bfloat16


PACKED = {"awq_32": 7, "gptq_32": 7, "w4a16_32": 7, "w4a16_zeros_32": 7, "w8a8_dynamic": 2}


@pytest.mark.parametrize("name", PACKED)
def test_what_kernels_can_is_kept_packed_and_loses_nothing(name: str, tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels here")
    folder = make_checkpoint(tmp_path, "qwen3", **SHAPE)
    quantize_checkpoint(folder, name)
    decoder = load_decoder(folder, backend="native")
    packed = decoder.weights.layers[0].linears
    assert all(isinstance(w, NativeLinear) and w.struct.kind == PACKED[name] for w in packed)
    wide = logits_of(folder, dtype="float32", backend="torch")
    found = logits_of(folder, backend="native")
    rounded = logits_of(folder, dtype="bfloat16", backend="native")
    most = 1.5 if name != "w8a8_dynamic" else 20  # whose activations are bytes
    assert (found - wide).norm() < most * (rounded - wide).norm()


def test_scales_that_float16_does_not_hold_are_not_rounded(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", **SHAPE)
    expected = quantize_checkpoint(folder, "w4a16_32")
    name = "model.layers.0.mlp.up_proj"
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight_scale"] *= 2.0**-16
    save_file(tensors, folder / "model.safetensors")
    found = TensorFiles(folder).read(f"{name}.weight")
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, expected[f"{name}.weight"] * 2.0**-16)


@pytest.mark.parametrize(
    "name", ["awq", "awq_32", "gptq_act_order", "w4a16_zeros", "w8a8_dynamic", "fp8_blocks"]
)
def test_transformers_modules_take_the_same_values(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "packed", "olmo2", **SHAPE)
    plain = write_plain(folder, tmp_path / "plain", quantize_checkpoint(folder, name))
    found, expected = (
        logits_of(path, dtype="float32", impl="transformers") for path in (folder, plain)
    )
    assert torch.equal(found, expected)


def mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """gpt-oss with its experts as the hub has them; the plain weights that result."""
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    draw = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs), generator=draw)
        powers = torch.randint(118, 126, (experts, outputs, inputs // 32), generator=draw)
        pairs = codes.view(experts, outputs, -1, 16, 2)
        stored[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = powers.to(torch.uint8)
        del stored[name]
        magnitude = torch.tensor(values)[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        scale = torch.pow(2.0, powers.float() - 127).repeat_interleave(32, dim=2)
        tensors[name] = (magnitude * scale).transpose(1, 2).contiguous()
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    return tensors


def test_gpt_oss_in_mxfp4_says_what_its_plain_weights_say(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "packed", "gpt_oss", intermediate_size=64)
    tensors = mxfp4(folder)
    files = TensorFiles(folder)
    for name, value in tensors.items():
        found = files.read(name)
        wide = found.dequantize() if isinstance(found, QuantizedStack) else found
        assert torch.equal(wide, value), name
    plain = write_plain(folder, tmp_path / "plain", tensors)
    assert torch.equal(logits_of(folder, dtype="float32"), logits_of(plain, dtype="float32"))


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from foretoken.core.model.formats.quantized import _Mxfp4

    draw = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=draw).to(torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=draw).to(torch.uint8)
    scales[0, :, 0] = torch.tensor([0, 1, 2, 3, 253, 254])
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    stack = _Mxfp4._value({"blocks": blocks, "scales": scales})
    assert torch.equal(stack.dequantize(), expected)
    assert stack.count == 2


def test_experts_in_mxfp4_stay_so_and_lose_nothing(tmp_path: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels here")
    folder = save_tiny(tmp_path, "gpt_oss", intermediate_size=64)
    mxfp4(folder)
    mlp = load_decoder(folder, backend="native").weights.layers[0].mlp
    assert isinstance(mlp, ExpertWeights)
    kinds = {w.struct.kind for expert in mlp.experts for w in (expert.gate_up, expert.down)}
    assert kinds == {12}
    wide = logits_of(folder, dtype="float32", backend="torch")
    found = logits_of(folder, backend="native")
    rounded = logits_of(folder, dtype="bfloat16", backend="native")
    # by the median row: rounding may route a row to another expert, in either of them
    ours, theirs = ((each - wide).norm(dim=-1).median() for each in (found, rounded))
    assert ours < 1.5 * theirs
    at_request = logits_of(folder, dtype="float32", backend="native")
    torch.testing.assert_close(at_request, wide, atol=1e-4, rtol=1e-4)


NF4 = [
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0,
]  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_four_bits(nested: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    name, draw = "model.layers.0.mlp.up_proj.weight", torch.Generator().manual_seed(2)
    rows, columns = tensors.pop(name).shape
    codes = torch.randint(0, 16, (rows * columns,), generator=draw)
    scales = torch.rand(rows * columns // 64, generator=draw) * 0.1
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    tensors[name] = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)
    tensors[f"{name}.quant_map"] = torch.tensor(NF4)
    tensors[f"{name}.absmax"] = scales
    if nested:
        steps = torch.randint(0, 256, scales.shape, generator=draw)
        table, tops = torch.linspace(-1, 1, 256), torch.tensor([0.07])
        tensors[f"{name}.absmax"] = steps.to(torch.uint8)
        tensors |= {f"{name}.nested_absmax": tops, f"{name}.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_offset": 0.11, "nested_dtype": "float32"}
        scales = table[steps] * 0.07 + 0.11
    described = json.dumps(state).encode()
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(described)).to(torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    checkpoint = open_model(folder).checkpoint
    values = torch.tensor(NF4)[codes] * scales.repeat_interleave(64)
    assert checkpoint.shapes[name] == (rows, columns)
    assert torch.equal(checkpoint.read(name), values.view(rows, columns))
    assert load_decoder(folder).dtype == torch.bfloat16


def test_bitsandbytes_eight_bits(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    stem, draw = "model.layers.0.mlp.up_proj", torch.Generator().manual_seed(2)
    shape = tensors[f"{stem}.weight"].shape
    numbers = torch.randint(-127, 128, shape, generator=draw)
    tops = torch.rand(shape[0], generator=draw)
    tensors |= {f"{stem}.weight": numbers.to(torch.int8), f"{stem}.SCB": tops}
    tensors[f"{stem}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    found = open_model(folder).checkpoint.read(f"{stem}.weight")
    expected = numbers.float() * tops.unsqueeze(1) * 7.874015718698502e-3
    assert torch.equal(found, expected)


# -- refusals -------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


REFUSED = {
    "nothing said": ({"bits": 4}, "quant_method is missing"),
    "unknown": (
        {"quant_method": "aqlm"},
        r"quant_method 'aqlm' is not supported; supported: awq, gptq, .*",
    ),
    "awq, 8 bits": ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits"),
    "awq, another version": ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
    "gptq, 3 bits": ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits"),
    "marlin": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "checkpoint_format 'marlin'",
    ),
    "nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "'nvfp4-pack-quantized' is not supported",
    ),
    "sparse": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
        "sparsity_config",
    ),
    "odd bits": (
        {"format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 3}}}},
        r"packed weights of \[3\] bits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("model_type", ["qwen3", "olmo2"])
def test_what_is_not_read_is_refused_by_name_with_what_to_do_instead(
    case: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme, message = REFUSED[case]
    folder = save_tiny(tmp_path, model_type)
    edit_config(folder, quantization_config=scheme)
    monkeypatch.setattr(TensorFiles, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_decoder(folder)
    if case != "nothing said":
        assert "use the unquantised weights with --quantize int8 or int4, or a GGUF" in str(
            caught.value
        )


def _drop(suffix: str) -> Any:
    return lambda tensors: tensors.pop(f"model.layers.0.mlp.up_proj.{suffix}")


def _cut(suffix: str) -> Any:
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


DAMAGED = {
    "no zeros": ("awq", _drop("qzeros"), "up_proj has no qzeros"),
    "cut scales": ("awq", _cut("scales"), "up_proj"),
    "cut groups": ("gptq_act_order", _cut("g_idx"), "g_idx does not have a group"),
    "cut words": ("w4a16", _cut("weight_packed"), "weight_shape does not fit"),
    "no scale": ("fp8_blocks", _drop("weight_scale_inv"), "up_proj.weight has no scale"),
    "cut blocks": ("fp8_blocks", _cut("weight_scale_inv"), "do not fit"),
    "bytes alone": ("w8a8", _drop("weight_scale"), "up_proj.weight has dtype I8"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_tensors_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    name, damage, message = DAMAGED[case]
    folder = make_checkpoint(tmp_path, "qwen3", **SHAPE)
    quantize_checkpoint(folder, name)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load_decoder(folder)


def test_scales_of_blocks_cover_rows_and_columns_that_are_cut() -> None:
    from foretoken.core.model.formats.quantized import _by_block

    scale = torch.arange(1.0, 7.0).view(2, 3)
    found = _by_block(torch.ones(5, 8), scale, (3, 3))
    assert found[4].tolist() == [4.0] * 3 + [5.0] * 3 + [6.0] * 2
    assert math.isclose(float(found.sum()), 3 * (1 * 3 + 2 * 3 + 3 * 2) + 2 * (12 + 15 + 12))
