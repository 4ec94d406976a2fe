"""Names of a text model's tensors, in files whose names differ from transformers' text class.

Multimodal checkpoints hold other models beside it. Base models, such as embedding models, are saved
without an output matrix and without the prefix that the class with one adds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ..description.tensors import EMBEDDING

_TEXT = "model."
# Prefixes of the text model in multimodal checkpoints; the first one in use counts.
_PREFIXES = (
    "model.language_model.",
    "model.text_model.",  # SmolVLM, Idefics 3
    "thinker.model.",  # Qwen's Omni models
    "language_model.model.",
    "language_model.",  # saved without an output matrix
    "model.",  # Qwen2-VL, Qwen2.5-VL and single thinkers, which also have `visual.`
)
_MTP = "mtp."  # MTP layer beside the text model (Qwen 3.5)
_HEAD = "lm_head."
_HEADS = (_HEAD, "language_model.lm_head.", "thinker.lm_head.")


def text_names(names: Collection[str]) -> dict[str, str]:
    """Return the stored names of a multimodal checkpoint's text model, by its own names.

    Tensors of other models are left out.
    """
    prefix = next((each for each in _PREFIXES if any(n.startswith(each) for n in names)), _TEXT)
    found: dict[str, str] = {}
    for name in names:
        head = next((each for each in _HEADS if name.startswith(each)), None)
        if head is not None:
            found[_HEAD + name.removeprefix(head)] = name
        elif name.startswith(prefix):
            found[_TEXT + name.removeprefix(prefix)] = name
        elif name.startswith(_MTP):
            found[name] = name
    return found


def base_names(names: Collection[str]) -> dict[str, str]:
    """Return a text model's stored names, by their names with a prefix."""
    if EMBEDDING.removeprefix(_TEXT) not in names:
        return {name: name for name in names}
    return {name if name.startswith(_HEAD) else _TEXT + name: name for name in names}


def family_names(
    pairs: Iterable[tuple[str, str]],
    base: Callable[[Collection[str]], dict[str, str]],
    names: Collection[str],
) -> dict[str, str]:
    """Return stored names by transformers' names, for a family with names of its own.

    ``pairs``: parts of a name and their replacements, in order. MTP layers beside the model are
    left out.
    """
    found: dict[str, str] = {}
    for name, stored in base(names).items():
        for old, new in pairs:
            name = name.replace(old, new)
        if not name.startswith(_MTP):
            found[name] = stored
    return found


def is_base(names: Collection[str]) -> bool:
    """Whether stored names belong to a class without an output matrix."""
    embedding = EMBEDDING.removeprefix(_TEXT)
    return embedding in names or f"language_model.{embedding}" in names
