"""load_decoder: from a checkpoint folder to a decoder with packed weights."""

from __future__ import annotations

import logging
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import ModelLoadError
from ..ops.backends import Backend, choose_ops
from ..ops.base import (
    DecoderWeights,
    Exactness,
    HeadLayout,
    HeadNorm,
    LayerWeights,
    Ops,
    PackedLinear,
)
from ..ops.device import choose_device
from ..ops.kv_pool import KvDtype
from ..ops.quantize import Quantize, QuantizedWeight, stack
from .checkpoint import Checkpoint, check_tensors, open_checkpoint
from .config import DecoderConfig, read_config
from .decoder import Decoder, head_layout
from .fields import UnsupportedConfig
from .fold import head_order, scaled
from .rope import rotary_dim
from .shapes import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix, tensor_shapes

logger = logging.getLogger(__name__)
LoadFormat: TypeAlias = Literal["auto", "random"]
ModelImpl: TypeAlias = Literal["auto", "own", "transformers"]
_Weight: TypeAlias = Tensor | QuantizedWeight
_Read: TypeAlias = Callable[[str], _Weight]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

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
    impl: ModelImpl = "auto",
) -> Decoder:
    """A decoder from a folder in Hugging Face layout or a GGUF file.

    ``dtype="auto"`` keeps the checkpoint's: weights that are stored quantised stay so where the
    backend has kernels for them (activations are bfloat16), and float16 is computed in float32 on
    the CPU, which holds every float16 value. Any other dtype holds all weights in that dtype.
    ``load_format="random"`` needs the config only and draws seeded weights of the real shapes; on
    a GPU, where they are drawn there, others than on the CPU. ``quantize`` packs every matrix of
    the layers and the output as int8 or int4, for the backends that compute so; ``kv_dtype`` is
    that of the pools to come. ``impl``: "own" takes the decoder of this engine, "transformers" the
    modules of transformers on our pages and kernels, "auto" the latter for models that the former
    does not compute. Raises `ModelLoadError` before memory is spent on weights.
    """
    device = choose_device(device)
    options = _Options(dtype, device, load_format, exact, backend, quantize, kv_dtype)
    if impl == "transformers":
        return _by_transformers(Path(path), options, "it was asked for")
    try:
        decoder = _own(path, options)
    except UnsupportedConfig as reason:
        if impl == "own":
            raise
        return _by_transformers(Path(path), options, str(reason))
    logger.info("%s: computed by its own decoder", decoder.config.model_type)
    return decoder


class _Options(NamedTuple):
    """As they are given to `load_decoder`."""

    dtype: str
    device: torch.device
    load_format: LoadFormat
    exact: Exactness
    backend: Backend
    quantize: Quantize
    kv_dtype: KvDtype

    def ops(self, dtype: torch.dtype, heads: HeadLayout | None) -> Ops:
        """The backend."""
        return choose_ops(
            self.device,
            exact=self.exact,
            backend=self.backend,
            dtype=dtype,
            heads=heads,
            quantize=self.quantize,
            kv_dtype=self.kv_dtype,
        )


def _by_transformers(path: Path, options: _Options, reason: str) -> Decoder:
    """A decoder of transformers' modules. Without it installed, the reason stands alone."""
    from .transformers_loader import load_text_model, read_text_model

    source = read_text_model(path)
    chosen = _choose_dtype(options.dtype, source.config.dtype, options.device)
    # Triton's samplers choose tokens on the device, which this path does not wait for.
    if options.device.type != "cpu":
        options = options._replace(backend="torch")
    ops = options.ops(chosen, None)
    plain = (
        ops if options.quantize == "none" else options._replace(quantize="none").ops(chosen, None)
    )
    decoder = load_text_model(
        source,
        ops,
        plain,
        dtype=chosen,
        device=options.device,
        is_random=options.load_format == "random",
    )
    bits = "the same bits in any batch" if decoder.exact else "bits that depend on the batch"
    logger.info(
        "%s: computed by transformers' modules on our pages and kernels, %s (%s)",
        source.config.model_type,
        bits,
        reason,
    )
    return decoder


def _own(path: str | Path, options: _Options) -> Decoder:
    """A decoder of this engine's. Raises `UnsupportedConfig` for a model that has none."""
    dtype, device, load_format, _, _, quantize, _ = options
    checkpoint = None if load_format == "random" else _checkpoint(path)
    config = read_config(path) if checkpoint is None else checkpoint.config
    stored = config.dtype if checkpoint is None else checkpoint.stored_dtype
    chosen = _choose_dtype(dtype, stored, device)
    ops = options.ops(chosen, head_layout(config))
    read = _random_reader(config, chosen, device) if checkpoint is None else checkpoint.read
    keeps_packed = dtype == "auto" and quantize == "none"
    return _Assembly(config, read, ops, chosen, device, keeps_packed=keeps_packed).decoder()


