"""GGUF: one file with metadata, tokenizer and tensors, most of them quantised in blocks.

`GgufReader` parses the file, and the package ``gguf`` knows the quantised types. This module maps a
file to the fields of a config.json and to a `Checkpoint`. api/text builds the tokenizer from the
same file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ModelLoadError
from ...ops.blocks import BLOCK_TYPES, BlockWeight
from ...ops.quantize import QuantizedStack, QuantizedWeight, StoredWeight, stack
from .gguf_architectures import ARCHITECTURES, REFUSED, Architecture, architecture_of
from .gguf_metadata import Metadata, open_parts
from .gguf_names import LAYER_NAMES, MODEL_NAMES, NEXTN_NAMES, STACKED
from .gguf_reader import GgufTensor, unsupported_type

_MISFITS = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors that contradictory metadata cause."""
_ROPE_DIVISORS = "rope_freqs.weight"  # name of the tensor with llama3's divisor of each frequency
_NOT_WEIGHTS = (_ROPE_DIVISORS, "rope_factors_long.weight", "rope_factors_short.weight")
_PLAIN = {GgmlType.F32: "float32", GgmlType.F16: "float16", GgmlType.BF16: "bfloat16"}
_LAYER = re.compile(r"blk\.(\d+)\.")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias|scale))?")
# Names of parameters that have no ending, in transformers or in files.
_BARE = (
    "self_attn.sinks", "e_score_correction_bias", "layer_scalar", "router.scale",
    "per_expert_scale", "A_log", "dt_bias", "mamba.D", "expert_bias", "pre_ff_layernorm.weight",
)  # fmt: skip
_ROW = "moe_statics.e_score_correction_bias"  # a matrix of one row in transformers
_CONV = (
    "conv1d.weight",
    "conv.conv.weight",
)  # transformers stores an additional dimension of size 1
_LOG = ("linear_attn.A_log", "mamba.A_log")
_FLAT = ("mamba.A_log", "mamba.D", "mamba.norm.weight")  # Vectors that are matrices in the files.
_GATED_NORM = "linear_attn.norm.weight"  # This norm has no offset, unlike the others.


class _StoredTensor(NamedTuple):
    """A tensor of transformers: its shape, a function that reads it, and its names in the file."""

    shape: tuple[int, ...]
    read: Callable[[], StoredWeight]
    own_names: tuple[str, ...]


