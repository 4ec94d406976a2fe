"""load_decoder: load a decoder with packed weights from a checkpoint."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import ModelLoadError
from ..interface.kv_codec import KvDtype
from ..ops.backends import Backend, choose_ops
from ..ops.base import Exactness, Ops
from ..ops.machine.device import choose_device
from ..ops.parallel import Comm
from ..ops.quantize import Quantize
from ..ops.weights import HeadLayout
from ..startup import WeightReader, timed
from .decoder import Decoder, OwnDecoder
from .description.config import (
    DecoderConfig,
)
from .description.fields import UnsupportedConfig
from .description.page_layout import PageLayout
from .description.tensors import DELTA, MAMBA
from .formats.checkpoint import OnRead, Read, observed
from .opening import open_model, read_config
from .sharding import check_shards, read_others, shard_config, shard_reader
from .weights.assembly import Assembly
from .weights.layer import tensor_shapes

logger = logging.getLogger(__name__)
LoadFormat: TypeAlias = Literal["auto", "random"]
ModelImpl: TypeAlias = Literal["auto", "own", "transformers"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Random weights of standard deviation 0.02 collapse to one repeated token. These factors keep
# attention from averaging everything, and let the layers outweigh the embedding.
_RANDOM_STD = 0.02
_RANDOM_FACTORS = {
    "o_proj.weight": 0.2,
    "out_proj.weight": 0.2,
    "down_proj.weight": 8.0,
    "conv1d.weight": 25.0,
    "conv.conv.weight": 25.0,
    "A_log": 100.0,  # states then decay by factors of about e**-0.01 to e**-10 per token
}


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
    on_read: OnRead | None = None,
    comm: Comm | None = None,
) -> Decoder:
    """Load a decoder from a folder in Hugging Face layout or a GGUF file.

    ``dtype="auto"`` keeps the checkpoint's dtype: quantised weights stay as they are stored if the
    backend has kernels for them (activations are bfloat16), and the CPU computes float16 in
    float32, which holds every float16 value. Any other dtype converts all weights to it.

    ``load_format="random"`` needs only the config and draws seeded weights of the real shapes. A
    GPU draws them itself, so they differ from a CPU's. ``quantize`` packs every matrix of the
    layers and of the output as int8 or int4, if the backend supports it. ``kv_dtype``: dtype of
    pools to be made.

    ``impl``: "own" selects this engine's decoder, "transformers" transformers' modules over this
    engine's pages and kernels, and "auto" the latter only for models that the former does not
    support. ``on_read`` is called with every tensor read from files, also with tensors of other
    ranks' shards. ``comm`` connects the ranks of a model, each with its shard of the weights; only
    rank 0 has the output matrix. Raises `ModelLoadError` before memory is spent on weights, and
    `InvalidRequest` for a model that ranks cannot share.
    """
    device = choose_device(device)
    options = _Options(
        dtype, device, load_format, exact, backend, quantize, kv_dtype, on_read, comm
    )
    if impl == "transformers":
        return _by_transformers(Path(path), options, "--model-impl transformers")
    try:
        decoder = _own(path, options)
    except UnsupportedConfig as reason:
        if impl == "own" or comm is not None:
            raise
        return _by_transformers(Path(path), options, str(reason))
    logger.info("%s: computed by foretoken's decoder", decoder.config.model_type)
    return decoder


class _Options(NamedTuple):
    """Options of `load_decoder`."""

    dtype: str
    device: torch.device
    load_format: LoadFormat
    exact: Exactness
    backend: Backend
    quantize: Quantize
    kv_dtype: KvDtype
    on_read: OnRead | None
    comm: Comm | None

    def ops(self, dtype: torch.dtype, heads: Sequence[HeadLayout]) -> Ops:
        """Return the backend's operations. ``heads``: head layouts of the parts of the pool."""
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
    """Return a decoder of transformers' modules. ``reason``: why it is used, for the log."""
    # Not at the top: transformers takes a second to import.
    from .fallback.transformers_loader import load_text_model, read_text_model

    source = read_text_model(path, has_weights=options.load_format != "random")
    chosen = _choose_dtype(options.dtype, source.config.dtype, options.device)
    # Triton's samplers choose tokens on the device, which this path does not wait for.
    if options.device.type != "cpu":
        options = options._replace(backend="torch")
    ops = options.ops(chosen, ())
    plain = ops if options.quantize == "none" else options._replace(quantize="none").ops(chosen, ())
    decoder = load_text_model(
        source,
        ops,
        plain,
        dtype=chosen,
        device=options.device,
        on_read=options.on_read,
    )
    bits = "the same bits in any batch" if decoder.exact else "bits that depend on the batch"
    if decoder.states:
        rows = "" if decoder.takes_chunks else ", and one token at a time after a state"
        bits += f", one sequence at a time{rows}"
    logger.info(
        "%s: computed by transformers' modules on foretoken's KV pages and kernels, with %s (%s)",
        source.config.model_type,
        bits,
        reason,
    )
    return decoder


