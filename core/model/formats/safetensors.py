"""Safetensors: the files of a folder, checked by their headers before any tensor is read.

Format: https://huggingface.co/docs/safetensors - eight bytes of header length, a JSON header, then
the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import ModelLoadError
from ...ops.quantize import StoredWeight
from ..description.fields import Fields, read_json
from ..description.tensors import EMBEDDING
from .files import INDEX_FILE, SINGLE_FILE, TensorEntry
from .nested import base_names
from .quantized import QuantizedTensor, Scheme, Stored, gather, is_passed_over, read_scheme

_ITEM_BYTES = {
    "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NO_WEIGHTS = ("I64", "BOOL")
Rename: TypeAlias = Callable[[Collection[str]], dict[str, str]]
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format


class SafetensorsCheckpoint:
    """The `Checkpoint` of a folder in Hugging Face layout.

    ``rename`` maps the text model's names to stored names; tensors that it leaves out do not belong
    to that model.
    """

    def __init__(self, folder: Path, rename: Rename = base_names) -> None:
        self.where = folder
        self.files = TensorFiles(folder)
        self._names = rename(self.files.shapes)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor; quantised matrices have the names of plain ones."""
        shapes = self.files.shapes
        return {name: shapes[stored] for name, stored in self._names.items()}

    @property
    def stored_dtype(self) -> str:
        """Dtype of the embedding, regardless of config.json; bfloat16 with quantised matrices."""
        if self.files.quantized:
            return "bfloat16"
        return _DTYPES[self.files.entries[self._names[EMBEDDING]].dtype]

    def read(self, name: str) -> StoredWeight:
        """Return a tensor on the CPU in its stored dtype.

        A quantised matrix is float32 if the kernels do not take it as it is stored. Raises
        `ModelLoadError`.
        """
        return self.files.read(self._names[name])

    def release(self) -> None:
        """Close the files; the next read opens them again."""
        self.files.release()


class TensorFiles:
    """The tensors of a folder. ``scheme``: quantisation of its matrices; None: not quantised.

    Only headers are read. Raises `ModelLoadError` for files that are missing, damaged or of an
    unsupported quantisation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, config = folder, folder / "config.json"
        self.scheme: Scheme | None = read_scheme(Fields(read_json(config), str(config)))
        self.entries: dict[str, TensorEntry] = {}
        self._integers: dict[str, TensorEntry] = {}
        self.quantized: dict[str, QuantizedTensor] = {}
        self._open: dict[Path, Any] = {}  # memory-mapped handles of safe_open
        for file, names in _files(folder).items():
            self._add(file, names)
        if self.scheme is not None:
            self.quantized = gather(self.scheme, Stored(self.entries, self._read))
        self._used = {part for each in self.quantized.values() for part in each.parts.values()}
        _refuse_odd(self.entries, self._used, is_quantised=self.scheme is not None)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor; quantised matrices have the names of plain ones."""
        plain = {
            name: entry.shape
            for name, entry in self.entries.items()
            if name not in self._used and not (self.scheme is not None and is_passed_over(name))
        }
        return plain | {name: each.shape for name, each in self.quantized.items()}

    def read(self, name: str) -> StoredWeight:
        """Return a tensor on the CPU in its stored dtype.

        A quantised matrix is float32 if the kernels do not take it as it is stored. Raises
        `ModelLoadError`.
        """
        found = self.quantized.get(name)
        if found is None:
            return self._read(name)
        return found.value({role: self._read(part) for role, part in found.parts.items()})

    def release(self) -> None:
        """Close the files; the next read opens them again."""
        self._open.clear()

    def read_integers(self, name: str) -> Tensor:
        """Return an int64 tensor that is not a weight. Raises `ModelLoadError` if it is missing."""
        if name not in self._integers:
            raise ModelLoadError(f"{self._folder} lacks tensors: {name} (int64)")
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        file = (self.entries.get(name) or self._integers[name]).file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from error
        return tensor

    def _add(self, file: Path, names: Collection[str] | None) -> None:
        entries = _read_header(file)
        absent = sorted(set(names or ()) - set(entries))
        if absent:
            raise ModelLoadError(
                f"{file} lacks {absent[0]}, which should be there according to {INDEX_FILE}"
            )
        placed = {name: each for name, each in entries.items() if names is None or name in names}
        self._integers |= {name: each for name, each in placed.items() if each.dtype == "I64"}
        self.entries |= {
            name: entry
            for name, entry in placed.items()
            if self.scheme is not None or _counts(entry)
        }


