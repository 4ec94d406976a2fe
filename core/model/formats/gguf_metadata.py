"""The metadata of a GGUF file: keys and values, of which a part is named by the architecture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType
from numpy.typing import NDArray

from ...errors import ModelLoadError

_MOST_NUMBERS = 4096
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# What ends an answer besides, by architecture and vocabulary: Harmony's <|call|>; of Gemma 4 <eos>,
# <turn|> and <|tool_response>.
_MORE_ENDS = {("gpt-oss", 201088): [200012], ("gemma4", 262144): [1, 106, 50]}


def read_text(file: Path, name: str) -> str:
    """A text of the metadata, "" where the file has none. Raises `ModelLoadError`."""
    field = open_reader(file).fields.get(name)
    return "" if field is None else str(field.contents())


def read_values(file: Path, names: Iterable[str]) -> dict[str, Any]:
    """Values of the metadata by name, of those that the file has. Raises `ModelLoadError`."""
    fields = open_reader(file).fields
    try:
        return {name: fields[name].contents() for name in names if name in fields}
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{file} is damaged: {error}") from error


def read_head(file: Path) -> bytes:
    """The bytes before the tensors: metadata, names and places. Raises `ModelLoadError`."""
    reader = open_reader(file)
    return reader.data[: reader.data_offset].tobytes()


class _Reader(gguf.GGUFReader):
    """Passes over long arrays and those of text, whose items become an object each: a vocabulary
    would take seconds.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_item, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, size = GGUFValueType(raw_item[0]), 12
        values: list[NDArray[Any]] = []
        if item == GGUFValueType.STRING:
            data, at = self.data.data, orig_offs + size
            for _ in range(int(count[0])):
                at += 8 + int.from_bytes(data[at : at + 8], "little")
            size = at - orig_offs
        elif item in self.gguf_scalar_to_np:
            kind = self.gguf_scalar_to_np[item]
            if count[0] <= _MOST_NUMBERS:  # as many layers as a model may have
                values.append(self._get(orig_offs + size, kind, int(count[0])))
            size += int(count[0]) * np.dtype(kind).itemsize
        else:
            raise ValueError(f"an array of {item.name} is not supported")
        parts = [raw_item, count, *values]
        return size, parts, [2] if values else [], [GGUFValueType.ARRAY, item]


def open_reader(file: Path) -> gguf.GGUFReader:
    """Map a file, without its vocabulary. Raises `ModelLoadError`."""
    try:
        return _Reader(file)
    except FileNotFoundError:
        raise ModelLoadError(f"{file}: no such file") from None
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ModelLoadError(f"{file} is damaged: {error}") from error


class Metadata:
    """Fields by name without the architecture's prefix, every surprise a `ModelLoadError`."""

    def __init__(self, reader: gguf.GGUFReader, file: Path) -> None:
        self._reader, self._file = reader, file
        self.architecture = str(self._get("general.architecture", str))

    def error(self, problem: str) -> ModelLoadError:
        """The error of a file that has a problem."""
        return ModelLoadError(f"{self._file}: {problem}")

    def number(self, name: str) -> Any:  # noqa: ANN401 - an int or a float, as the file has it
        """A required number."""
        return self._get(f"{self.architecture}.{name}", (int, float))

    def optional(self, name: str, default: Any) -> Any:  # noqa: ANN401
        """The same, or text, where the file has it."""
        name = f"{self.architecture}.{name}"
        return self._get(name, (int, float, str)) if name in self._reader.fields else default

    def flags(self, name: str) -> list[bool]:
        """An array of them; empty where the file has none."""
        field = self._reader.fields.get(f"{self.architecture}.{name}")
        if field is None or field.types[0] != GGUFValueType.ARRAY or not field.data:
            return []
        return [bool(each) for each in field.contents()]

    def by_layer(self, name: str) -> list[int]:
        """Numbers of the layers, or one for all of them; a 0 where the file has none."""
        field = self._reader.fields.get(f"{self.architecture}.{name}")
        if field is None or field.types[0] != GGUFValueType.ARRAY:
            return [int(self.optional(name, 0))]
        return [int(each) for each in field.contents()] if field.data else [0]

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return any(each.name == name for each in self._reader.tensors)

    def tensor(self, name: str) -> list[float]:
        """The numbers of a small tensor; empty where the file has none."""
        found = next((each for each in self._reader.tensors if each.name == name), None)
        return [] if found is None else [float(each) for each in found.data.tolist()]

    def end_tokens(self, vocab_size: int) -> list[int]:
        """Tokens that end an answer."""
        names = (f"tokenizer.ggml.{name}" for name in _END_TOKENS)
        found = [self._get(name, int) for name in names if name in self._reader.fields]
        more = _MORE_ENDS.get((self.architecture, vocab_size), [])
        return list(dict.fromkeys((*found, *more)))

    def _get(self, name: str, kinds: type | tuple[type, ...]) -> Any:  # noqa: ANN401
        field = self._reader.fields.get(name)
        if field is None:
            raise self.error(f"{name} is missing")
        value = field.contents() if field.types[0] != GGUFValueType.ARRAY else None
        if not isinstance(value, kinds):
            raise self.error(f"{name} has an unexpected type")
        return value
