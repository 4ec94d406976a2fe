"""Opening a model: from a path to its config, and to the tensors of its files.

Files give `Fields` and tensors (formats/), families make a config of `Fields` (families/). Neither
knows the other: this module joins them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import ModelLoadError
from .config import DecoderConfig
from .families.hybrid import as_stored, tiled
from .families.registry import MODEL_FAMILIES, parse_config
from .fields import Fields, UnsupportedConfig, read_json
from .formats.checkpoint import Checkpoint, check_tensors
from .formats.files import gguf_file
from .formats.gguf import GgufFile
from .formats.nested import is_nested
from .formats.safetensors import SafetensorsCheckpoint
from .shapes import ignored, tensor_shapes

_OUTER = ("quantization_config", "dtype", "torch_dtype", "eos_token_id")  # may be outside


class OpenedModel(NamedTuple):
    """The config of a model, and the tensors of its files: those that the config implies."""

    config: DecoderConfig
    checkpoint: Checkpoint


def open_model(path: str | Path) -> OpenedModel:
    """Open a folder in Hugging Face layout, a GGUF file, or a folder with one.

    Reads headers alone. Raises `ModelLoadError` for files that are missing, damaged or not
    supported, `UnsupportedConfig` for a model that this engine's own decoder does not compute.
    """
    file = gguf_file(Path(path))
    checkpoint: Checkpoint
    if file is not None:
        checkpoint = GgufFile(file)
        config = _gguf_config(checkpoint)
    else:
        config = _folder_config(Path(path))
        checkpoint = SafetensorsCheckpoint(Path(path), is_nested=config.is_nested)
    if config.deltas:
        config = as_stored(config, set(checkpoint.shapes))
    try:
        check_tensors(checkpoint, tensor_shapes(config), ignored=ignored(config, checkpoint.shapes))
    except ModelLoadError as error:
        if config.is_nested and not config.deltas:  # transformers may know where its tensors are
            raise UnsupportedConfig(str(error)) from None
        raise
    return OpenedModel(config, checkpoint)


def read_config(path: str | Path) -> DecoderConfig:
    """The config of a model, whose folder may be without weights. Raises as `open_model` does."""
    file = gguf_file(Path(path))
    return _folder_config(Path(path)) if file is None else _gguf_config(GgufFile(file))


def _gguf_config(file: GgufFile) -> DecoderConfig:
    config = parse_config(Fields(file.values, str(file.where)))
    if file.has_tiled_heads:
        config = tiled(config)
    if not file.divisors:
        return config
    return replace(config, rope=replace(config.rope, divisors=file.divisors))


def _folder_config(folder: Path) -> DecoderConfig:
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder")
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    if is_nested(fields) and fields.values.get("model_type") not in MODEL_FAMILIES:
        config = replace(parse_config(_text_fields(folder, fields)), is_nested=True)
    else:
        config = parse_config(fields)
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    more = Fields(read_json(generation), str(generation)).integers("eos_token_id")
    # Chat models name further end tokens there only.
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def _text_fields(folder: Path, fields: Fields) -> Fields:
    """The text model's fields, with the defaults of its class, which such files leave out.

    Raises `UnsupportedConfig` where transformers does not know the model.
    """
    from .fallback.text_config import read_text_config  # transformers takes a second to import

    try:
        text = read_text_config(folder)
    except ModelLoadError as error:
        raise fields.unsupported("text_config", f"is not supported: {error}") from None
    values = {name: value for name, value in text.items() if value is not None}
    tied = values.get("tie_word_embeddings", False)
    if fields.flag("tie_word_embeddings", tied) != tied:
        raise fields.unsupported("tie_word_embeddings", "is another outside of text_config")
    outer = {name: fields.values[name] for name in _OUTER if fields.has(name)}
    return Fields(outer | values, f"{fields.where}: text_config")
