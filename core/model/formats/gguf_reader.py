"""The head of a GGUF file: its metadata, and the names, types and offsets of its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Each count, length and offset is
checked against the size of the file before it is used. So the size bounds time and memory, even for
a damaged or hostile file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from gguf import GGUFValueType as ValueType
from numpy.typing import NDArray

from ...errors import ModelLoadError
from .files import shown_names

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_LFS = b"version https://git-lfs"
_MOST_NUMBERS = 4096  # longest array that is read: one number per layer of a model
_MOST_DIMENSIONS = 4
_MOST_NAME_BYTES = 1024
_LEAST_FIELD = 8 + 4 + 1  # minimum bytes of a field: name length, type, value

# bytes: name length, number of dimensions, one dimension, type, offset
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8
_NUMBERS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_WHOLE: dict[GgmlType, type[np.generic]] = {  # types without blocks
    GgmlType.F32: np.float32,
    GgmlType.F16: np.float16,
    GgmlType.F64: np.float64,
    GgmlType.I8: np.int8,
    GgmlType.I16: np.int16,
    GgmlType.I32: np.int32,
    GgmlType.I64: np.int64,
}
_REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Types that llama.cpp has removed, by number."""


class _DamagedError(Exception):
    """Error of a file whose bytes contradict each other; the message says where."""


class SkippedArray(NamedTuple):
    """An array of strings or of many numbers whose items are not read, such as a vocabulary."""

    num_items: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file; ``shape`` has the innermost dimension first, like the file."""

    name: str
    tensor_type: GgmlType
    shape: tuple[int, ...]
    stored: NDArray[np.uint8]  # memory-mapped bytes

    @property
    def data(self) -> NDArray[Any]:
        """The numbers, or the bytes of block types, the outermost dimension first."""
        shape = self.shape[::-1]
        if (kind := _WHOLE.get(self.tensor_type)) is not None:
            return self.stored.view(kind).reshape(shape)
        return self.stored.reshape(gguf.quant_shape_to_byte_shape(shape, self.tensor_type))


class _TensorEntry(NamedTuple):
    """The entry of a tensor in the head of a file, before its bytes are located."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int  # offset in bytes from the end of the head


