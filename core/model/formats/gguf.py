"""GGUF: one file with metadata, tokenizer and tensors, most of them quantised in blocks.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package ``gguf`` parses
it and knows the names and the quantised types; what is here maps a file to a `Checkpoint`. The
tokenizer is not this module's: api/text builds it from the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from gguf import GGUFValueType
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ModelLoadError
from ...ops.quantize import GROUP, QuantizedWeight
from ..config import DecoderConfig, parse_config
from ..fields import Fields
from ..rope import RopeSpec
from ..shapes import tensor_shapes

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # to model_type
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROPE_DIVISORS = "rope_freqs.weight"  # llama3's scaling, by frequency
_PLAIN = {GgmlType.F32: "float32", GgmlType.F16: "float16", GgmlType.BF16: "bfloat16"}


class GgufCheckpoint:
    """`Checkpoint` of a GGUF file. Tensors are memory-mapped until they are read.

    Raises `ModelLoadError` for a file that is damaged or of an architecture that is not supported.
    """

    def __init__(self, file: Path) -> None:
        self.where = file
        self._reader = _open(file)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._meta = _Metadata(self._reader, file)
        self.config = self._config()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor in the file, by the names of transformers where there is one."""
        return {
            self._names.get(name, name): tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
            if name != _ROPE_DIVISORS
        }

    @property
    def stored_dtype(self) -> str:
        """Of the output of the first layer's MLP; bfloat16 beside quantised matrices."""
        tensor = self._tensors.get("blk.0.ffn_down.weight")
        return "bfloat16" if tensor is None else _PLAIN.get(tensor.tensor_type, "bfloat16")

    def read(self, name: str) -> Tensor | QuantizedWeight:
        """One tensor as it is stored; of a quantised type that no kernel takes, as float32."""
        own_name = self._own_names[name]
        tensor = self._tensors[own_name]
        rows = self._order_of(name)
        value = _value(tensor, self.where)
        if rows is None:
            return value
        return value[rows] if isinstance(value, Tensor) else value.rows(rows)

    def _order_of(self, name: str) -> Tensor | None:
        """The rows of a Llama's queries and keys lie in turned pairs there, here in halves."""
        config = self.config
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if config.model_type != "llama" or heads is None:
            return None
        half = config.head_dim // 2
        pairs = torch.arange(heads * config.head_dim).view(heads, half, 2)
        return pairs.transpose(1, 2).reshape(-1)

    @cached_property
    def _names(self) -> dict[str, str]:
        """From the file's names of tensors to those of transformers."""
        return {own: name for name, own in self._own_names.items()}

    @cached_property
    def _own_names(self) -> dict[str, str]:
        """From the names of transformers to the file's; tensors that the file lacks included."""
        arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == self._meta.architecture)
        table = gguf.get_tensor_name_map(arch, self.config.num_layers)
        names = {}
        for name in tensor_shapes(replace(self.config, tie_embeddings=False)):
            own = table.get_name(name, try_suffixes=(".weight", ".bias"))
            if own is not None:
                names[name] = own
        return names

    # -- config ---------------------------------------------------------------------------------

    def _config(self) -> DecoderConfig:
        meta = self._meta
        model_type = ARCHITECTURES.get(meta.architecture)
        if model_type is None:
            supported = ", ".join(sorted(ARCHITECTURES))
            message = f"architecture {meta.architecture!r} is not supported; {supported} are"
            raise ModelLoadError(f"{self.where}: {message}")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelLoadError(f"{self.where} lacks tensors: token_embd.weight")
        width, heads = meta.number("embedding_length"), meta.number("attention.head_count")
        head_dim = meta.optional("attention.key_length", width // max(1, heads))
        turning = meta.optional("rope.dimension_count", head_dim)
        values = {
            "model_type": model_type,
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": width,
            "intermediate_size": meta.number("feed_forward_length"),
            "num_hidden_layers": meta.number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": meta.optional("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": meta.number("context_length"),
            "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "eos_token_id": meta.end_tokens(),
            "rope_parameters": self._rope(),
            "partial_rotary_factor": turning / head_dim,
            "dtype": self.stored_dtype,
        }
        config = parse_config(Fields(values, str(self.where)))
        return replace(config, rope=self._with_divisors(config.rope))

    def _rope(self) -> dict[str, Any]:
        meta = self._meta
        rope: dict[str, Any] = {"rope_theta": meta.optional("rope.freq_base", 10000.0)}
        kind = meta.optional("rope.scaling.type", "none")
        if kind == "none":
            return rope
        rope |= {"rope_type": kind, "factor": meta.optional("rope.scaling.factor", 1.0)}
        original = meta.optional("rope.scaling.original_context_length", 0)
        if original:
            rope["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            rope[name] = meta.optional(f"rope.scaling.yarn_{name}", None)
        return rope

    def _with_divisors(self, rope: RopeSpec) -> RopeSpec:
        tensor = self._tensors.get(_ROPE_DIVISORS)
        if tensor is None:
            return rope
        return replace(rope, divisors=tuple(float(each) for each in tensor.data.tolist()))


def read_text(file: Path, name: str) -> str:
    """A text of the metadata, "" where the file has none. Raises `ModelLoadError`."""
    field = _open(file).fields.get(name)
    return "" if field is None else str(field.contents())


# -- metadata -----------------------------------------------------------------------------------


class _Reader(gguf.GGUFReader):
    """Passes over arrays, whose items become an object each: a vocabulary would take seconds."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_item, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, size = GGUFValueType(raw_item[0]), 12
        if item == GGUFValueType.STRING:
            data, at = self.data.data, orig_offs + size
            for _ in range(int(count[0])):
                at += 8 + int.from_bytes(data[at : at + 8], "little")
            size = at - orig_offs
        elif item in self.gguf_scalar_to_np:
            size += int(count[0]) * np.dtype(self.gguf_scalar_to_np[item]).itemsize
        else:
            raise ValueError(f"an array of {item.name} is not supported")
        return size, [raw_item, count], [], [GGUFValueType.ARRAY, item]


def _open(file: Path) -> gguf.GGUFReader:
    try:
        return _Reader(file)
    except FileNotFoundError:
        raise ModelLoadError(f"{file}: no such file") from None
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ModelLoadError(f"{file} is damaged: {error}") from error


class _Metadata:
    """Fields by name without the architecture's prefix, every surprise a `ModelLoadError`."""

    def __init__(self, reader: gguf.GGUFReader, file: Path) -> None:
        self._reader, self._file = reader, file
        self.architecture = str(self._get("general.architecture", str))

    def number(self, name: str) -> Any:  # noqa: ANN401 - an int or a float, as the file has it
        """A required number."""
        return self._get(f"{self.architecture}.{name}", (int, float))

    def optional(self, name: str, default: Any) -> Any:  # noqa: ANN401
        """The same, or text, where the file has it."""
        name = f"{self.architecture}.{name}"
        return self._get(name, (int, float, str)) if name in self._reader.fields else default

    def end_tokens(self) -> list[int]:
        """Tokens that end an answer."""
        names = (f"tokenizer.ggml.{name}" for name in _END_TOKENS)
        return [self._get(name, int) for name in names if name in self._reader.fields]

    def _get(self, name: str, kinds: type | tuple[type, ...]) -> Any:  # noqa: ANN401
        field = self._reader.fields.get(name)
        if field is None:
            raise ModelLoadError(f"{self._file}: {name} is missing")
        value = field.contents() if field.types[0] != GGUFValueType.ARRAY else None
        if not isinstance(value, kinds):
            raise ModelLoadError(f"{self._file}: {name} has an unexpected type")
        return value


# -- tensors ------------------------------------------------------------------------------------


def _value(tensor: gguf.ReaderTensor, file: Path) -> Tensor | QuantizedWeight:
    kind = tensor.tensor_type
    if kind in _KEPT:
        return _KEPT[kind](tensor.data.copy())  # what is mapped cannot be written
    if kind == GgmlType.BF16:
        return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16)
    if kind in _PLAIN:
        return torch.from_numpy(tensor.data.copy())
    try:
        return torch.from_numpy(gguf.dequantize(tensor.data, kind))
    except NotImplementedError:
        message = f"{tensor.name} has the type {kind.name}, which is not supported"
        raise ModelLoadError(f"{file}: {message}") from None


def _blocks(data: NDArray[np.uint8], num_bytes: int) -> Tensor:
    """Rows of blocks ``[rows, blocks, num_bytes]`` of their bytes."""
    return torch.from_numpy(data).view(len(data), -1, num_bytes)


def _numbers(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block, ``[rows, blocks]``."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(blocks: Tensor) -> Tensor:
    """The low halves of 16 bytes, then the high ones: ``[rows, 32 * blocks]`` of 0 to 15."""
    values = torch.cat((blocks & 15, blocks >> 4), dim=2)
    return values.view(torch.int8).view(len(blocks), -1)


def _q4_0(data: NDArray[np.uint8]) -> QuantizedWeight:
    """``d * (n - 8)`` is ``d * n - 8 * d``, and exact as such in float16."""
    blocks = _blocks(data, 2 + GROUP // 2)
    scale = _numbers(blocks, 0)
    return QuantizedWeight("int4_min", _nibbles(blocks[:, :, 2:]), scale, -8 * scale)


def _q4_1(data: NDArray[np.uint8]) -> QuantizedWeight:
    blocks = _blocks(data, 4 + GROUP // 2)
    values = _nibbles(blocks[:, :, 4:])
    return QuantizedWeight("int4_min", values, _numbers(blocks, 0), _numbers(blocks, 2))


def _q8_0(data: NDArray[np.uint8]) -> QuantizedWeight:
    blocks = _blocks(data, 2 + GROUP)
    values = blocks[:, :, 2:].contiguous().view(torch.int8).view(len(data), -1)
    return QuantizedWeight("int8_group", values, _numbers(blocks, 0))


# Types whose values and scales are kept as they are.
_KEPT: dict[GgmlType, Callable[[NDArray[np.uint8]], QuantizedWeight]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q8_0: _q8_0,
}