def _counts(entry: TensorEntry) -> bool:
    """Whether a tensor of a plain checkpoint may be a weight.

    Old checkpoints store positions and causal masks ``[1, 1, n, n]``, which are not read.
    """
    is_mask = entry.dtype == "U8" and len(entry.shape) == 4 and entry.shape[:2] == (1, 1)
    return not is_mask and entry.dtype not in _NO_WEIGHTS


def _refuse_odd(
    entries: Mapping[str, TensorEntry], used: Collection[str], *, is_quantised: bool
) -> None:
    """Raise `ModelLoadError` for tensors whose dtype needs a quantisation scheme."""
    for name, entry in entries.items():
        if entry.dtype in _DTYPES or name in used:
            continue
        if is_quantised and (entry.dtype in ("I64", "BOOL") or is_passed_over(name)):
            continue
        beside = "" if is_quantised else " in a checkpoint without quantization_config"
        raise ModelLoadError(
            f"{entry.file}: {name} has dtype {entry.dtype}; only {', '.join(_DTYPES)} are "
            f"supported{beside}"
        )


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Return a checkpoint's files and the tensors that the index assigns to each; None: all."""
    if (folder / INDEX_FILE).exists():
        return _indexed_files(folder)
    if (folder / SINGLE_FILE).exists():
        return {folder / SINGLE_FILE: None}
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    if pickles:
        raise ModelLoadError(
            f"{folder} has {pickles[0].name}, a pickle file, which could run any code; "
            "only safetensors are loaded"
        )
    raise ModelLoadError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _indexed_files(folder: Path) -> dict[Path, set[str] | None]:
    index = read_json(folder / INDEX_FILE).get("weight_map")
    is_map = isinstance(index, dict) and all(isinstance(f, str) for f in index.values())
    if not is_map or not index:
        raise ModelLoadError(f"{folder / INDEX_FILE}: weight_map must name a file for each tensor")
    files: dict[Path, set[str] | None] = {}
    for name, file_name in index.items():
        if Path(file_name).name != file_name:
            raise ModelLoadError(f"{folder / INDEX_FILE}: {file_name!r} is not a plain file name")
        names = files.setdefault(folder / file_name, set())
        assert names is not None  # An index lists the tensors of every file.
        names.add(name)
    return files


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the entries of a file; offsets are checked against its size to detect truncation."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelLoadError(f"{file} is damaged: its header does not fit the file")
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise ModelLoadError(f"{file.parent} has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is damaged: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{file} is damaged: its header is not a JSON object")
    space = size - 8 - length
    return {
        name: _entry(file, name, value, space)
        for name, value in header.items()
        if name != "__metadata__"
    }


def _entry(file: Path, name: str, value: Any, space: int) -> TensorEntry:  # noqa: ANN401 - JSON
    try:
        dtype, shape = str(value["dtype"]), tuple(int(n) for n in value["shape"])
        start, stop = (int(n) for n in value["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ModelLoadError(f"{file} is damaged: the header of {name} is incomplete") from None
    if dtype not in _ITEM_BYTES:
        supported = ", ".join(_ITEM_BYTES)
        raise ModelLoadError(f"{file}: {name} has dtype {dtype}; only {supported} are supported")
    if stop - start != _num_bytes(dtype, shape) or not 0 <= start <= stop <= space:
        raise ModelLoadError(f"{file} is damaged: the bytes of {name} do not lie within the file")
    return TensorEntry(file, dtype, shape)


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return _ITEM_BYTES[dtype] * math.prod(shape)