class GgufReader:
    """A memory-mapped GGUF file. Raises `ModelLoadError` for a damaged or missing file.

    ``values``: the metadata by name, with strings as bytes. ``head``: the bytes before the tensors.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._data = _mapped(file)
            cursor = _Cursor(self._data.data)
            num_tensors = _read_start(cursor)
            num_values = cursor.count("key/value pairs", _LEAST_FIELD)
            self.values = dict(_read_values(cursor, num_values))
            entries = _read_entries(cursor, num_tensors)
            start = _aligned(cursor.at, self._alignment())
            self.head = self._data[:start].tobytes()
            self.tensors = self._find(entries, start)
        except _DamagedError as error:
            raise ModelLoadError(f"{file} is damaged: {error}") from None
        except OSError as error:
            raise ModelLoadError(f"{file} cannot be read: {error.strerror or error}") from None

    def get(self, name: str) -> Any:  # noqa: ANN401 - whatever the file has
        """Return a value of the metadata; None if it is absent or a `SkippedArray`."""
        value = self.values.get(name)
        if isinstance(value, SkippedArray):
            return None
        if not isinstance(value, bytes):
            return value
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ModelLoadError(f"{self.file} is damaged: {name} is not valid UTF-8") from None

    def release(self) -> None:
        """Unmap the pages read so far; tensors in use map them again."""
        pages = getattr(self._data, "_mmap", None)
        if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED)

    def _alignment(self) -> int:
        """Return the alignment of tensors in bytes."""
        given = self.values.get("general.alignment", 32)
        if not isinstance(given, int) or given < 1 or given & (given - 1):
            raise _DamagedError(f"general.alignment must be a power of two, not {given!r}")
        return given

    def _find(self, entries: list[_TensorEntry], start: int) -> list[GgufTensor]:
        """Return the tensors of the file. Raises `ModelLoadError` for unknown types."""
        known = {int(kind) for kind in GgmlType}
        for kind in {entry.kind for entry in entries} - known:
            names = [entry.name for entry in entries if entry.kind == kind]
            called = _REMOVED.get(kind, f"number {kind}")
            raise unsupported_type(self.file, called, names)
        return [self._cut(entry, start) for entry in entries]

    def _cut(self, entry: _TensorEntry, start: int) -> GgufTensor:
        kind = GgmlType(entry.kind)
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        if entry.shape[0] % block:
            shown = f"rows of {entry.shape[0]:,} numbers"
            raise _DamagedError(f"{entry.name} has {shown}, but {kind.name} has blocks of {block}")
        begin = start + entry.offset
        end = begin + math.prod(entry.shape) // block * num_bytes
        if end > len(self._data):
            size = f"the file has {len(self._data):,} bytes"
            raise _DamagedError(f"{entry.name} ends at byte {end:,}, but {size}: is it cut off?")
        return GgufTensor(entry.name, kind, entry.shape, self._data[begin:end])


def open_gguf(file: Path) -> GgufReader:
    """Open a file, or return the last call's reader if the file is the same and unchanged.

    Skipping a vocabulary takes 0.25 s, and loading a model opens its file several times. Raises
    `ModelLoadError`.
    """
    try:
        status = file.stat()
    except OSError:
        return GgufReader(file)  # The reader raises the right error.
    return _opened(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)
def _opened(file: Path, mtime_ns: int, size: int) -> GgufReader:  # noqa: ARG001 - of the key
    return GgufReader(file)


def unsupported_type(file: Path, kind: str, names: Iterable[str]) -> ModelLoadError:
    """Return the error for tensors of an unsupported type."""
    return ModelLoadError(
        f"{file}: the quantisation {kind} of {shown_names(list(names))} is not supported; use "
        "another file of the model"
    )


class _Cursor:
    """A cursor over the bytes of a file. Raises `_DamagedError` for a read beyond the end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    @property
    def left(self) -> int:
        """Bytes between the cursor and the end."""
        return len(self.data) - self.at

    def take(self, num_bytes: int, what: str) -> memoryview:
        """Return the next bytes and advance."""
        if num_bytes > self.left:
            raise _DamagedError(
                f"{what} takes {num_bytes:,} bytes at byte {self.at:,}, but {self.left:,} are left"
            )
        begin, self.at = self.at, self.at + num_bytes
        return self.data[begin : self.at]

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        """Read and return the numbers of a `struct` format."""
        whole = f"<{form}"
        return struct.unpack(whole, self.take(struct.calcsize(whole), what))

    def number(self, form: str, what: str) -> Any:  # noqa: ANN401 - as the form says
        """Read and return one number of a `struct` format."""
        return self.numbers(form, what)[0]

    def count(self, what: str, least: int) -> int:
        """Read and return a count of items, each of which takes at least ``least`` bytes.

        Raises `_DamagedError` if the file is too short for so many items.
        """
        found: int = self.number("Q", f"the number of {what}")
        if found * least > self.left:
            raise _DamagedError(f"it declares {found:,} {what}, but {self.left:,} bytes are left")
        return found

    def text(self, what: str) -> bytes:
        """Read a string, which is stored as its length and then its bytes."""
        return bytes(self.take(self.number("Q", f"the length of {what}"), what))

    def skip_texts(self, count: int, what: str) -> None:
        """Skip ``count`` strings in one loop: a vocabulary may have 200,000."""
        data, at, end = self.data, self.at, len(self.data)
        for _ in range(count):
            at += 8 + int.from_bytes(data[at : at + 8], "little")
            if at > end:
                raise _DamagedError(
                    f"a string of {what} ends at byte {at:,}, but the file has {end:,}"
                )
        self.at = at

    def name(self, what: str) -> str:
        """Read a name, and return it if it is safe to show in errors; otherwise raise."""
        length: int = self.number("Q", f"the length of {what}")
        if length > _MOST_NAME_BYTES:
            raise _DamagedError(f"{what} has {length:,} bytes, more than {_MOST_NAME_BYTES}")
        found = str(self.take(length, what), "utf-8", "replace")
        if not found.isprintable() or "\ufffd" in found:
            raise _DamagedError(f"{what} is not printable UTF-8 text")
        return found


