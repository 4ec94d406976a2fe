"""Metadata of a GGUF file: values by key, where many keys begin with the architecture's name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as GgmlType

from ...errors import ModelLoadError
from .files import gguf_parts, shown_names
from .gguf_reader import GgufReader, SkippedArray, open_gguf

_OTHERS = {
    "adapter": "a LoRA adapter, not a model: serve its base model, and give --lora the adapter as"
    " a folder with an adapter_config.json",
    "mmproj": "the image part of a model (mmproj), not a model: name the GGUF file of the model",
    "imatrix": "an importance matrix, not a model",
    "vocab": "a vocabulary, not a model",
}
"""Descriptions of GGUF files that are not models, by general.type."""
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def open_parts(file: Path) -> list[GgufReader]:
    """Open the GGUF file of a model, or all parts of a split one; the first has the metadata.

    Raises `ModelLoadError` for a file that is not a model, and for parts that are missing or do not
    belong together.
    """
    reader = open_gguf(file)
    kind = reader.get("general.type") or "model"
    # Older converters name only the architecture.
    if kind == "model" and reader.get("general.architecture") == "clip":
        kind = "mmproj"
    if kind != "model":
        what = _OTHERS.get(kind, f"not a model: its general.type is {kind!r}")
        raise ModelLoadError(f"{file} is {what}")
    count = reader.get("split.count") or 1
    return [reader] if count == 1 else _split_parts(file, count)


def _split_parts(file: Path, count: int) -> list[GgufReader]:
    parts, one = gguf_parts(file), f"{file} is one of {count} parts of a model"
    if len(parts) != count:
        raise ModelLoadError(f"{one}: its name must have the form NAME-00001-of-00003.gguf")
    if missing := [part.name for part in parts if not part.exists()]:
        raise ModelLoadError(f"{one}; missing in its folder: {shown_names(missing)}")
    readers = [open_gguf(part) for part in parts]
    found = [(each.get("split.no"), each.get("split.count")) for each in readers]
    num_tensors = sum(len(each.tensors) for each in readers)
    named = readers[0].get("split.tensors.count") or num_tensors
    if found != [(number, count) for number in range(count)] or named != num_tensors:
        raise ModelLoadError(f"{one}, but the files in its folder do not belong together")
    return readers


def read_text(file: Path, name: str) -> str:
    """Return a string of the metadata, "" if the file has none. Raises `ModelLoadError`."""
    found = open_gguf(file).get(name)
    return found if isinstance(found, str) else ""


def read_values(file: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return the present values of the metadata by name. Raises `ModelLoadError`.

    A skipped array has the value None.
    """
    reader = open_gguf(file)
    return {name: reader.get(name) for name in names if name in reader.values}


def read_head(file: Path) -> bytes:
    """Return the bytes before the tensors: metadata, names and offsets. Raises `ModelLoadError`."""
    return open_gguf(file).head


class Metadata:
    """Fields by name without the architecture's prefix; bad values raise `ModelLoadError`."""

    def __init__(self, reader: GgufReader) -> None:
        self._reader = reader
        self.architecture: str = self._get("general.architecture", str)

    def error(self, problem: str) -> ModelLoadError:
        """Return the `ModelLoadError` for a problem of this file."""
        return ModelLoadError(f"{self._reader.file}: {problem}")

    def number(self, name: str) -> Any:  # noqa: ANN401 - an int or a float, like the stored value
        """Return a number. Raises `ModelLoadError` if the file lacks it."""
        return self._get(f"{self.architecture}.{name}", (int, float))

    def optional(self, name: str, default: Any) -> Any:  # noqa: ANN401
        """Return a value, or ``default`` if the file has none.

        The value must be a string if the default is one, otherwise a number.
        """
        name = f"{self.architecture}.{name}"
        kinds = str if isinstance(default, str) else (int, float)
        return self._get(name, kinds) if name in self._reader.values else default

    def flags(self, name: str) -> list[bool]:
        """Return an array of flags; empty if the file has none."""
        found = self._reader.get(f"{self.architecture}.{name}")
        return [bool(each) for each in found] if isinstance(found, list) else []

    def by_layer(self, name: str) -> list[int]:
        """Return one number per layer, or one for all layers; [0] if the file has none."""
        found = self._reader.values.get(f"{self.architecture}.{name}")
        if not isinstance(found, (list, SkippedArray)):
            return [int(self.optional(name, 0))]
        if isinstance(found, SkippedArray) or not all(isinstance(each, int) for each in found):
            raise self.error(f"{self.architecture}.{name} must have an integer for each layer")
        return [int(each) for each in found] or [0]

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor with this name."""
        return any(each.name == name for each in self._reader.tensors)

    def tensor(self, name: str) -> list[float]:
        """Return the numbers of a small tensor; empty if the file has none."""
        found = next((each for each in self._reader.tensors if each.name == name), None)
        if found is None:
            return []
        if found.tensor_type != GgmlType.F32 or len(found.shape) != 1:
            raise self.error(f"{name} must be one-dimensional and have type F32")
        return [float(each) for each in found.data.tolist()]

    def end_tokens(self) -> list[int]:
        """Return the tokens that end an answer."""
        names = (f"tokenizer.ggml.{name}" for name in _END_TOKENS)
        found = [self._get(name, int) for name in names if name in self._reader.values]
        return list(dict.fromkeys(found))

    def _get(self, name: str, kinds: type | tuple[type, ...]) -> Any:  # noqa: ANN401
        if name not in self._reader.values:
            raise self.error(f"{name} is missing")
        value = self._reader.get(name)
        is_odd = isinstance(value, float) and not math.isfinite(value)
        if is_odd or not isinstance(value, kinds):
            raise self.error(f"{name} has an unexpected type or value")
        return value
