"""machine_identity: properties of a machine that affect the bits of results.

Weights, kernels and options affect them, too; `Ops.identity` describes the kernels. Two processes
compute the same bits only if everything is equal.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from .device import cpu_flags

# Prefixes of environment variables that change how libraries compute: instruction sets of oneDNN
# and OpenBLAS, reproducibility of MKL, TF32 of cuBLAS, the assembler of Triton.
LIBRARY_SETTINGS = ("DNNL_", "ONEDNN_", "MKL_", "OPENBLAS_", "CUBLAS", "NVIDIA_TF32_", "TRITON_")


def machine_identity(device: torch.device) -> dict[str, str]:
    """Return names and versions of everything that affects computations on ``device``, by subject.

    The host is included for a GPU, too: it computes RoPE's frequencies and casts weights. The
    number of threads is this thread's current one; torch's sums may depend on it.
    """
    found = {
        "device": device.type,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "torch's CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "CPU": f"{platform.machine()} {_cpu_name()} {' '.join(sorted(cpu_flags()))}",
        "C library": " ".join(platform.libc_ver()),
        "settings of libraries": " ".join(_library_settings()),
    }
    if device.type == "cuda":
        return found | _card(device)
    return found | {"threads of torch": str(torch.get_num_threads())}


def _card(device: torch.device) -> dict[str, str]:
    """Return the GPU's name, compute capability and number of multiprocessors, and CUDA's version.

    Kernels choose their number of programs by the number of multiprocessors.
    """
    card = torch.cuda.get_device_properties(device)
    return {
        "GPU": f"{card.name} {card.major}.{card.minor} {card.multi_processor_count}",
        "CUDA": str(torch.version.cuda),
    }


def _cpu_name() -> str:
    """Return vendor and model by their Linux names; libraries choose kernels by both."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    pairs = (line.partition(":") for line in text.splitlines())
    values = {name.strip(): value.strip() for name, _, value in pairs}
    return f"{values.get('vendor_id', '')} {values.get('model name', '')}"


def _library_settings() -> list[str]:
    return sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(LIBRARY_SETTINGS)
    )