def _mapped(file: Path) -> NDArray[np.uint8]:
    """Map a file into memory. Raises `ModelLoadError` if it is missing or empty."""
    if not file.exists():
        raise ModelLoadError(f"{file}: no such file")
    if not file.is_file():
        raise ModelLoadError(f"{file} is not a file")
    if not file.stat().st_size:
        raise ModelLoadError(f"{file} is empty")
    return np.memmap(file, mode="r")


def _read_start(cursor: _Cursor) -> int:
    """Read the start of a file and return its number of tensors."""
    begin = bytes(cursor.data[: len(_LFS)])
    if begin == _LFS:
        raise _DamagedError("it is a Git LFS pointer instead of the file; run git lfs pull")
    if begin[:4] != _MAGIC:
        raise _DamagedError(f"it is not a GGUF file: it begins with {begin[:4]!r}")
    cursor.at = 4
    version: int = cursor.number("I", "the version")
    if version & 0xFFFF == 0:
        raise _DamagedError("it was written by a big-endian machine, or its version is 0")
    if version not in _VERSIONS:
        raise _DamagedError(f"format version {version} is not supported; only 2 and 3 are")
    return cursor.count("tensors", _LEAST_TENSOR)


def _read_values(cursor: _Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in range(count):
        name = cursor.name(f"the name of value {number}")
        if name in found:
            raise _DamagedError(f"{name} occurs twice")
        found[name] = _read_value(cursor, name, cursor.number("I", f"the type of {name}"))
    return found


def _read_value(cursor: _Cursor, name: str, kind: int) -> Any:  # noqa: ANN401
    if kind == ValueType.STRING:
        return cursor.text(name)
    if kind == ValueType.ARRAY:
        return _read_array(cursor, name)
    return cursor.number(_form(name, kind), name)


def _read_array(cursor: _Cursor, name: str) -> list[Any] | SkippedArray:
    kind: int = cursor.number("I", f"the type of items of {name}")
    if kind == ValueType.STRING:
        num_items = cursor.count(f"texts of {name}", 8)
        cursor.skip_texts(num_items, name)
        return SkippedArray(num_items)
    form = _form(name, kind)
    size = struct.calcsize(form)
    num_items = cursor.count(f"items of {name}", size)
    if num_items > _MOST_NUMBERS:
        cursor.take(num_items * size, name)
        return SkippedArray(num_items)
    return list(cursor.numbers(f"{num_items}{form}", name))


def _form(name: str, kind: int) -> str:
    """Return the `struct` format of a number type."""
    if kind not in _NUMBERS:
        raise _DamagedError(f"{name} has the unknown type {kind}")
    return _NUMBERS[ValueType(kind)]


def _read_entries(cursor: _Cursor, count: int) -> list[_TensorEntry]:
    found: dict[str, _TensorEntry] = {}
    for number in range(count):
        name = cursor.name(f"the name of tensor {number}")
        if name in found:
            raise _DamagedError(f"the tensor {name} occurs twice")
        num_dimensions: int = cursor.number("I", f"the dimensions of {name}")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise _DamagedError(f"{name} has {num_dimensions} dimensions, not 1 to 4")
        shape = cursor.numbers(f"{num_dimensions}Q", f"the shape of {name}")
        if 0 in shape:
            raise _DamagedError(f"{name} has the empty shape {list(shape)}")
        kind, offset = cursor.numbers("IQ", f"the type and place of {name}")
        found[name] = _TensorEntry(name, kind, shape, offset)
    return list(found.values())


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
