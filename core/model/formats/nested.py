"""The text model of a multimodal checkpoint: whether there is one, and its tensors' names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..fields import Fields

TEXT_PREFIXES = {  # of the text model's tensors, as regular expressions, and their own names
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def is_nested(fields: Fields) -> bool:
    """Whether a config.json holds that of a text model."""
    return isinstance(fields.values.get("text_config"), dict)


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