def _own(path: str | Path, options: _Options) -> OwnDecoder:
    """Return this engine's decoder.

    Raises `UnsupportedConfig` for a model that it does not support.
    """
    dtype, device, load_format, _, _, quantize, _, on_read, comm = options
    if load_format == "random":
        config = read_config(path)
        chosen = _choose_dtype(dtype, config.dtype, device)
        reader, read = WeightReader({}), _random_reader(config, chosen, device)
    else:
        with timed("  config and headers"):
            config, checkpoint = open_model(path)
        chosen = _choose_dtype(dtype, checkpoint.stored_dtype, device)
        reader = WeightReader(checkpoint.shapes)
        read = reader.counted(checkpoint.read)
        if on_read is not None:
            read = observed(read, on_read)
    shard = config
    if comm is not None:
        check_shards(config, comm.size)
        shard = shard_config(config, comm, None if load_format == "random" else checkpoint.read)
        read = shard_reader(read, config, shard, comm)
    release = (lambda: None) if load_format == "random" else checkpoint.release
    layout = PageLayout.of(shard)
    if config.latent is not None and options.kv_dtype != "auto":
        raise ModelLoadError(
            f"kv_cache_dtype {options.kv_dtype} is not supported for {config.model_type}, which "
            "keeps latents instead of keys and values; use auto"
        )
    ops = options.ops(chosen, [part.heads for part in layout.parts])
    keeps_packed = dtype == "auto" and quantize == "none"
    assembly = Assembly(
        shard, read, ops, chosen, device, keeps_packed=keeps_packed, comm=comm, release=release
    )
    with reader.timed():
        weights = assembly.weights()
    if on_read is not None and load_format != "random":
        read_others(observed(checkpoint.read, on_read), shard)
    return OwnDecoder(
        config, weights, ops, layout, linear_specs=assembly.linear_specs, compiles=comm is None
    )


def _choose_dtype(requested: str, stored: str, device: torch.device) -> torch.dtype:
    on_cpu = device.type == "cpu"
    if requested == "auto":
        return torch.float32 if stored == "float16" and on_cpu else _DTYPES[stored]
    if requested not in _DTYPES:
        raise ModelLoadError(f"dtype {requested!r} is not one of auto, {', '.join(_DTYPES)}")
    if requested == "float16" and on_cpu:
        raise ModelLoadError("float16 is not supported on the CPU; use bfloat16 or float32")
    return _DTYPES[requested]


def _random_reader(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Read:
    """Return a reader of random tensors, seeded by name, so the order of reads does not matter.

    A CPU always draws float32, so that every dtype is a rounding of the same weights. A GPU draws
    in place: a CPU would take minutes for billions of weights.
    """
    shapes = tensor_shapes(config)
    drawn = torch.float32 if device.type == "cpu" else dtype

    def read(name: str) -> Tensor:
        if name.endswith("norm.weight"):
            ones = torch.ones(shapes[name], dtype=drawn, device=device)
            is_gated = name.endswith((f"{DELTA}norm.weight", f"{MAMBA}norm.weight"))
            return ones if is_gated else ones - config.fold.norm_offset
        factors = (f for suffix, f in _RANDOM_FACTORS.items() if name.endswith(suffix))
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shapes[name], generator=generator, dtype=drawn, device=device)
        return values.mul_(_RANDOM_STD * next(factors, 1.0))

    return read