class GgufFile:
    """A GGUF file, presented as the checkpoint from which it was made.

    ``values`` are the fields of a config.json. Tensors are memory-mapped until they are read. Any
    part of a split file represents all of them. Raises `ModelLoadError` for a file that is damaged,
    not a model, or of an unsupported architecture or quantisation.
    """

    def __init__(self, file: Path) -> None:
        self.where = file
        self._parts = open_parts(file)
        self._tensors = {tensor.name: tensor for part in self._parts for tensor in part.tensors}
        self._meta = Metadata(self._parts[0])
        self._architecture = self._known_architecture()
        try:
            self.values = self._values()
            self._sources = self._find_sources()
        except _MISFITS as error:
            problem = f"its metadata contradict each other ({type(error).__name__}: {error})"
            raise ModelLoadError(f"{file} is damaged: {problem}") from error
        self._refuse_types()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in the file; unknown tensors keep their stored name."""
        known = {name: source.shape for name, source in self._sources.items()}
        used = {own for source in self._sources.values() for own in source.own_names}
        return known | {
            name: _shape(tensor)
            for name, tensor in self._tensors.items()
            if name not in used and name not in _NOT_WEIGHTS and not self._is_further(name)
        }

    @property
    def _has_further_layers(self) -> bool:
        """Whether files of the architecture may have MTP layers, which follow the last layer."""
        return NEXTN_NAMES.items() <= self._architecture.names.items()

    def _is_further(self, name: str) -> bool:
        """Whether a tensor belongs to an MTP layer, which follows the last layer."""
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) >= self.values["num_hidden_layers"]

    @property
    def stored_dtype(self) -> str:
        """Type of the first layer's MLP output matrix; bfloat16 if it is quantised."""
        names = ("blk.0.ffn_down.weight", "blk.0.ffn_down_exps.weight", "blk.0.ssm_out.weight")
        tensor = next((self._tensors[name] for name in names if name in self._tensors), None)
        return "bfloat16" if tensor is None else _PLAIN.get(tensor.tensor_type, "bfloat16")

    @property
    def divisors(self) -> tuple[float, ...]:
        """Divisors of RoPE's frequencies; empty if the file has none.

        They are also empty if they only mark dimensions without rotation.
        """
        is_proportional = "full_attention" in self.values["rope_parameters"]
        return () if is_proportional else tuple(self._meta.tensor(_ROPE_DIVISORS))

    @property
    def has_tiled_heads(self) -> bool:
        """Whether value head j reads key head ``j % num_key_heads``."""
        return self._architecture.has_tiled_heads

    @property
    def types(self) -> dict[str, int]:
        """Number of matrices by quantised type."""
        found: dict[str, int] = {}
        for tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                name = tensor.tensor_type.name
                found[name] = found.get(name, 0) + 1
        return found

    def read(self, name: str) -> StoredWeight:
        """Return a tensor as it is stored, or as float32 if no kernel supports its type."""
        return self._sources[name].read()

    def release(self) -> None:
        """Unmap the file pages read so far; tensors that are still in use map them again."""
        for part in self._parts:
            part.release()

    # -- config ---------------------------------------------------------------------------------

    def _refuse_types(self) -> None:
        """Raise `ModelLoadError` for tensors of an unreadable type."""
        kinds = {tensor.tensor_type for tensor in self._tensors.values()}
        for kind in kinds:
            if not _is_readable(kind):
                names = (each.name for each in self._tensors.values() if each.tensor_type == kind)
                raise unsupported_type(self.where, kind.name, names)

    def _known_architecture(self) -> Architecture:
        name = self._meta.architecture
        found = architecture_of(name, self._meta)
        if name in REFUSED:
            message = f"architecture {name!r} is not supported: {REFUSED[name]}"
            raise ModelLoadError(f"{self.where}: {message}; serve it with llama.cpp")
        if found is None:
            supported = ", ".join(sorted(ARCHITECTURES))
            message = f"architecture {name!r} is not supported; supported: {supported}"
            raise ModelLoadError(f"{self.where}: {message}; use the model's safetensors files")
        return found

    def _values(self) -> dict[str, Any]:
        meta = self._meta
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelLoadError(f"{self.where} lacks tensors: token_embd.weight")
        width, heads = meta.number("embedding_length"), meta.number("attention.head_count")
        head_dim = meta.optional("attention.key_length", width // max(1, heads))
        vocab_size = int(embedding.shape[1])
        num_blocks, num_tensors = meta.number("block_count"), len(self._tensors)
        if not isinstance(num_blocks, int) or not 1 <= num_blocks <= num_tensors:
            raise meta.error(f"block_count is {num_blocks}, but the file has {num_tensors} tensors")
        values = {
            "model_type": self._architecture.model_type,
            "vocab_size": vocab_size,
            "hidden_size": width,
            "intermediate_size": _first(meta.by_layer("feed_forward_length"))
            or meta.number("expert_feed_forward_length"),
            "num_hidden_layers": num_blocks - meta.optional("nextn_predict_layers", 0),
            "num_attention_heads": heads,
            "num_key_value_heads": _first(meta.by_layer("attention.head_count_kv")) or heads,
            "head_dim": head_dim,
            "max_position_embeddings": meta.number("context_length"),
            "rms_norm_eps": meta.optional("attention.layer_norm_rms_epsilon", 1e-5),
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "use_bias": "blk.0.attn_q.bias" in self._tensors,
            "use_qkv_bias": "blk.0.attn_q.bias" in self._tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": None,
            "eos_token_id": meta.end_tokens(),
            "pad_token_id": None,
            "dtype": self.stored_dtype,
        }
        if self._architecture.is_latent:
            head_dim = meta.number("rope.dimension_count")
        rope = self._rope(head_dim)
        values |= self._architecture.fields(meta)
        if "hidden_size_per_layer_input" in values:
            values["vocab_size_per_layer_input"] = vocab_size
        given = values.get("rope_parameters", {})
        if "full_attention" not in given:
            values["rope_parameters"] = rope | given
        return values

    def _rope(self, head_dim: int) -> dict[str, Any]:
        meta = self._meta
        rope: dict[str, Any] = {"rope_theta": meta.optional("rope.freq_base", 10000.0)}
        turning = meta.optional("rope.dimension_count", head_dim)
        if turning != head_dim:
            rope["partial_rotary_factor"] = turning / head_dim
            if not self._architecture.has_partial_rope:
                problem = f"rope.dimension_count {turning} of {head_dim} (partial_rotary_factor)"
                raise ModelLoadError(f"{self.where}: {problem} is not supported")
        kind = meta.optional("rope.scaling.type", "none")
        rope["rope_type"] = "default" if kind == "none" else kind
        if kind == "none":
            return rope
        rope["factor"] = meta.optional("rope.scaling.factor", 1.0)
        original = meta.optional("rope.scaling.original_context_length", 0)
        if original:
            rope["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            value = meta.optional(f"rope.scaling.yarn_{name}", None)
            if value is not None:
                rope[name] = value
        return rope

    # -- tensors --------------------------------------------------------------------------------

    def _find_sources(self) -> dict[str, _StoredTensor]:
        found: dict[str, _StoredTensor] = {}
        for own, tensor in self._tensors.items():
            layer = _LAYER_TENSOR.fullmatch(own)
            if layer is None:
                name = self._model_names().get(own)
                if name is not None:
                    found[name] = self._plain(name, tensor)
                continue
            number, leaf, ending = layer.groups()
            names = LAYER_NAMES | dict(self._architecture.names)
            target = names.get(leaf if ending != "scale" else f"{leaf}.scale")
            if target is None:
                continue
            if int(number) >= self.values["num_hidden_layers"] and not self._has_further_layers:
                continue
            name = f"model.layers.{number}.{target}"
            if "{}" in name:
                found |= self._experts(f"{name}.{ending}", tensor)
            elif target in STACKED or target.endswith(_BARE):
                found[name] = self._plain(name, tensor)
            elif ending is not None:
                found[f"{name}.{ending}"] = self._plain(f"{name}.{ending}", tensor)
        for layer_number in range(self.values["num_hidden_layers"]):
            if self._architecture.experts == "gpt_oss":
                found |= self._gpt_oss_experts(layer_number)
            elif self._architecture.experts == "granite":
                found |= self._granite_experts(layer_number)
        return found

    def _model_names(self) -> dict[str, str]:
        own, final = self._architecture.own_final_norm, self._architecture.final_norm
        more = {f"{own}.{ending}": f"{final}.{ending}" for ending in ("weight", "bias")}
        return MODEL_NAMES | more

    def _plain(self, name: str, tensor: GgufTensor) -> _StoredTensor:
        """Return the stored tensor that corresponds to transformers' tensor ``name``."""
        shape = _shape(tensor)
        if name.endswith(_ROW):  # A converter writes either the row or the matrix of such a tensor.
            shape = (1, math.prod(shape))
        elif name.endswith(_FLAT):
            shape = (math.prod(shape),)
        elif name.endswith(_CONV):
            shape = (shape[0], 1, *shape[1:])
        has_offset = name.endswith("norm.weight") and not name.endswith(_GATED_NORM)
        read = partial(
            _read_plain,
            tensor,
            shape,
            row_order=self._order_of(name),
            offset=self._architecture.norm_offset if has_offset else 0.0,
            is_log=name.endswith(_LOG),
        )
        return _StoredTensor(shape, read, (tensor.name,))

    def _order_of(self, name: str) -> Tensor | None:
        """Return the stored index of each row of queries or keys in transformers' order.

        For RoPE, some files store a head's rows in neighbouring pairs, and transformers stores them
        in halves. Returns None if the orders are the same.
        """
        fields = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        field = fields.get(name.split(".")[-2])
        if not self._architecture.has_paired_rows or field is None:
            return None
        heads, head_dim = int(self.values[field]), int(self.values["head_dim"])
        pairs = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
        return pairs.transpose(1, 2).reshape(-1)

    def _experts(self, name: str, tensor: GgufTensor) -> dict[str, _StoredTensor]:
        """Return each expert of a stacked tensor."""

        def read_one(index: int) -> Callable[[], StoredWeight]:
            return lambda: _value(tensor.data[index], tensor)

        count, *shape = _shape(tensor)
        return {
            name.format(index): _StoredTensor(tuple(shape), read_one(index), (tensor.name,))
            for index in range(count)
        }

    def _gpt_oss_experts(self, layer: int) -> dict[str, _StoredTensor]:
        """Return gpt-oss's experts as transformers stacks them.

        Rows of gate and up alternate, and matrices are transposed.
        """
        found = {}
        for ending in ("weight", "bias"):
            owns = [f"blk.{layer}.ffn_{part}_exps.{ending}" for part in ("gate", "up", "down")]
            if not all(own in self._tensors for own in owns):
                continue
            for name, parts in (("gate_up_proj", owns[:2]), ("down_proj", owns[2:])):
                suffix = "" if ending == "weight" else "_bias"
                count, rows, *columns = _shape(self._tensors[parts[0]])
                shape = (count, *columns, rows * len(parts))
                full_name = f"model.layers.{layer}.mlp.experts.{name}{suffix}"
                found[full_name] = _StoredTensor(shape, self._joined(parts), tuple(parts))
        return found

    def _granite_experts(self, layer: int) -> dict[str, _StoredTensor]:
        """Return Granite's experts: the gate's rows, then the rows of up, in one tensor."""
        owns = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
        if not all(own in self._tensors for own in owns):
            return {}
        found, prefix = {}, f"model.layers.{layer}.block_sparse_moe."
        for name, parts in (("input_linear", owns[:2]), ("output_linear", owns[2:])):
            tensors = [self._tensors[part] for part in parts]
            count, rows, columns = _shape(tensors[0])
            shape = (count, rows * len(parts), columns)
            found[f"{prefix}{name}.weight"] = _StoredTensor(
                shape, self._experts_reader(tensors), tuple(parts)
            )
        return found

    def _experts_reader(self, tensors: list[GgufTensor]) -> Callable[[], StoredWeight]:
        def read() -> StoredWeight:
            values = [_wide(_value(each.data, each)) for each in tensors]
            return torch.cat(values, dim=1)

        return read

    def _joined(self, parts: list[str]) -> Callable[[], StoredWeight]:
        tensors = [self._tensors[part] for part in parts]

        def one(index: int) -> QuantizedWeight:
            values = [_value(each.data[index], each) for each in tensors]
            joined = stack([each for each in values if isinstance(each, QuantizedWeight)])
            rows = torch.arange(joined.shape[0]).view(len(parts), -1)
            return joined.rows(rows.T.flatten())  # rows of gate and up alternate

        def read() -> StoredWeight:
            kinds = {each.tensor_type for each in tensors}
            if kinds <= set(BLOCK_TYPES) and len(kinds) == 1:
                return QuantizedStack(len(tensors[0].data), one)
            values = [_wide(_value(each.data, each)) for each in tensors]
            rows = torch.stack(values, dim=2).flatten(1, 2)  # rows of gate and up alternate
            return rows.transpose(1, 2).contiguous() if rows.dim() == 3 else rows

        return read


# -- tensors ------------------------------------------------------------------------------------


def _shape(tensor: GgufTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _read_plain(
    tensor: GgufTensor,
    shape: tuple[int, ...],
    *,
    row_order: Tensor | None,
    offset: float,
    is_log: bool,
) -> StoredWeight:
    """Read a tensor and undo the changes of llama.cpp's converter.

    ``row_order``: stored index of each row of the result; None: rows are in order. ``offset``:
    number that the converter added to each value. ``is_log``: the file stores -exp(value). Weights
    in blocks stay quantised, and have neither an offset nor a log.
    """
    if len(shape) == 3 and tensor.tensor_type in BLOCK_TYPES:
        return QuantizedStack(shape[0], partial(_read_matrix, tensor))
    value = _value(tensor.data, tensor)
    if isinstance(value, QuantizedWeight):
        return value if row_order is None else value.rows(row_order)
    if offset:
        value = value - offset
    value = value.view(shape)
    if is_log:
        value = torch.log(-value)
    return value if row_order is None else value[row_order]


def _read_matrix(tensor: GgufTensor, index: int) -> QuantizedWeight:
    """Read one matrix of a quantised stack, without dequantising it."""
    value = _value(tensor.data[index], tensor)
    assert isinstance(value, QuantizedWeight)
    return value


def _first(counts: list[int]) -> int:
    """Return the first nonzero item of ``counts``, which has one per layer; 0 without one."""
    return next((count for count in counts if count), 0)


def _wide(value: Tensor | QuantizedWeight) -> Tensor:
    return value if isinstance(value, Tensor) else value.dequantize()


def _is_readable(kind: GgmlType) -> bool:
    """Whether tensors of a type can be read: plain, in blocks, or with the package gguf."""
    if kind in BLOCK_TYPES or kind in _PLAIN:
        return True
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _value(data: NDArray[Any], tensor: GgufTensor) -> Tensor | QuantizedWeight:
    """Return the values of ``data``, which is the data of a tensor or of some of its rows."""
    kind = tensor.tensor_type
    if kind in BLOCK_TYPES and data.ndim == 2:
        return BlockWeight(BLOCK_TYPES[kind], (data,))
    if kind == GgmlType.BF16:
        return torch.from_numpy(data.copy()).view(torch.bfloat16)
    if kind in _PLAIN:
        return torch.from_numpy(data.copy())
    return torch.from_numpy(gguf.dequantize(data, kind))
