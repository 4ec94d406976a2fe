"""Opening a model: from a path to its config and to the tensors of its files.

The file formats (formats/) yield `Fields` and tensors, and the families (families/) make a config
from `Fields`. The two do not depend on each other; this module joins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ModelLoadError
from .description.config import MTP_AFTER_LAST, DecoderConfig, ExpertsSpec
from .description.fields import Fields, UnsupportedConfig, read_json
from .description.tensors import EMBEDDING, LM_HEAD, Shape, layer_prefix
from .families.hybrid import as_stored, tiled
from .families.latent import as_split
from .families.registry import MODEL_FAMILIES, parse_config
from .formats.checkpoint import Checkpoint, check_tensors
from .formats.files import gguf_file
from .formats.gguf import GgufFile
from .formats.nested import base_names, family_names, is_base, text_names
from .formats.safetensors import Rename, SafetensorsCheckpoint
from .weights.layer import ignored, tensor_shapes
from .weights.mlp import Experts

# These fields of a multimodal config may be absent from its text model's config.
_OUTER = ("quantization_config", "dtype", "torch_dtype", "eos_token_id", "is_encoder_decoder")


class OpenedModel(NamedTuple):
    """The config of a model, and a checkpoint that has the tensors which the config implies."""

    config: DecoderConfig
    checkpoint: Checkpoint


def open_model(path: str | Path) -> OpenedModel:
    """Open a folder in Hugging Face layout, a GGUF file, or a folder with one.

    Only headers are read, except that a stored output matrix is compared with an embedding that the
    config ties to it. Raises `ModelLoadError` for files that are missing, damaged or not supported,
    and `UnsupportedConfig` for a model that this engine's own decoder does not support.
    """
    file = gguf_file(Path(path))
    checkpoint: Checkpoint
    if file is not None:
        checkpoint = GgufFile(file)
        config = _gguf_config(checkpoint)
    else:
        config = _folder_config(Path(path))
        folder = SafetensorsCheckpoint(Path(path), _names_of(config))
        checkpoint, config = folder, _as_stored(config, folder)
    if config.latent is not None:
        config = as_split(config, set(checkpoint.shapes))
    if config.states or config.stored_names:
        config = as_stored(config, checkpoint.shapes)
    check_tensors(checkpoint, tensor_shapes(config), ignored=ignored(config, checkpoint.shapes))
    return OpenedModel(config, checkpoint)


def _names_of(config: DecoderConfig) -> Rename:
    """Return the function that maps stored names to the names of `tensor_shapes`."""
    base = text_names if config.is_nested else base_names
    return partial(family_names, config.stored_names, base) if config.stored_names else base


def read_config(path: str | Path) -> DecoderConfig:
    """Return a model's config; the folder need not have weights. Raises as `open_model` does."""
    file = gguf_file(Path(path))
    return _folder_config(Path(path)) if file is None else _gguf_config(GgufFile(file))


def _gguf_config(file: GgufFile) -> DecoderConfig:
    config = parse_config(Fields(file.values, str(file.where)))
    # GGUF files store this layer after the last one, whatever other checkpoints do.
    if config.mtp is not None:
        config = replace(config, mtp=MTP_AFTER_LAST)
    if file.has_tiled_heads:
        config = tiled(config)
    if not file.divisors:
        return config
    return replace(config, rope=replace(config.rope, divisors=file.divisors))


def _folder_config(folder: Path) -> DecoderConfig:
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder")
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    is_plain = fields.text("model_type") in MODEL_FAMILIES
    config = parse_config(fields) if is_plain else _text_config(folder, fields)
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    more = Fields(read_json(generation), str(generation)).integers("eos_token_id")
    # Chat models name additional end tokens only in this file.
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def _text_config(folder: Path, fields: Fields) -> DecoderConfig:
    """Return the config of the text model, with its class's defaults for absent fields.

    Raises `UnsupportedConfig` if transformers does not know the model.
    """
    from .fallback.text_config import read_text_config  # transformers takes a second to import

    try:
        text = read_text_config(folder)
    except ModelLoadError as error:
        raise UnsupportedConfig(str(error)) from None
    if text["model_type"] == fields.values["model_type"]:
        return parse_config(Fields(_given(text), fields.where))
    outer = _given({name: fields.values.get(name) for name in _OUTER})
    text.pop("is_encoder_decoder", None)
    return replace(
        parse_config(Fields(outer | _given(text), f"{fields.where}: text_config")), is_nested=True
    )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _as_stored(config: DecoderConfig, checkpoint: SafetensorsCheckpoint) -> DecoderConfig:
    """Return ``config`` adapted to the files: to their output matrix and layout of experts.

    Without a stored output matrix the embedding serves as one, if the config ties them or the class
    that was saved has no output matrix.
    """
    shapes = checkpoint.shapes
    if LM_HEAD in shapes:
        is_tied = config.tie_embeddings and _is_embedding(checkpoint)
    else:
        is_tied = config.tie_embeddings or is_base(checkpoint.files.shapes)
    layers = tuple(
        replace(layer, experts=_as_stacked(layer.experts, layer_prefix(index), config, shapes))
        for index, layer in enumerate(config.layers)
    )
    return replace(config, tie_embeddings=is_tied, layers=layers)


def _is_embedding(checkpoint: SafetensorsCheckpoint) -> bool:
    """Whether the stored output matrix has the values of the embedding."""
    shapes = checkpoint.shapes
    if shapes.get(EMBEDDING) != shapes[LM_HEAD]:
        return False
    table, head = checkpoint.read(EMBEDDING), checkpoint.read(LM_HEAD)
    if not isinstance(table, Tensor) or not isinstance(head, Tensor):
        return False
    return table.dtype == head.dtype and torch.equal(table, head)


def _as_stacked(
    spec: ExpertsSpec | None, prefix: str, config: DecoderConfig, shapes: Mapping[str, Shape]
) -> ExpertsSpec | None:
    """Return a layer's experts with the stored orientation of their stacks.

    Qwen3-VL's experts may be stacked transposed, and no field says so.
    """
    if spec is None or spec.names.stacked != "rows":
        return spec
    turned = replace(spec, names=spec.names._replace(stacked="columns"))
    expected = Experts(config, prefix, turned).stacks
    is_transposed = all(shapes.get(tensor.name) == tensor.shape for tensor in expected)
    return turned if is_transposed else spec
