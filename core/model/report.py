"""Report of a checkpoint's model, memory and backend: from its headers, without weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from ..errors import ModelLoadError
from ..ops.kv_pool import KvShape, bytes_per_mixed_page
from ..ops.quantize import Quantize
from ..ops.state_pool import bytes_per_slot
from .description.config import DecoderConfig
from .description.fields import Fields, UnsupportedConfig, read_json
from .description.page_layout import PageLayout
from .description.tensors import EMBEDDING
from .drafting.mtp import count_mtp_layers
from .drafting.rough_copy import ROUGH_BYTES
from .formats.checkpoint import Checkpoint
from .formats.files import gguf_file, gguf_parts
from .formats.gguf import GgufFile
from .formats.quantized import read_scheme
from .formats.safetensors import TensorFiles
from .images.vision import count_tower, vision_support
from .opening import open_model, read_config
from .pooling import read_pooling
from .weights.layer import tensor_shapes

Format: TypeAlias = Literal["safetensors", "GGUF", "no weights"]
_PAGE = 16  # tokens of a CPU's page; only the rounding of mixed pages depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """The model, memory needs and backend of a checkpoint.

    ``problem``: why the model is refused, and what to do instead; None: it is served. If only its
    weights are missing, the other fields follow from its config; otherwise only ``problem`` is set.
    """

    model_type: str = ""
    path: Literal["own", "transformers"] | None = None
    file_format: Format = "no weights"
    quantization: str = ""  # quantisation of the files for display; "": plain
    num_parameters: int = 0
    weight_bytes: int = 0  # bytes in the files; without files, in the config's dtype
    dtype: str = ""
    # estimated part of `weight_bytes` that is loaded, without towers and unused layers
    used_bytes: int = 0
    num_embedding: int = 0  # parameters of the embedding
    is_tied: bool = False  # The embedding is also the output matrix, which has a packed copy.

    # bytes in the model's dtype; None: unknown before loading
    kv_bytes_per_token: int | None = None
    has_latents: bool = False  # The KV of a position and layer is one latent for all heads.
    state_bytes: int = 0  # bytes of a sequence's recurrent state at one position; 0: no state

    # bytes of a copy of its matrices in 4 bits; None: not available
    rough_copy_bytes: int | None = None
    max_model_len: int = 0  # context length in tokens
    dimensions: int = 0  # size of an embedding model's vectors; 0: not an embedding model
    images: str = ""  # description of the image tower, or why images are not served; "": no tower
    takes_images: bool = False
    mtp: str = ""  # MTP layers, or their missing tensors; "": no MTP layers
    problem: str | None = None

    def weights_in_memory(self, *, dtype: str = "auto", quantize: Quantize = "none") -> int:
        """Return an estimate of the weights' bytes in memory with these engine options."""
        item = self.item_bytes(dtype)
        num_output = self.num_embedding if self.is_tied else 0
        if quantize != "none":
            num_matrices = self.num_parameters - self.num_embedding + num_output
            return self.num_embedding * item + int(num_matrices * WEIGHT_BYTES[quantize])
        if self._stays_packed(dtype):
            return self.used_bytes
        return (self.num_parameters + num_output) * item

    def least_weights(self, *, dtype: str = "auto", quantize: Quantize = "none") -> int:
        """Return a lower bound of the bytes that loading the weights needs."""
        if quantize != "none":
            return int(self.num_parameters * _LEAST_BYTES[quantize])
        if self._stays_packed(dtype):
            return int(self.used_bytes * _CERTAIN)
        return self.num_parameters * self.item_bytes(dtype)

    def item_bytes(self, dtype: str = "auto") -> int:
        """Return the size in bytes of an activation; on a CPU, float16 is computed in float32."""
        chosen = self.dtype if dtype == "auto" else dtype
        return 2 if chosen == "bfloat16" or dtype == "float16" else 4

    def _stays_packed(self, dtype: str) -> bool:
        return bool(self.quantization) and dtype == "auto" and self.path == "own"


WEIGHT_BYTES: Mapping[str, float] = {"int8": 1.0, "int4": ROUGH_BYTES}
"""Bytes per weight for each value of ``--quantize``."""
_LEAST_BYTES = {"int8": 1.0, "int4": 0.5}  # bytes per weight, without scales
_CERTAIN = 0.8  # fraction of an estimate by parameter counts that is a lower bound


def inspect_model(path: Path) -> ModelReport:
    """Return the report of a GGUF file or of a Hugging Face folder, which may lack its weights."""
    try:
        # Pooling is read first: the type of an embedding model may be unknown, too.
        read_pooling(path)
        return _own(path)
    except UnsupportedConfig as reason:
        try:
            return _by_transformers(path)
        except ModelLoadError as error:
            return ModelReport(problem=str(error or reason))
    except ModelLoadError as error:
        return ModelReport(problem=str(error))


