"""machine_identity: what shapes the bits of results besides weights, kernels and options.

Two processes compute the same bits only where all of it is equal. The kernels' own part is
`Ops.identity`.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from .device import cpu_flags

# Libraries read how they compute from variables with these beginnings: instruction sets of oneDNN
# and OpenBLAS, reproducibility of MKL, TF32 of cuBLAS, the assembler of Triton.
LIBRARY_SETTINGS = ("DNNL_", "ONEDNN_", "MKL_", "OPENBLAS_", "CUBLAS", "NVIDIA_TF32_", "TRITON_")


def machine_identity(device: torch.device) -> dict[str, str]:
    """Names and versions by what they are of, for computations on ``device``.

    The host counts for a GPU, too: it computes RoPE's frequencies and casts weights. The number of
    threads is the one that this thread has now; torch's sums may depend on it.
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
    """The GPU: its name, what it can, and how many programs kernels are launched with."""
    card = torch.cuda.get_device_properties(device)
    return {
        "GPU": f"{card.name} {card.major}.{card.minor} {card.multi_processor_count}",
        "CUDA": str(torch.version.cuda),
    }


def _cpu_name() -> str:
    """Vendor and model as Linux names them: libraries choose kernels by the vendor, too."""
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
