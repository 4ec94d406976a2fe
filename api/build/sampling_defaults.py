"""The sampling values that a model recommends, read from its files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...core.config import EngineConfig, parse_overrides
from ...core.errors import InvalidRequest, ModelLoadError
from ...core.interface.sampling import RECOMMENDED
from ...core.model.description.fields import read_json
from ...core.model.formats.files import GGUF
from ..types.sampling_params import NO_DEFAULTS, SamplingDefaults
from .family_sampling import family_sampling
from .model_files import ModelSource

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
GGUF_NAMES = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""llama.cpp's metadata keys, by field."""


def sampling_defaults(source: ModelSource, config: EngineConfig) -> SamplingDefaults:
    """Return the sampling defaults. Configured values take precedence over the model's values.

    Raises `ModelLoadError` if a value of the model is out of range.
    """
    own = NO_DEFAULTS if config.generation_config == "none" else model_sampling(source)
    if own.given:
        logger.info("sampling defaults of the model: %s", described(own))
    given = parse_overrides(config.override_generation_config)
    if not given:
        return own
    names = f"{', '.join(given)}: override_generation_config"
    return replace(own, **given, origin="; ".join(filter(None, (own.origin, names))))


def described(defaults: SamplingDefaults) -> str:
    """Return a line of text with the values and their origin."""
    values = ", ".join(f"{name} {value:.12g}" for name, value in defaults.given.items())
    return f"{values} ({defaults.origin})" if values else "temperature 1 (OpenAI's defaults)"


def model_sampling(source: ModelSource) -> SamplingDefaults:
    """Return the values of a model's card, generation_config.json or GGUF file.

    A GGUF file without values gets the values of its family. Raises `ModelLoadError` for a value
    out of range.
    """
    if source.sampling is not None:
        return source.sampling
    if source.path.suffix.lower() == GGUF:
        found = _of_gguf(source.path)
        return found if found.given else family_sampling(source.path)
    file = source.path / GENERATION_CONFIG
    if not file.is_file():
        return NO_DEFAULTS
    values = read_json(file)
    return _checked(file, {name: values.get(name) for name in RECOMMENDED}, GENERATION_CONFIG)


def _of_gguf(file: Path) -> SamplingDefaults:
    from ...core.model.formats.gguf_metadata import read_values

    found = read_values(file, GGUF_NAMES.values())
    values = {name: _as_written(found.get(key)) for name, key in GGUF_NAMES.items()}
    top_k = values["top_k"]
    if isinstance(top_k, int) and top_k < 0:  # llama.cpp disables it with any negative value
        values["top_k"] = -1
    return _checked(file, values, "general.sampling.* in the file", GGUF_NAMES)


def _as_written(value: object) -> object:
    """Return a float32 as its shortest decimal number: 0.6, not 0.6000000238."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _checked(
    file: Path, values: Mapping[str, Any], origin: str, names: Mapping[str, str] | None = None
) -> SamplingDefaults:
    """Return the values of a file after checking them.

    ``names``: the names of the fields in the file, for errors.
    """
    top_k = values["top_k"]
    if isinstance(top_k, float) and top_k.is_integer():
        values = {**values, "top_k": int(top_k)}
    try:
        found = SamplingDefaults(**values, origin=origin)
    except InvalidRequest as error:
        if (name := (names or {}).get(error.param or "")) is not None:
            error.rename(name)
        remedy = "correct it, or ignore the model's own sampling with --generation-config none"
        raise ModelLoadError(f"{file}: {error}; {remedy}") from None
    return found if found.given else NO_DEFAULTS
