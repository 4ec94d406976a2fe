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
    file = gguf_file(path)
    files = gguf_parts(file) if file is not None else sorted(path.glob("*.safetensors"))
    if file is None:
        files += [each for each in (path / "config.json",) if each.is_file()]
    return [
        {"file": each.name, "bytes": each.stat().st_size, "sha256": _sha256(each)} for each in files
    ]


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while data := opened.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()
