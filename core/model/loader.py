"""load_decoder: from a checkpoint folder to a decoder with packed weights."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..errors import ModelLoadError
from ..kv_pool import KvDtype
from ..ops import Backend, Quantize, choose_ops
from ..ops.base import Exactness, HeadNorm, Ops, PackedLinear
from ..ops.device import choose_device
from ..ops.weights import DecoderWeights, LayerWeights
from .checkpoint import Checkpoint
from .config import DecoderConfig, read_config
from .decoder import Decoder, head_layout
from .shapes import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix, tensor_shapes

LoadFormat: TypeAlias = Literal["auto", "random"]
_Read: TypeAlias = Callable[[str], Tensor]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Random weights of standard deviation 0.02 collapse to one repeated token; these factors keep
# attention from averaging everything and let the layers outweigh the embedding.
_RANDOM_STD = 0.02
_RANDOM_FACTORS = {"o_proj.weight": 0.2, "down_proj.weight": 8.0}


def load_decoder(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    exact: Exactness = "spec",
    backend: Backend = "torch",
    quantize: Quantize = "none",
    kv_dtype: KvDtype = "auto",
) -> Decoder:
    """A decoder from a folder in Hugging Face layout.

    ``dtype="auto"`` keeps the checkpoint's, but computes float16 in float32 on the CPU, which
    holds every float16 value. ``load_format="random"`` needs config.json only and draws seeded
    weights of the real shapes; on a GPU, where they are drawn there, others than on the CPU.
    ``quantize`` packs every matrix of the layers and the output as int8 or int4, for the backends
    that compute so; ``kv_dtype`` is that of the pools to come. Raises `ModelLoadError` before
    memory is spent on weights.
    """
    config = read_config(path)
    device = choose_device(device)
    checkpoint = None if load_format == "random" else _checkpoint(path, config)
    stored = config.dtype if checkpoint is None else _stored_dtype(checkpoint)
    chosen = _choose_dtype(dtype, stored, device)
    heads = head_layout(config)
    ops = choose_ops(
        device,
        exact=exact,
        backend=backend,
        dtype=chosen,
        heads=heads,
        quantize=quantize,
        kv_dtype=kv_dtype,
    )
    read = _random_reader(config, chosen, device) if checkpoint is None else checkpoint.read
    return _assemble(config, read, ops, chosen, device)


def _checkpoint(path: str | Path, config: DecoderConfig) -> Checkpoint:
    """The files of a folder, which hold what the config implies."""
    checkpoint = Checkpoint(Path(path))
    checkpoint.check(tensor_shapes(config), ignored=_ignored(config))
    return checkpoint


def _stored_dtype(checkpoint: Checkpoint) -> str:
    return _STORED[checkpoint.entries[EMBEDDING].dtype]


def _ignored(config: DecoderConfig) -> tuple[str, ...]:
    """Some tied checkpoints store the output matrix as well; the embedding stands for both."""
    return (LM_HEAD,) if config.tie_embeddings else ()


def _choose_dtype(asked: str, stored: str, device: torch.device) -> torch.dtype:
    on_cpu = device.type == "cpu"
    if asked == "auto":
        return torch.float32 if stored == "float16" and on_cpu else _DTYPES[stored]
    if asked not in _DTYPES:
        raise ModelLoadError(f"dtype {asked!r} is not one of auto, {', '.join(_DTYPES)}")
    if asked == "float16" and on_cpu:
        raise ModelLoadError("float16 is not supported on the CPU; use bfloat16 or float32")
    return _DTYPES[asked]


def _random_reader(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> _Read:
    """Seeded by name, so a tensor does not depend on which others were read.

    A CPU draws float32 whatever the dtype, so that all of them are roundings of the same weights.
    A GPU draws in place: billions of them would take a CPU minutes.
    """
    shapes = tensor_shapes(config)
    drawn = torch.float32 if device.type == "cpu" else dtype

    def read(name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name], dtype=drawn, device=device)
        factors = (f for suffix, f in _RANDOM_FACTORS.items() if name.endswith(suffix))
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shapes[name], generator=generator, dtype=drawn, device=device)
        return values.mul_(_RANDOM_STD * next(factors, 1.0))

    return read


def _assemble(
    config: DecoderConfig, read: _Read, ops: Ops, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Read, cast and pack layer by layer, so that at most one layer exists twice."""

    def cast(name: str) -> Tensor:
        # The bytes as they are stored go to the device and are cast there: in one call the host
        # would make a copy in the other dtype first.
        return read(name).to(device).to(dtype)

    builder = _Builder(config, cast, ops)
    embedding = cast(EMBEDDING)
    lm_head = embedding if config.tie_embeddings else cast(LM_HEAD)
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(builder.layer(i) for i in _progress(range(config.num_layers))),
        final_norm=cast(FINAL_NORM),
        lm_head=ops.pack_linear(lm_head),
        norm_eps=config.norm_eps,
    )
    return Decoder(config, weights, ops)


def _progress(layers: range) -> Iterable[int]:
    """A progress bar on a terminal, nothing in logs and pipes."""
    if not sys.stderr.isatty():
        return layers
    from tqdm import tqdm  # type: ignore[import-untyped]

    bar: Iterable[int] = tqdm(layers, desc="loading", unit="layer", leave=False)
    return bar


class _Builder:
    """Packs the tensors of one layer."""

    def __init__(self, config: DecoderConfig, cast: _Read, ops: Ops) -> None:
        self._config = config
        self._cast = cast
        self._ops = ops

    def layer(self, index: int) -> LayerWeights:
        """The weights of one layer."""
        config, prefix = self._config, layer_prefix(index)
        qkv = [f"{prefix}self_attn.{n}_proj" for n in "qkv"]
        gate_up = [f"{prefix}mlp.{n}_proj" for n in ("gate", "up")]
        return LayerWeights(
            input_norm=self._cast(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(qkv, bias=config.qkv_bias),
            head_norm=self._head_norm(prefix) if config.qk_norm else None,
            o=self._linear([f"{prefix}self_attn.o_proj"], bias=config.o_bias),
            post_norm=self._cast(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(gate_up, bias=config.mlp_bias),
            down=self._linear([f"{prefix}mlp.down_proj"], bias=config.mlp_bias),
            window=config.windows[index],
        )

    def _linear(self, names: list[str], *, bias: bool) -> PackedLinear:
        """Matrices stacked into one, so that one call reads the input once."""
        weight = torch.cat([self._cast(f"{name}.weight") for name in names])
        stacked = torch.cat([self._cast(f"{name}.bias") for name in names]) if bias else None
        return self._ops.pack_linear(weight, stacked)

    def _head_norm(self, prefix: str) -> HeadNorm:
        config = self._config
        q = self._cast(f"{prefix}self_attn.q_norm.weight").expand(config.num_heads, -1)
        k = self._cast(f"{prefix}self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
        return HeadNorm(torch.cat((q, k)).float(), config.norm_eps)
