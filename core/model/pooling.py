"""Pooling: uses of a model's last row other than the next token, as its files declare them.

Embedding models and rerankers are published with the files of sentence-transformers: modules.json
lists the modules, each with its own config. A GGUF file has the pooling type in its metadata. The
engine supports only decoders with causal attention and pooling of the last token's row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..errors import ModelLoadError
from ..options.checks import Count, TokenId
from .description.fields import Fields, read_json
from .formats.files import gguf_file

MODULES = "modules.json"
OTHERS = "sentence-transformers and text-embeddings-inference serve such models"
_MODE = "pooling_mode_"
_LAST = "lasttoken"
_GGUF_LAST = 3  # value of the pooling type in llama.cpp that means the last token
_GGUF_OTHERS = {1: "mean", 2: "cls"}
_WHOLE = ("Transformer", "Normalize")  # modules without settings: vectors are always normalised


class PoolingSpec(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Uses of a model's last row.

    ``dimensions``: size of its hidden state, thus of a vector. ``embeds``: whether the model is
    made for embedding. ``cuts``: lengths to which vectors may be cut (Matryoshka representations,
    arXiv 2205.13147); None: any length. ``score_ids``: tokens of "no" and "yes", if the files name
    them.
    """

    dimensions: Count = 0
    embeds: bool = False
    cuts: tuple[Count, ...] | None = ()
    score_ids: tuple[TokenId, TokenId] | None = None


NO_POOLING = PoolingSpec()


def read_pooling(path: Path) -> PoolingSpec:
    """Read the pooling of a folder in Hugging Face layout or a GGUF file, without its dimensions.

    Raises `ModelLoadError` for a model whose vectors are not made from the last token's row of
    causal attention.
    """
    file = gguf_file(path)
    if file is not None:
        return PoolingSpec(embeds=_gguf_embeds(file))
    if not (path / "config.json").is_file():
        return NO_POOLING
    config = Fields(read_json(path / "config.json"), str(path / "config.json"))
    _check_attention(config)
    embeds, score_ids = False, None
    for kind, folder in _modules(path):
        if kind == "Pooling":
            _check_last_token(folder / "config.json")
            embeds = True
        elif kind == "LogitScore":
            score_ids = _score_ids(folder / "config.json")
        elif kind not in _WHOLE:
            raise ModelLoadError(
                f"{path / MODULES}: a module of type {kind} is not supported; {OTHERS}"
            )
    if embeds and "AutoModel" in config.object("auto_map").values:
        raise ModelLoadError(
            f"{config.where}: auto_map names Python code of the model, which may compute attention "
            f"in both directions; {OTHERS}"
        )
    return PoolingSpec(embeds=embeds, cuts=_cuts(config), score_ids=score_ids)


def _check_attention(config: Fields) -> None:
    """Raise `ModelLoadError` for attention in both directions."""
    given = config.values
    is_mutual = given.get("use_bidirectional_attention") in (True, "all")
    if given.get("is_causal") is False or is_mutual:
        name = "use_bidirectional_attention" if is_mutual else "is_causal"
        raise ModelLoadError(
            f"{config.where}: {name} is {given[name]!r}: attention in both directions is not "
            f"supported; {OTHERS}"
        )


def _modules(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the class and the folder of each module; nothing without modules.json."""
    file = path / MODULES
    try:
        modules: Any = json.loads(file.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelLoadError(f"{file} does not contain a list of objects")
    for module in modules:
        fields = Fields(module, str(file))
        folder = fields.values.get("path") or ""
        if not isinstance(folder, str):
            raise fields.error("path", "must be a string")
        yield fields.text("type").rpartition(".")[2], path / folder


def _check_last_token(file: Path) -> None:
    """Raise `ModelLoadError` unless only the last token's row is pooled."""
    values = read_json(file)
    if isinstance(mode := values.get("pooling_mode"), str):
        modes = [mode]
    else:
        modes = [name.removeprefix(_MODE) for name in values if name.startswith(_MODE)]
        modes = [mode for mode in modes if values[_MODE + mode] is True]
    if modes != [_LAST]:
        found = " and ".join(modes) or "none"
        raise ModelLoadError(
            f"{file}: only pooling of the last token ({_LAST}) is supported, not {found}; {OTHERS}"
        )


def _score_ids(file: Path) -> tuple[int, int]:
    """Return the tokens of "no" and "yes". Raises `ModelLoadError` if one is missing."""
    fields = Fields(read_json(file), str(file))
    return fields.integer("false_token_id"), fields.integer("true_token_id")


def _cuts(config: Fields) -> tuple[int, ...] | None:
    """Return the lengths to which vectors may be cut; None: any length.

    vLLM reads the same fields, ``matryoshka_dimensions`` and ``is_matryoshka``.
    """
    named = config.integers("matryoshka_dimensions")
    return tuple(named) or (None if config.values.get("is_matryoshka") is True else ())


def _gguf_embeds(file: Path) -> bool:
    """Whether a GGUF file holds an embedding model.

    Raises `ModelLoadError` as `read_pooling` does.
    """
    from .formats.gguf_metadata import read_text, read_values  # imports numpy

    prefix = read_text(file, "general.architecture")
    kind, causal = f"{prefix}.pooling_type", f"{prefix}.attention.causal"
    found = read_values(file, (kind, causal))
    if (other := _GGUF_OTHERS.get(found.get(kind, 0))) is not None:
        raise ModelLoadError(
            f"{file}: only pooling of the last token is supported, not {other}; {OTHERS}"
        )
    if found.get(causal) is False:
        raise ModelLoadError(
            f"{file}: {causal} is false: attention in both directions is not supported; {OTHERS}"
        )
    return bool(found.get(kind) == _GGUF_LAST)
