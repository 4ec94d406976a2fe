"""Quantised checkpoints in safetensors: the schemes of ``quantization_config`` and their values.

A scheme finds the tensors that make up each matrix, checks them by their headers, and computes the
matrix in float32, where every product of a stored integer and a stored scale is exact or rounded
once: AWQ (https://github.com/casper-hansen/AutoAWQ), GPTQ (https://github.com/ModelCloud/
GPTQModel), compressed-tensors, FP8, MXFP4 (OCP Microscaling Formats 1.0) and bitsandbytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...ops.blocks import half_of_power
from ...ops.quantize import GROUP, QuantizedStack, QuantizedWeight, StoredWeight, UnpackedWeight
from ..description.fields import Fields
from .files import TensorEntry

INSTEAD = "use the unquantised weights with --quantize int8 or int4, or a GGUF file"
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # index of each output's nibble among eight
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
# Scales of activations, keys and values are skipped: this engine rounds these itself or not at all.
_PASSED_OVER = (
    ".activation_scale", ".input_scale", ".input_zero_point", ".input_global_scale",
    ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".weight_shape",
)  # fmt: skip

Parts: TypeAlias = Mapping[str, Tensor]


Entries: TypeAlias = Mapping[str, TensorEntry]


class Stored(NamedTuple):
    """The stored tensors of a checkpoint. ``read`` returns a metadata tensor of a few bytes."""

    entries: Entries
    read: Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix made of several stored tensors.

    ``value`` maps them by role to the matrix: float32 of ``shape``, or integers and scales if the
    kernels compute with these without loss.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, str]  # names in the files by role
    value: Callable[[Parts], StoredWeight]


class Scheme(Protocol):
    """A quantisation scheme of a checkpoint."""

    label: str  # name for display

    def gather(self, stored: Stored) -> dict[str, QuantizedTensor]:
        """Return the quantised matrices by plain names. Raises ValueError that names a tensor."""


def read_scheme(fields: Fields) -> Scheme | None:
    """Return the scheme of a config.json; None for plain weights.

    Raises `ModelLoadError` for an unsupported scheme, with an alternative.
    """
    for owner in (fields, fields.object("text_config")):
        for name in ("quantization_config", "compression_config"):
            if owner.has(name):
                return _parse(owner.object(name))
    return None


def gather(scheme: Scheme, stored: Stored) -> dict[str, QuantizedTensor]:
    """Call `Scheme.gather`. Raises `ModelLoadError` for tensors that do not fit each other."""
    try:
        return scheme.gather(stored)
    except ValueError as error:
        raise ModelLoadError(f"the {scheme.label} weights are damaged: {error}") from error


def is_passed_over(name: str) -> bool:
    """Whether this engine ignores a tensor that is stored with quantised weights."""
    return name.endswith(_PASSED_OVER)


def _parse(fields: Fields) -> Scheme:
    default = "compressed-tensors" if fields.has("config_groups") else None
    method = fields.text("quant_method", default).replace("_", "-")
    if fields.flag("load_in_4bit", False) or fields.flag("load_in_8bit", False):
        method = "bitsandbytes"
    reader = _METHODS.get(method)
    if reader is None:
        known = ", ".join(_METHODS)
        raise _refused(fields, f"quant_method {method!r} is not supported; supported: {known}")
    return reader(fields)


def _refused(fields: Fields, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{fields.where}: {problem}; {INSTEAD}")


# -- what formats share ---------------------------------------------------------------------------


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 ``[.., n]`` to 2, 4 or 8-bit numbers, lowest first: ``[.., 32 / bits * n]``."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    mask = 2**bits - 1
    return torch.stack([(octets >> at) & mask for at in range(0, 8, bits)], dim=-1).flatten(-2)


def nibble_pairs(octets: Tensor) -> Tensor:
    """Return two numbers per byte, the low one first: ``[.., 2 * n]``."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def _by_group(numbers: Tensor, zeros: Tensor | None, scale: Tensor) -> Tensor:
    """Return float32 ``(numbers - zeros) * scale`` [out, in].

    Each group of neighbouring columns in a row has its own scale and zero.
    """
    groups = numbers.float().view(len(numbers), scale.shape[1], -1)
    if zeros is not None:
        groups -= zeros.float().unsqueeze(2)
    return groups.mul_(scale.float().unsqueeze(2)).view(len(numbers), -1)


