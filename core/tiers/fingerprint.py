"""Fingerprint of a model's KV: equal only if the same tokens get the same bits of KV.

`FingerprintParts` has a field for each of its inputs:

- ``weights``: CRC-32 of every 64 KiB of every tensor, with its name, its dtype and its shape, as it
  was read from safetensors or GGUF; of quantised tensors each array, of stacked experts each one.
  For transformers' modules, every parameter and buffer in the dtype of the computation. Random
  weights have no digest: ``load_format``, the config and torch's version determine them.
- ``config``: the resolved `DecoderConfig`, with the RoPE of every layer.
- ``decoder``: the code that computes the layers: the class of the operations and their versions,
  such as the file name of the native library, which depends on sources, compiler, flags and CPU,
  and its method of multiplying bfloat16; Triton's version. For transformers' modules the version of
  transformers and the text model's whole config.
- ``machine``: version of torch and of its CPU kernels, threads of torch, CPU, C library, settings
  of libraries in the environment; on a GPU its name and multiprocessors, and CUDA's version.
- ``code``: the Python sources of the engine that compute KV (`CODE`), and of heads (`HEAD_CODE`).
- ``dtype``, ``asked_dtype`` (the option: auto keeps weights in their stored dtype, and a dtype by
  name converts them), ``quantize``, ``exact``, ``load_format``.
- ``tower``: for a model with image input, version of transformers and the whole config.
- ``page_size`` and ``kv_codec``: layout of a page, and the rounding of its vectors.
- ``head``: config and tensors of the trained head whose KV is stored with the target's; None
  without one.

CRC-32 reads several GB/s, a cryptographic hash about one. CRC-32 does not resist files that are
made to collide: models may share a store only if the authors of all of them are trusted.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..ops.quantize import QuantizedStack, QuantizedWeight, StoredWeight

FINGERPRINT_BYTES, KERNELS_HASH_BYTES = 32, 8
_BLOCK = 1 << 16  # number of bytes of a tensor per checksum
_PACKAGE = Path(__file__).parents[2]
CODE = tuple(_PACKAGE / "core" / room for room in ("execution", "model", "ops"))
HEAD_CODE = (_PACKAGE / "draft" / "heads",)


class WeightsDigest:
    """Digest of the tensors of a model, by name; the order of reading does not matter.

    Call the object with each tensor that was read, and use the tensor that it returns: a returned
    stack of experts adds each expert to the digest when it is unpacked, which happens once.
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # number of bytes digested so far
        self._digests: dict[str, bytes] = {}

    def __call__(self, name: str, weight: StoredWeight) -> StoredWeight:
        """Add a tensor to the digest; return the tensor that the caller must use in its place."""
        if isinstance(weight, QuantizedStack):
            self._digests[name] = str(weight.count).encode()
            return QuantizedStack(weight.count, partial(self._one_of, name, weight))
        self._digests[name] = self._digest(weight)
        return weight

    def digest(self) -> bytes:
        """Return the digest of all tensors so far, `FINGERPRINT_BYTES` long."""
        found = sorted(self._digests.items())
        return _hashed([part for name, digest in found for part in (name.encode(), digest)])

    def _one_of(self, name: str, stack: QuantizedStack, index: int) -> QuantizedWeight:
        found = stack.one(index)
        self._digests[f"{name}[{index}]"] = self._digest(found)
        return found

    def _digest(self, weight: Tensor | QuantizedWeight) -> bytes:
        if isinstance(weight, Tensor):
            return self._digest_of_tensor(weight)
        kinds = " ".join(sorted(weight.kinds))
        return _hashed([kinds.encode(), *map(self._digest_of_tensor, weight.arrays())])

    def _digest_of_tensor(self, tensor: Tensor) -> bytes:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        self.num_bytes += len(data)
        starts = range(0, len(data), _BLOCK)
        checks = array("I", (zlib.crc32(data[start : start + _BLOCK]) for start in starts))
        return _hashed([f"{tensor.dtype} {tuple(tensor.shape)}".encode(), checks.tobytes()])


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """Parts of a trained head: the digest of its tensors and its config as text."""

    weights: bytes
    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintParts:
    """All inputs that change a bit of a page's KV; the module's docstring describes each.

    Texts are compared exactly.
    """

    weights: bytes
    config: str
    decoder: Mapping[str, str]
    machine: Mapping[str, str]
    code: bytes
    dtype: str
    asked_dtype: str
    quantize: str
    exact: str
    load_format: str
    page_size: int  # tokens in a page
    kv_codec: str
    head: HeadParts | None = None
    tower: Mapping[str, str] | None = None


def kv_fingerprint(parts: FingerprintParts) -> bytes:
    """Return the fingerprint, `FINGERPRINT_BYTES` long; it differs if any part does."""
    text = json.dumps(asdict(parts), sort_keys=True, default=bytes.hex)
    return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES).digest()


def kernels_name(decoder: Mapping[str, str], machine: Mapping[str, str], code: bytes) -> str:
    """Return a short text that identifies the kernels: the decoder's names and a hash.

    The hash covers the arguments, which are fields of `FingerprintParts`.
    """
    text = json.dumps([decoder, machine, code.hex()], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=KERNELS_HASH_BYTES).hexdigest()
    return " ".join([*decoder.values(), digest])


def code_digest(folders: Iterable[Path]) -> bytes:
    """Return a digest of the names and contents of the Python files below some folders."""
    files = [(path, path.relative_to(each.parent)) for each in folders for path in _files(each)]
    return _hashed(
        [part for path, name in files for part in (name.as_posix().encode(), path.read_bytes())]
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _hashed(parts: Iterable[bytes]) -> bytes:
    """Return a hash of ``parts`` and their lengths, so that boundaries between parts matter."""
    found = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()
