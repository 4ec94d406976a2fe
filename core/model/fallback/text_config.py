"""Configs as transformers reads them, with the defaults of their classes."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from ...errors import ModelLoadError
from ..description.fields import Fields, read_json


def read_text_config(folder: Path) -> dict[str, Any]:
    """Return the config of a folder's text model, with all defaults. Raises `ModelLoadError`."""
    text = text_of(read_whole_config(folder))
    found: dict[str, Any] = text.to_dict()
    return found | {"model_type": text.model_type}


def text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the text model's part of a config.

    Its output matrix is tied to the embedding if either of the two configs says so.
    """
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    flags = (getattr(each, "tie_word_embeddings", None) for each in (config, text))
    text.tie_word_embeddings = any(flags)
    return text


def read_whole_config(folder: Path) -> PreTrainedConfig:
    """Return the config of a folder, which may contain a text model's. Raises `ModelLoadError`."""
    file = folder / "config.json"
    values = read_json(file)
    if "auto_map" in values and "model_type" not in values:
        raise ModelLoadError(
            f"{folder}: the model needs Python code from the checkpoint, which is never run"
        )
    Fields(values, str(file)).text("model_type")
    try:
        with quiet():
            found: PreTrainedConfig = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            return found
    except Exception as error:  # transformers raises whatever a field makes it raise
        raise ModelLoadError(f"{file}: transformers: {one_line(error)}") from error


def make_config(values: dict[str, Any], where: Path) -> PreTrainedConfig:
    """Return the config for fields with a ``model_type``. Raises `ModelLoadError`."""
    try:
        with quiet():
            made: PreTrainedConfig = CONFIG_MAPPING[values["model_type"]](**values)
            return made
    except Exception as error:  # transformers raises whatever a field makes it raise
        raise ModelLoadError(f"{where}: transformers: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return the message of transformers' error in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


@contextmanager
def quiet(*, shows_bar: bool = True) -> Iterator[None]:
    """Silence transformers' messages, which concern training and its own generation.

    ``shows_bar``: keep the progress bar on a terminal.
    """
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.ERROR)
    is_shown = shows_bar and sys.stderr.isatty()
    hides_bar = not is_shown and transformers.utils.logging.is_progress_bar_enabled()
    if hides_bar:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.utils.logging.set_verbosity(level)
        if hides_bar:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