def _four_bits(
    numbers: Tensor, zeros: Tensor | None, scale: Tensor, *, below: int = 0
) -> Tensor | QuantizedWeight:
    """Return 4-bit numbers as stored, or dequantised by `_by_group`.

    They stay as stored if their groups are multiples of the kernels' groups and the scales fit into
    float16. ``below``: added to numbers and zeros to make them unsigned.
    """
    repeats, rest = divmod(numbers.shape[1] // scale.shape[1], GROUP)
    half = scale.half()
    if rest or not repeats or not torch.equal(half.float(), scale.float()):
        return _by_group(numbers, zeros, scale)
    zeros = torch.zeros_like(half) if zeros is None else zeros.half()
    half, zeros = (each.repeat_interleave(repeats, dim=1) for each in (half, zeros + below))
    return UnpackedWeight("int4_zero", (numbers + below).to(torch.int8), half, zeros)


def _by_column(numbers: Tensor, zeros: Tensor | None, scale: Tensor, group_of: Tensor) -> Tensor:
    """Return float32 ``(numbers - zeros) * scale``; ``group_of`` [in]: the group of each column."""
    wide, index = numbers.float(), group_of.long()
    if zeros is not None:
        wide -= zeros.float()[:, index]
    return wide.mul_(scale.float()[:, index])


def _by_block(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return float32 ``values`` [.., out, in] times a scale per block; edge blocks may be cut.

    ``scale``: one number, one per row, or one per block.
    """
    wide = values.float()
    if scale.numel() == 1:
        return wide.mul_(scale.float().reshape(()))
    if scale.dim() == 1:
        scale = scale.unsqueeze(-1)
    rows, columns = wide.shape[-2:]
    by_row = scale.float().repeat_interleave(block[0], dim=-2)[..., :rows, :]
    # A column of blocks at a time avoids a scale tensor as large as the values.
    for at in range(scale.shape[-1]):
        wide[..., at * block[1] : (at + 1) * block[1]] *= by_row[..., at : at + 1]
    assert scale.shape[-1] * block[1] >= columns
    return wide


def _group_count(in_features: int, groups: int, name: str) -> int:
    if groups < 1 or in_features % groups:
        raise ValueError(f"{name} has {groups} scales for {in_features} inputs")
    return groups


def _roles(stem: str, entries: Entries, roles: tuple[str, ...], needed: int) -> dict[str, str]:
    """Return a matrix's tensor names by role. Raises ValueError if a ``needed`` one is missing."""
    found = {role: f"{stem}.{role}" for role in roles if f"{stem}.{role}" in entries}
    for role in roles[:needed]:
        if role not in found:
            raise ValueError(f"{stem} has no {role}")
    return found


def _stems(entries: Entries, suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in entries if name.endswith(suffix)]


def _matrix(entries: Entries, name: str) -> tuple[int, int]:
    shape = entries[name].shape
    if len(shape) != 2:
        raise ValueError(f"{name} has shape {list(shape)}, but must be a matrix")
    return shape[0], shape[1]


# -- AWQ and GPTQ ---------------------------------------------------------------------------------


class _Awq:
    """AWQ: weights are ``(n - zero) * scale``; a word packs eight outputs, in AWQ's order."""

    def __init__(self, fields: Fields) -> None:
        bits = fields.integer("bits", fields.integer("w_bit", 4))
        version = fields.text("version", "gemm").lower()
        if bits != 4:
            raise _refused(fields, f"AWQ of {bits} bits is not supported; only 4 bits are")
        if version not in ("gemm", "exllama", "ipex"):
            raise _refused(fields, f"AWQ's version {version!r} is not supported; only gemm is")
        self.label = "AWQ, 4 bits"

    def gather(self, stored: Stored) -> dict[str, QuantizedTensor]:
        found, entries = {}, stored.entries
        for stem in _stems(entries, ".qweight"):
            parts = _roles(stem, entries, ("qweight", "qzeros", "scales"), 3)
            (inputs, words), scales = (_matrix(entries, parts[r]) for r in ("qweight", "scales"))
            groups = _group_count(inputs, scales[0], stem)
            if scales[1] != 8 * words or entries[parts["qzeros"]].shape != (groups, words):
                raise ValueError(f"{stem}: its scales or zeros do not fit its values")
            found[f"{stem}.weight"] = QuantizedTensor((8 * words, inputs), parts, self._value)
        return found

    @staticmethod
    def _value(parts: Parts) -> Tensor | QuantizedWeight:
        numbers, zeros = (_awq_columns(parts[role]) for role in ("qweight", "qzeros"))
        return _four_bits(numbers, zeros, parts["scales"].T)


def _awq_columns(words: Tensor) -> Tensor:
    """Unpack ``[in, out / 8]`` to ``[out, in]``."""
    eights = unpack(words, 4).view(len(words), -1, 8)[:, :, _AWQ_ORDER]
    return eights.reshape(len(words), -1).T.contiguous()


class _Gptq:
    """GPTQ: weights are ``(n - zero) * scale``; a word packs several inputs.

    Each column may belong to any group.
    """

    def __init__(self, fields: Fields) -> None:
        self._bits = fields.integer("bits", 4)
        layout = fields.text("checkpoint_format", "gptq").lower()
        if self._bits not in (2, 4, 8):
            raise _refused(
                fields, f"GPTQ of {self._bits} bits is not supported; supported: 2, 4, 8"
            )
        if layout not in ("gptq", "gptq_v2"):
            raise _refused(
                fields,
                f"GPTQ's checkpoint_format {layout!r} is not supported; supported: gptq, gptq_v2",
            )
        self._less = int(layout == "gptq")  # The first version stores each zero point minus one.
        self.label = f"GPTQ, {self._bits} bits"

    def gather(self, stored: Stored) -> dict[str, QuantizedTensor]:
        found, entries, per_word = {}, stored.entries, 32 // self._bits
        for stem in _stems(entries, ".qweight"):
            parts = _roles(stem, entries, ("qweight", "qzeros", "scales", "g_idx"), 3)
            (words, outputs), scales = (_matrix(entries, parts[r]) for r in ("qweight", "scales"))
            zeros = (scales[0], -(-outputs // per_word))
            if scales[1] != outputs or entries[parts["qzeros"]].shape != zeros:
                raise ValueError(f"{stem}: its scales or zeros do not fit its values")
            inputs = words * per_word
            if "g_idx" not in parts:
                _group_count(inputs, scales[0], stem)
            elif entries[parts["g_idx"]].shape != (inputs,):
                raise ValueError(f"{stem}: its g_idx does not have a group for each input")
            found[f"{stem}.weight"] = QuantizedTensor((outputs, inputs), parts, self._value)
        return found

    def _value(self, parts: Parts) -> Tensor | QuantizedWeight:
        numbers = unpack(parts["qweight"].T, self._bits)
        scale = parts["scales"].T
        zeros = unpack(parts["qzeros"], self._bits).T[: len(numbers)].short() + self._less
        group_of = parts.get("g_idx")
        if group_of is not None and not _is_in_order(group_of, scale.shape[1]):
            return _by_column(numbers, zeros, scale, group_of)
        if self._bits == 4:
            return _four_bits(numbers, zeros, scale)
        return _by_group(numbers, zeros, scale)


def _is_in_order(group_of: Tensor, groups: int) -> bool:
    """Whether columns form equal groups of neighbours, as without act-order."""
    size, rest = divmod(len(group_of), groups)
    return not rest and torch.equal(group_of.long(), torch.arange(len(group_of)) // size)


# -- compressed-tensors ---------------------------------------------------------------------------


class _CompressedTensors:
    """compressed-tensors: packed integers, bytes or FP8, with a scale per tensor, row or group.

    FP8 may also have a scale per block.
    """

    _FORMATS = (
        "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
        "mixed-precision",
    )  # fmt: skip

    def __init__(self, fields: Fields) -> None:
        groups = [
            group for group in fields.object("config_groups").values.values()
            if isinstance(group, dict)
        ]  # fmt: skip
        formats = {fields.text("format", "dense")}
        formats |= {str(group["format"]) for group in groups if group.get("format")}
        for name in sorted(formats - set(self._FORMATS)):
            known = ", ".join(self._FORMATS)
            raise _refused(
                fields, f"compressed-tensors' {name!r} is not supported; supported: {known}"
            )
        if fields.object("sparsity_config").text("format", "dense") != "dense":
            raise _refused(fields, "compressed-tensors' sparsity_config is not supported")
        weights = [group.get("weights") or {} for group in groups]
        bits = {weight.get("num_bits", 8) for weight in weights}
        self._bits = min(bits, default=8)
        packs = bool(formats & {"pack-quantized", "mixed-precision"})
        packed_bits = {each for each in bits if packs and each in (2, 4, 8)}
        if packs and "pack-quantized" in formats and not packed_bits:
            raise _refused(fields, f"packed weights of {sorted(bits)} bits are not supported")
        self._block = _block(fields, weights)
        kinds = {f"W{weight.get('num_bits', 8)}" for weight in weights}
        inputs = [group.get("input_activations") for group in groups]
        # The kernels round activations per row, as checkpoints with dynamic activations expect.
        self._rounds_activations = bool(inputs) and all(
            isinstance(each, dict) and each.get("num_bits") == 8 and each.get("type") != "float"
            for each in inputs
        )
        acts = {f"A{each['num_bits']}" for each in inputs if isinstance(each, dict)} or {"A16"}
        floats = " FP8" if any(weight.get("type") == "float" for weight in weights) else ""
        self.label = f"compressed-tensors {'/'.join(sorted(kinds))}{'/'.join(sorted(acts))}{floats}"

    def gather(self, stored: Stored) -> dict[str, QuantizedTensor]:
        found, entries = {}, stored.entries
        for stem in _stems(entries, ".weight_packed"):
            found[f"{stem}.weight"] = self._packed(stem, stored)
        for stem in _stems(entries, ".weight"):
            if f"{stem}.weight_scale" in entries:
                found[f"{stem}.weight"] = self._plain(stem, entries)
        return found

    def _packed(self, stem: str, stored: Stored) -> QuantizedTensor:
        entries = stored.entries
        roles = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
        parts = _roles(stem, entries, roles, 2)
        outputs, words = _matrix(entries, parts["weight_packed"])
        bits, inputs = self._bits, words * 32 // self._bits
        # Each group of layers may have its own number of bits.
        if f"{stem}.weight_shape" in entries:
            rows, inputs = (int(n) for n in stored.read(f"{stem}.weight_shape"))
            fitting = [each for each in (2, 4, 8) if words == -(-inputs * each // 32)]
            if rows != outputs or not fitting:
                raise ValueError(f"{stem}: its weight_shape does not fit its values")
            bits = fitting[0]
        scales = _matrix(entries, parts["weight_scale"])
        if scales[0] != outputs:
            raise ValueError(f"{stem}: its scales do not fit its values")
        if "weight_g_idx" not in parts:
            _group_count(inputs, scales[1], stem)

        def value(tensors: Parts) -> Tensor | QuantizedWeight:
            numbers = unpack(tensors["weight_packed"], bits)[:, :inputs].short() - 2 ** (bits - 1)
            zeros = _zero_points(tensors, bits, outputs)
            group_of = tensors.get("weight_g_idx")
            if group_of is not None and int(group_of.min()) >= 0:
                return _by_column(numbers, zeros, tensors["weight_scale"], group_of)
            if bits == 4:
                return _four_bits(numbers, zeros, tensors["weight_scale"], below=8)
            return _by_group(numbers, zeros, tensors["weight_scale"])

        return QuantizedTensor((outputs, inputs), parts, value)

    def _plain(self, stem: str, entries: Entries) -> QuantizedTensor:
        parts = _roles(stem, entries, ("weight", "weight_scale", "weight_zero_point"), 2)
        name = parts["weight"]
        if entries[name].dtype not in ("I8", *_FLOAT8):
            raise ValueError(f"{name} has a scale, but dtype {entries[name].dtype}")
        rows, columns = _matrix(entries, name)
        block = _block_of(entries[parts["weight_scale"]].shape, (rows, columns), self._block, name)

        is_by_row = self._rounds_activations and block == (1, columns)

        def value(tensors: Parts) -> Tensor | QuantizedWeight:
            zeros = tensors.get("weight_zero_point")
            if is_by_row and zeros is None and tensors["weight"].dtype == torch.int8:
                scale = tensors["weight_scale"].float().flatten()
                return UnpackedWeight("int8", tensors["weight"], scale)
            values = tensors["weight"].float()
            if zeros is not None:
                values -= _spread(zeros.float(), block, (rows, columns))
            return _by_block(values, tensors["weight_scale"], block)

        return QuantizedTensor((rows, columns), parts, value)


def _zero_points(parts: Parts, bits: int, outputs: int) -> Tensor | None:
    zeros = parts.get("weight_zero_point")
    if zeros is None or zeros.dtype != torch.int32:
        return zeros
    columns: Tensor = unpack(zeros.T, bits).T[:outputs].short()  # zeros are packed along outputs
    return columns.sub_(2 ** (bits - 1))


def _spread(numbers: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    if numbers.numel() == 1:
        return numbers.reshape(())
    grid = numbers.unsqueeze(1) if numbers.dim() == 1 else numbers
    wide = grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def _block(fields: Fields, weights: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Return the rows and columns that share one scale; None if the config does not say."""
    sizes = [fields.values.get("weight_block_size")]
    sizes += [weight.get("block_structure") for weight in weights]
    for size in sizes:
        if isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) for n in size):
            return size[0], size[1]
    return None


def _block_of(
    scale: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int] | None, name: str
) -> tuple[int, int]:
    """Return the rows and columns of a matrix that share one scale."""
    rows, columns = shape[-2:]
    if all(n == 1 for n in scale):
        return rows, columns
    if scale in ((rows,), (rows, 1)):
        return 1, columns
    if len(scale) == len(shape) and scale[:-2] == shape[:-2]:
        grid = scale[-2:]
        if block is not None and grid == (-(-rows // block[0]), -(-columns // block[1])):
            return block
        if rows % grid[0] == 0 and columns % grid[1] == 0:
            return rows // grid[0], columns // grid[1]
    raise ValueError(f"{name}: scales of shape {list(scale)} do not fit its {list(shape)}")


# -- FP8, MXFP4, bitsandbytes ---------------------------------------------------------------------


class _Fp8:
    """FP8: 8-bit floats with a scale per tensor, row or block."""

    def __init__(self, fields: Fields) -> None:
        self._block = _block(fields, [])
        self.label = "FP8" if self._block is None else f"FP8, blocks of {self._block[0]}"
        if self._block is not None and self._block[0] != self._block[1]:
            self.label += f" x {self._block[1]}"

    def gather(self, stored: Stored) -> dict[str, QuantizedTensor]:
        found, entries = {}, stored.entries
        for name, entry in entries.items():
            if entry.dtype not in _FLOAT8:
                continue
            scale = next((n for n in self._scale_names(name) if n in entries), None)
            if scale is None:
                raise ValueError(f"{name} has no scale")
            block = _block_of(entries[scale].shape, entry.shape, self._block, name)
            parts = {"weight": name, "scale": scale}
            found[name] = QuantizedTensor(entry.shape, parts, self._with(block))
        return found

    @staticmethod
    def _scale_names(name: str) -> tuple[str, ...]:
        stem = name.removesuffix(".weight")
        return (f"{name}_scale_inv", f"{name}_scale", f"{stem}.scale")

    @staticmethod
    def _with(block: tuple[int, int]) -> Callable[[Parts], Tensor]:
        return lambda parts: _by_block(parts["weight"], parts["scale"], block)


class _Mxfp4:
    """MXFP4, for gpt-oss's experts: pairs of E2M1 numbers, and a power of two per 32 numbers."""

    label = "MXFP4"

    def __init__(self, fields: Fields) -> None:
        del fields

    def gather(self, stored: Stored) -> dict[str, QuantizedTensor]:
        found, entries = {}, stored.entries
        for stem in _stems(entries, "_blocks"):
            blocks, scales = f"{stem}_blocks", f"{stem}_scales"
            if scales not in entries:
                raise ValueError(f"{blocks} has no scales")
            *rows, groups, octets = entries[blocks].shape
            if entries[scales].shape != (*rows, groups) or octets != 16 or len(rows) != 2:
                raise ValueError(f"{stem}: its scales do not fit its blocks")
            shape = (rows[0], groups * 32, rows[1])
            parts = {"blocks": blocks, "scales": scales}
            found[stem] = QuantizedTensor(shape, parts, self._value)
        return found

    @staticmethod
    def _value(parts: Parts) -> QuantizedStack:
        """Return the experts [out, in] of blocks [experts, out, groups, 16]."""
        blocks, scales = parts["blocks"], parts["scales"]

        def one(index: int) -> QuantizedWeight:
            numbers = nibble_pairs(blocks[index]).flatten(1).view(torch.int8)
            return UnpackedWeight("mxfp4", numbers, half_of_power(scales[index]))

        return QuantizedStack(len(blocks), one)


class _BitsAndBytes:
    """bitsandbytes: bytes with a scale per row, or 4-bit indices of 16 numbers, scaled by block."""

    _STATE = ".weight.quant_state.bitsandbytes__"

    def __init__(self, fields: Fields) -> None:
        self.label = "bitsandbytes, 8 bits"
        if fields.flag("load_in_4bit", False):
            self.label = f"bitsandbytes, {fields.text('bnb_4bit_quant_type', 'fp4')}"

    def gather(self, stored: Stored) -> dict[str, QuantizedTensor]:
        found, entries = {}, stored.entries
        for name in entries:
            stem, is_state, _ = name.partition(self._STATE)
            if is_state:
                found[f"{stem}.weight"] = self._four_bits(stem, name, stored)
        for stem in _stems(entries, ".SCB"):
            parts = _roles(stem, entries, ("weight", "SCB"), 2)
            shape = _matrix(entries, parts["weight"])
            if entries[parts["SCB"]].shape != (shape[0],):
                raise ValueError(f"{stem}: its scales do not fit its values")
            if f"{stem}.weight_format" in entries:
                parts["weight_format"] = f"{stem}.weight_format"
            found[f"{stem}.weight"] = QuantizedTensor(shape, parts, self._eight_bits)
        return found

    @staticmethod
    def _eight_bits(parts: Parts) -> Tensor:
        if int(parts.get("weight_format", torch.zeros(1)).max()):
            raise ModelLoadError("bitsandbytes: only weights of format row are supported")
        return parts["weight"].float() * parts["SCB"].float().unsqueeze(1) * (1 / 127)

    @staticmethod
    def _four_bits(stem: str, name: str, stored: Stored) -> QuantizedTensor:
        roles = ("weight", "weight.absmax", "weight.quant_map")
        nested = ("weight.nested_absmax", "weight.nested_quant_map")
        parts = _roles(stem, stored.entries, roles + nested, 3)
        parts["state"] = name
        state = json.loads(bytes(stored.read(name).tolist()))
        shape = tuple(int(n) for n in state["shape"])

        def value(tensors: Parts) -> Tensor:
            octets = tensors["weight"].flatten()
            # The high nibble comes first.
            numbers = torch.stack((octets >> 4, octets & 15), dim=1).flatten()
            scale = tensors["weight.absmax"]
            if "weight.nested_absmax" in tensors:
                steps = tensors["weight.nested_quant_map"].float()[scale.long()]
                by_block = tensors["weight.nested_absmax"].float()
                spread = by_block.repeat_interleave(int(state["nested_blocksize"]))[: len(steps)]
                scale = steps * spread + float(state["nested_offset"])
            spread = scale.float().repeat_interleave(int(state["blocksize"]))[: len(numbers)]
            values = tensors["weight.quant_map"].float()[numbers.long()] * spread
            return values[: shape[0] * shape[1]].view(shape)

        return QuantizedTensor(shape, parts, value)


_METHODS: dict[str, Callable[[Fields], Scheme]] = {
    "awq": _Awq,
    "gptq": _Gptq,
    "compressed-tensors": _CompressedTensors,
    "fp8": _Fp8,
    "fbgemm-fp8": _Fp8,
    "mxfp4": _Mxfp4,
    "bitsandbytes": _BitsAndBytes,
}
