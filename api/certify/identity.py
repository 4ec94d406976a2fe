"""The machine, the libraries and the weights for which a certificate holds."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from ...core.model.formats.files import gguf_file, gguf_parts
from ...core.ops.machine.identity import machine_identity

LIBRARIES = ("torch", "transformers", "tokenizers", "llguidance", "numpy", "triton")
READ_BYTES = 1 << 22
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096


def machine(device: str) -> dict[str, str]:
    """Return the processor or GPU, the features that libraries detect, cores, memory and system."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return machine_identity(torch.device(device)) | {
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def libraries() -> dict[str, str]:
    """Return the versions of the libraries that can affect an answer; missing ones are left out."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def weight_hashes(path: Path) -> list[dict[str, object]]:
    """Return the name, size in bytes and SHA-256 of the config and of each file of weights."""
    return [
        {"file": each.name, "bytes": each.stat().st_size, "sha256": _sha256(each)}
        for each in _files(path)
    ]


def model_mark(path: Path) -> str:
    """Return a digest that tells models apart without reading all weights.

    It covers the sizes of the files and `NUM_SAMPLES` samples of each. Raises OSError.
    """
    digest = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "big"))
        with file.open("rb") as opened:
            for index in range(NUM_SAMPLES):
                opened.seek(index * max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    """Return the files of weights and the config of a model."""
    file = gguf_file(path)
    if file is not None:
        return list(gguf_parts(file))
    config = path / "config.json"
    return [*sorted(path.glob("*.safetensors")), *([config] if config.is_file() else [])]


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while data := opened.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()
