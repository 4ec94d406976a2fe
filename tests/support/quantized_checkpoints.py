"""Tiny checkpoints whose matrices are quantised as the hub has them, and what they stand for.

Each writer rounds nothing itself: it draws the stored integers and scales, so that the values of a
matrix follow from its format's published formula alone, which is spelled out here value by value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
Drawn = tuple[Stored, Tensor]  # tensors by suffix, and the matrix [out, in] in float64
GROUP = 16
_AWQ_NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]  # the output in each nibble of a word


def _ints(shape: tuple[int, ...], low: int, high: int, draw: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=draw)


def _scales(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    return 0.004 + 0.02 * torch.rand(shape, generator=draw)


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """Neighbours along the last dimension into words of 32 bits, the first one lowest."""
    per_word = 32 // bits
    words = numbers.long().view(*numbers.shape[:-1], -1, per_word)
    packed = sum(words[..., i] << (bits * i) for i in range(per_word))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def awq(out: int, inputs: int, draw: torch.Generator, *, size: int = GROUP) -> Drawn:
    numbers = _ints((inputs, out), 0, 16, draw)
    zeros = _ints((inputs // size, out), 0, 16, draw)
    scales = _scales((inputs // size, out), draw).half()
    value = torch.empty(out, inputs, dtype=torch.float64)
    for k in range(inputs):
        group = k // size
        value[:, k] = (numbers[k] - zeros[group]).double() * scales[group].double()

    def packed(columns: Tensor) -> Tensor:
        eights = columns.view(len(columns), -1, 8)[:, :, _AWQ_NIBBLES]
        return _pack(eights.reshape(len(columns), -1), 4)

    return {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales}, value


def gptq(
    out: int, inputs: int, draw: torch.Generator, *, bits: int = 4, act_order: bool = False,
    less: int = 1, size: int = GROUP,
) -> Drawn:  # fmt: skip
    groups = inputs // size
    numbers = _ints((inputs, out), 0, 2**bits, draw)
    zeros = _ints((groups, out), 1, 2**bits, draw)
    scales = _scales((groups, out), draw).half()
    group_of = torch.arange(inputs) // size
    if act_order:
        group_of = group_of[torch.randperm(inputs, generator=draw)]
    value = torch.empty(out, inputs, dtype=torch.float64)
    for k in range(inputs):
        group = int(group_of[k])
        value[:, k] = (numbers[k] - zeros[group]).double() * scales[group].double()
    pad = -out % (32 // bits)
    stored = {
        "qweight": _pack(numbers.T.contiguous(), bits).T.contiguous(),
        "qzeros": _pack(torch.nn.functional.pad(zeros - less, (0, pad)), bits),
        "scales": scales,
        "g_idx": group_of.int(),
    }
    return stored, value


def packed_integers(
    out: int, inputs: int, draw: torch.Generator, *, bits: int = 4, zeros: bool = False,
    act_order: bool = False, size: int = GROUP,
) -> Drawn:  # fmt: skip
    """compressed-tensors' pack-quantized."""
    half, groups = 2 ** (bits - 1), inputs // size
    numbers = _ints((out, inputs), -half, half, draw)
    points = _ints((out, groups), -half, half, draw) if zeros else torch.zeros(out, groups)
    scales = _scales((out, groups), draw).bfloat16()
    group_of = torch.arange(inputs) // size
    if act_order:
        group_of = group_of[torch.randperm(inputs, generator=draw)]
    value = torch.empty(out, inputs, dtype=torch.float64)
    for k in range(inputs):
        group = int(group_of[k])
        value[:, k] = (numbers[:, k] - points[:, group]).double() * scales[:, group].double()
    stored = {
        "weight_packed": _pack(numbers + half, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, inputs]),
    }
    if zeros:
        pad = -out % (32 // bits)
        columns = torch.nn.functional.pad((points + half).T, (0, pad))
        stored["weight_zero_point"] = _pack(columns, bits).T.contiguous()
    if act_order:
        stored["weight_g_idx"] = group_of.int()
    return stored, value


def bytes_by_row(out: int, inputs: int, draw: torch.Generator) -> Drawn:
    """compressed-tensors' int-quantized: W8A8."""
    numbers = _ints((out, inputs), -128, 128, draw)
    scales = _scales((out, 1), draw).bfloat16() / 16
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, (
        numbers.double() * scales.double()
    )


def _float8(out: int, inputs: int, draw: torch.Generator) -> Tensor:
    return torch.randn(out, inputs, generator=draw).to(torch.float8_e4m3fn)


def fp8_blocks(out: int, inputs: int, draw: torch.Generator, *, block: int = 24) -> Drawn:
    """DeepSeek's: a scale for each square; the last ones are cut."""
    numbers = _float8(out, inputs, draw)
    scales = _scales((-(-out // block), -(-inputs // block)), draw) * 8
    value = numbers.double()
    for row in range(out):
        for k in range(inputs):
            value[row, k] *= scales[row // block, k // block].double()
    return {"weight": numbers, "weight_scale_inv": scales}, value


def fp8_tensor(out: int, inputs: int, draw: torch.Generator) -> Drawn:
    numbers, scale = _float8(out, inputs, draw), torch.tensor(0.0417)
    stored = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return stored, numbers.double() * scale.double()


def fp8_rows(out: int, inputs: int, draw: torch.Generator) -> Drawn:
    numbers, scales = _float8(out, inputs, draw), _scales((out, 1), draw).bfloat16() * 8
    return {"weight": numbers, "weight_scale": scales}, numbers.double() * scales.double()


def _groups(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


Draw = Callable[[int, int, torch.Generator], Drawn]
_PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
# By name: the quantization_config, and how a matrix is drawn.
FORMATS: dict[str, tuple[dict[str, Any], Draw]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
        | {"version": "gemm", "modules_to_not_convert": ["lm_head"]},
        awq,
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, gptq),
    "gptq_act_order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda *given: gptq(*given, act_order=True),
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda *given: gptq(*given, less=0),
    ),
    "gptq_8_bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
        lambda *given: gptq(*given, bits=8),
    ),
    "gptq_2_bits": (
        {"quant_method": "gptq", "bits": 2, "group_size": GROUP},
        lambda *given: gptq(*given, bits=2),
    ),
    "w4a16": (_PACKED | _groups(num_bits=4, type="int", group_size=GROUP), packed_integers),
    "w4a16_zeros": (
        _PACKED | _groups(num_bits=4, type="int", symmetric=False),
        lambda *given: packed_integers(*given, zeros=True),
    ),
    "w4a16_act_order": (
        _PACKED | _groups(num_bits=4, type="int", actorder="group"),
        lambda *given: packed_integers(*given, act_order=True, zeros=True),
    ),
    "w8a16": (
        _PACKED | _groups(num_bits=8, type="int"),
        lambda *given: packed_integers(*given, bits=8),
    ),
    "w8a8": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"}
        | _groups(num_bits=8, type="int", strategy="channel"),
        bytes_by_row,
    ),
    "w8a8_dynamic": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"}
        | {
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                    "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
                }
            }
        },
        bytes_by_row,
    ),
    "fp8_dynamic": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"}
        | _groups(num_bits=8, type="float", strategy="channel"),
        fp8_rows,
    ),
    # groups that kernels take
    "awq_32": ({"quant_method": "awq", "bits": 4}, lambda *given: awq(*given, size=32)),
    "gptq_32": ({"quant_method": "gptq", "bits": 4}, lambda *given: gptq(*given, size=32)),
    "w4a16_32": (
        _PACKED | _groups(num_bits=4, type="int"),
        lambda *given: packed_integers(*given, size=32),
    ),
    "w4a16_zeros_32": (
        _PACKED | _groups(num_bits=4, type="int"),
        lambda *given: packed_integers(*given, size=32, zeros=True),
    ),
    "fp8_blocks": ({"quant_method": "fp8", "weight_block_size": [24, 24]}, fp8_blocks),
    "fp8_tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
}


def quantize_checkpoint(folder: Path, name: str) -> dict[str, Tensor]:
    """Quantise the matrices of a folder's layers in place; the plain weights that result.

    Of these the matrices are float32, rounded once from float64.
    """
    config, draw_matrix = FORMATS[name]
    draw = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for tensor_name, tensor in tensors.items():
        if not tensor_name.endswith("proj.weight"):
            stored[tensor_name] = tensor
            continue
        parts, value = draw_matrix(*tensor.shape, draw)
        stem = tensor_name.removesuffix(".weight")
        stored |= {f"{stem}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        tensors[tensor_name] = value.float()
    save_file(stored, folder / "model.safetensors")
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": config}
    path.write_text(json.dumps(values))
    return tensors


def write_plain(folder: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """The same model with plain weights."""
    target.mkdir()
    values = json.loads((folder / "config.json").read_text())
    values.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(values))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