def _checkpoint(path: str | Path) -> Checkpoint:
    """The files of a checkpoint, which hold what the config implies."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    check_tensors(checkpoint, tensor_shapes(config), ignored=_ignored(config))
    return checkpoint


def _ignored(config: DecoderConfig) -> tuple[str, ...]:
    """Some tied checkpoints store the output matrix as well; the embedding stands for both."""
    return (LM_HEAD,) if config.tie_embeddings else ()


def _choose_dtype(requested: str, stored: str, device: torch.device) -> torch.dtype:
    on_cpu = device.type == "cpu"
    if requested == "auto":
        return torch.float32 if stored == "float16" and on_cpu else _DTYPES[stored]
    if requested not in _DTYPES:
        raise ModelLoadError(f"dtype {requested!r} is not one of auto, {', '.join(_DTYPES)}")
    if requested == "float16" and on_cpu:
        raise ModelLoadError("float16 is not supported on the CPU; use bfloat16 or float32")
    return _DTYPES[requested]


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


def _progress(layers: range) -> Iterable[int]:
    """A progress bar on a terminal, nothing in logs and pipes."""
    if not sys.stderr.isatty():
        return layers
    from tqdm import tqdm  # type: ignore[import-untyped]

    bar: Iterable[int] = tqdm(layers, desc="loading", unit="layer", leave=False)
    return bar


def _qkv_order(config: DecoderConfig, device: torch.device) -> Tensor | None:
    """The rows of Q, K and V in the kernels' order; None where it is the family's own."""
    head_dim, turning = config.head_dim, rotary_dim(config.rope, config.head_dim)
    if turning == head_dim and not config.fold.interleaved:
        return None
    head = head_order(head_dim, turning, interleaved=config.fold.interleaved)
    rows = torch.arange((config.num_heads + 2 * config.num_kv_heads) * head_dim).view(-1, head_dim)
    turned = config.num_heads + config.num_kv_heads
    return torch.cat((rows[:turned][:, head], rows[turned:])).flatten().to(device)


class _Assembly:
    """Reads, casts and packs layer by layer, so that at most one layer exists twice.

    ``keeps_packed``: quantised weights stay as they are stored where the ops have kernels for them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        read: _Read,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_packed: bool,
    ) -> None:
        self._config, self._read, self._ops = config, read, ops
        self._dtype, self._device = dtype, device
        self._kept = ops.stored_kinds if keeps_packed else frozenset()
        self._qkv_order = _qkv_order(config, device)

    def decoder(self) -> Decoder:
        """The whole model."""
        config, fold = self._config, self._config.fold
        embedding = self._read(EMBEDDING)
        table = self._cast(embedding)
        is_tied = config.tie_embeddings
        lm_head = embedding if is_tied else self._read(LM_HEAD)
        if not self._keeps(lm_head) or fold.logit_scale != 1.0:
            lm_head = table if is_tied else self._cast(lm_head)
            lm_head = scaled(lm_head, fold.logit_scale)
        weights = DecoderWeights(
            embedding=scaled(table, fold.embed_scale),
            layers=tuple(self._layer(i) for i in _progress(range(config.num_layers))),
            final_norm=self._vector(FINAL_NORM),
            lm_head=self._ops.pack_linear(lm_head),
            norm_eps=config.norm_eps,
        )
        return Decoder(config, weights, self._ops)

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, layer_prefix(index)
        fold = config.fold
        qkv = ["qkv"] if fold.fused_qkv else ["q", "k", "v"]
        gate_up = ["gate_up"] if fold.fused_gate_up else ["gate", "up"]
        return LayerWeights(
            input_norm=self._vector(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(
                [f"{prefix}self_attn.{n}_proj" for n in qkv],
                bias=config.qkv_bias,
                order=self._qkv_order,
            ),
            head_norm=self._head_norm(prefix) if config.qk_norm else None,
            o=self._linear(
                [f"{prefix}self_attn.o_proj"], bias=config.o_bias, factor=fold.residual_scale
            ),
            post_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear([f"{prefix}mlp.{n}_proj" for n in gate_up], bias=config.mlp_bias),
            down=self._linear(
                [f"{prefix}mlp.down_proj"], bias=config.mlp_bias, factor=fold.residual_scale
            ),
            window=config.windows[index],
        )

    def _linear(
        self, names: list[str], *, bias: bool, order: Tensor | None = None, factor: float = 1.0
    ) -> PackedLinear:
        """Matrices stacked into one, so that one call reads the input once.

        ``order``: of the rows, where the family has another one than the kernels.
        """
        stacked = torch.cat([self._vector(f"{name}.bias") for name in names]) if bias else None
        weight = self._stacked(
            [self._read(f"{name}.weight") for name in names], keeps=factor == 1.0
        )
        if isinstance(weight, Tensor):
            weight = scaled(weight, factor)
        if stacked is not None:
            stacked = scaled(stacked, factor)
        if order is not None:
            weight = weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]
            stacked = None if stacked is None else stacked[order]
        return self._ops.pack_linear(weight, stacked)

    def _stacked(self, weights: list[_Weight], *, keeps: bool) -> _Weight:
        """As they are stored if all are of one kind that is kept, else cast. A factor is rounded
        into plain weights alone: scales of 16 bits would lose more.
        """
        if not keeps:
            return torch.cat([self._cast(each) for each in weights])
        kept = [each for each in weights if isinstance(each, QuantizedWeight) and self._keeps(each)]
        joined = stack(kept) if len(kept) == len(weights) else None
        return joined or torch.cat([self._cast(each) for each in weights])

    def _head_norm(self, prefix: str) -> HeadNorm:
        config = self._config
        q = self._vector(f"{prefix}self_attn.q_norm.weight").expand(config.num_heads, -1)
        k = self._vector(f"{prefix}self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
        return HeadNorm(torch.cat((q, k)).float(), config.norm_eps)

    def _keeps(self, weight: _Weight) -> bool:
        return isinstance(weight, QuantizedWeight) and weight.kind in self._kept

    def _vector(self, name: str) -> Tensor:
        return self._cast(self._read(name))

    def _cast(self, weight: _Weight) -> Tensor:
        # The bytes as they are stored go to the device and are cast there: in one call the host
        # would make a copy in the other dtype first.
        values = weight if isinstance(weight, Tensor) else weight.dequantize()
        return values.to(self._device).to(self._dtype)
