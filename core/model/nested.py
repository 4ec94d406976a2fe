"""The text model of a multimodal checkpoint: its config, and the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import ModelLoadError
from .fields import Fields

TEXT_PREFIXES = {  # of the text model's tensors, as regular expressions, and their own names
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
_OUTER = ("quantization_config", "dtype", "torch_dtype", "eos_token_id")  # may stand outside


def is_nested(fields: Fields) -> bool:
    """Whether a config.json holds that of a text model."""
    return isinstance(fields.values.get("text_config"), dict)


def text_fields(folder: Path, fields: Fields) -> Fields:
    """The text model's fields, with the defaults of its class, which such files leave out.

    Raises `UnsupportedConfig` where transformers is not installed or does not know the model.
    """
    try:
        from .fallback.transformers_loader import read_text_config
    except ImportError:
        raise fields.unsupported("text_config", "needs transformers for its defaults") from None
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


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Names of the text model's tensors, as it alone would have them, and as they are stored."""
    found: dict[str, str] = {}
    for name in names:
        for prefix, own in TEXT_PREFIXES.items():
            if re.match(prefix, name):
                found[re.sub(prefix, own, name)] = name
                break
        else:
            if name == "lm_head.weight":
                found[name] = name
    return found