def _own(path: Path) -> ModelReport:
    file_format, size = weight_files(path)
    dtype: str
    mtp, num_stored = "", 1
    if file_format == "no weights":
        config = read_config(path)
        dtype = config.dtype
    else:
        config, checkpoint = open_model(path)
        num_stored = max(1, sum(math.prod(shape) for shape in checkpoint.shapes.values()))
        dtype = checkpoint.stored_dtype
        mtp = _mtp_layers(config, checkpoint)
    shapes = tensor_shapes(config)
    count = sum(math.prod(shape) for shape in shapes.values())
    kv = PageLayout.of(config).shapes
    report = _report(path, "own", config, count, kv, file_format, size, dtype)
    return replace(
        report,
        mtp=mtp,
        used_bytes=int(size * min(1.0, count / num_stored)) if size else report.weight_bytes,
        num_embedding=math.prod(shapes[EMBEDDING]),
        is_tied=config.tie_embeddings,
    )


def _mtp_layers(config: DecoderConfig, checkpoint: Checkpoint) -> str:
    """Return the number of MTP layers in words, or the missing tensors of the first one."""
    try:
        count = count_mtp_layers(config, checkpoint)
    except ModelLoadError as problem:
        return str(problem)
    return f"{count} layer{'s' * (count > 1)}" if count else ""


def _by_transformers(path: Path) -> ModelReport:
    # Not at the top: transformers takes a second to import.
    from .fallback.states import ModuleStates
    from .fallback.transformers_decoder import kv_shapes
    from .fallback.transformers_loader import read_text_model

    file_format, size = weight_files(path)
    source = read_text_model(path, has_weights=file_format != "no weights")
    shapes = kv_shapes(source.probed.sites) if source.probed else []
    config = source.config
    count = source.num_parameters
    report = _report(path, "transformers", config, count, shapes, file_format, size, config.dtype)
    if source.probed is None or source.probed.cache is None:
        return report
    states = [ModuleStates.of(source.probed.cache)]
    return replace(report, state_bytes=bytes_per_slot(states, getattr(torch, config.dtype)))


_ROUNDED = ("", "Q8_0")  # A rough copy can be made from these quantisations.


def _report(
    folder: Path,
    path: Literal["own", "transformers"],
    config: DecoderConfig,
    num_parameters: int,
    shapes: list[KvShape],
    file_format: Format,
    size: int,
    dtype: str,
) -> ModelReport:
    item, quantization = getattr(torch, dtype), _quantization(folder)
    page = bytes_per_mixed_page(shapes, page_size=_PAGE, dtype=item) if shapes else None
    states = config.states
    has_rough_copy = path == "own" and quantization in _ROUNDED
    return ModelReport(
        model_type=config.model_type,
        path=path,
        file_format=file_format,
        quantization=quantization,
        num_parameters=num_parameters,
        weight_bytes=size or num_parameters * item.itemsize,
        dtype=dtype,
        kv_bytes_per_token=None if page is None else page // _PAGE,
        has_latents=path == "own" and config.latent is not None,
        state_bytes=bytes_per_slot(states, item),
        rough_copy_bytes=int(ROUGH_BYTES * num_parameters) if has_rough_copy else None,
        max_model_len=config.max_model_len,
        dimensions=config.hidden_size if read_pooling(folder).embeds else 0,
        images=_images(folder),
        takes_images=path == "own" and vision_support(folder).is_served,
        problem=_missing(folder) if file_format == "no weights" else None,
    )


def _images(path: Path) -> str:
    """Return a short description of a model's image tower; "" without one."""
    support = vision_support(path)
    if support.is_served:
        return f"yes, a tower of {count_tower(path) / 1e6:.3g} million parameters"
    return support.reason


def weight_files(path: Path) -> tuple[Format, int]:
    """Return the format of the weight files, and their bytes on disk."""
    file = gguf_file(path)
    if file is not None:
        return "GGUF", sum(part.stat().st_size for part in gguf_parts(file) if part.exists())
    files = list(path.glob("*.safetensors"))
    size = sum(each.stat().st_size for each in files)
    return ("safetensors", size) if files else ("no weights", 0)


def _missing(folder: Path) -> str | None:
    """Return why the weights of a folder cannot be opened; None if they can."""
    try:
        TensorFiles(folder)
    except ModelLoadError as error:
        return str(error)
    return None


def _quantization(path: Path) -> str:
    """Return the quantisation of a GGUF file's matrices, or the one in config.json; "": plain."""
    file = gguf_file(path)
    if file is not None:
        types = GgufFile(file).types
        return ", ".join(name for name in sorted(types) if name not in ("F32", "F16", "BF16"))
    where = path / "config.json"
    scheme = read_scheme(Fields(read_json(where), str(where)))
    return "" if scheme is None else scheme.label
