"""Writes docs/model-types.md: ``PYTHONPATH=tests python -m support.models_page``.

A test compares the page with it.
"""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

from foretoken.api.build.memory import PROGRAM_BYTES, USUAL_TOKENS, room_for
from foretoken.core.config import EngineConfig
from foretoken.core.model.fallback.transformers_loader import OTHER_ENGINE, REFUSED
from foretoken.core.model.families.registry import MODEL_FAMILIES, TEXT_FAMILIES
from foretoken.core.model.formats.gguf_architectures import ARCHITECTURES, GGUF_TYPES
from foretoken.core.model.report import ModelReport, inspect_model
from foretoken.core.ops.quantize import Quantize
from support.known_models import KNOWN
from support.tiny_models import RECURRENT, TYPES

_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
_MACHINES = (8, 16, 32)  # GB of memory
_USABLE = 0.85  # of it, beside the system
_MEMORY_ROWS = (
    "Qwen3 0.6B", "Llama 3.2 1B", "SmolLM3 3B", "Gemma 3 4B", "Qwen2.5 7B", "Llama 3.1 8B",
    "Qwen3 8B", "Phi-4", "Qwen3.5 27B", "Qwen3 30B-A3B", "Gemma 4 31B",
)  # fmt: skip
PAGE = Path(__file__).resolve().parents[2] / "docs" / "model-types.md"
HERE = Path(__file__).resolve().parent / "model_types_page.md"


def page() -> str:
    """Return the text of model_types_page.md with its tables filled in."""
    text = HERE.read_text("utf-8")
    tables = {
        "FAMILIES": _families(),
        "TYPES": _names(TYPES),
        "NUM_TYPES": str(len(TYPES)),
        "NUM_OWN": str(len(MODEL_FAMILIES.keys() & set(TYPES))),
        "RECURRENT": _names(RECURRENT),
        "NUM_RECURRENT": str(len(RECURRENT)),
        "GGUF": _names(ARCHITECTURES),
        "KNOWN": _known(),
        "MEMORY": _memory(),
        "USUAL_TOKENS": f"{USUAL_TOKENS:,}",
        "PROGRAM": f"{PROGRAM_BYTES >> 20} MiB",
        "USABLE": f"{100 * _USABLE:.0f} %",
        "REFUSED": _refused(),
    }
    for name, table in tables.items():
        text = text.replace(f"<!-- {name} -->", table)
    return text


def _names(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in sorted(names)), 110)


def _families() -> str:
    rows = ["| model type | formats | backends | bits in any batch | tested against |", _line(5)]
    rows += [
        f"| `{name}` | {_formats(name)} | {_backends(name)} | the same | transformers |"
        for name in (*MODEL_FAMILIES, *TEXT_FAMILIES)
    ]
    rows += [
        "| all below | safetensors; GGUF of those listed below"
        " | torch, native on a CPU; torch on a GPU, not yet run there"
        " | measured at the start; the same for the tiny models of the tests | transformers |"
    ]
    return "\n".join(rows)


def _backends(model_type: str) -> str:
    """Triton's kernels take no heads of several sizes and no latents."""
    is_torchs = model_type in ("gemma4_text", "gemma4_unified_text", *_LATENT)
    return "torch, native" if is_torchs else "torch, native, Triton"


def _formats(model_type: str) -> str:
    return "safetensors, GGUF" if model_type in GGUF_TYPES else "safetensors"


def _known() -> str:
    rows = ["| model | path | format | parameters | in bf16 | KV a token | state | context |"]
    rows.append(_line(8))
    rows += [_known_row(name, _report(config)) for name, config in KNOWN.items()]
    return "\n".join(rows)


def _report(config: dict[str, object]) -> ModelReport:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        return inspect_model(Path(folder))


def _known_row(name: str, report: ModelReport) -> str:
    if report.path is None:
        return f"| {name} | refused | | | | | | |"
    kv = report.kv_bytes_per_token
    assert kv is not None
    state = _size(report.state_bytes) if report.state_bytes else ""
    return (
        f"| {name} | {report.path} | {report.quantization or 'plain'}"
        f" | {report.num_parameters / 1e9:.2f} B"
        f" | {2 * report.num_parameters / 2**30:.1f} GiB | {kv / 2**10:.0f} KiB | {state}"
        f" | {report.max_model_len:,} |"
    )


def _memory() -> str:
    formats: tuple[tuple[str, Quantize], ...] = (
        ("16 bits", "none"), ("8 bits", "int8"), ("4 bits", "int4"),
    )  # fmt: skip
    heads = " | ".join(f"{name}: weights, in all" for name, _ in formats)
    rows = [f"| model | KV of 1,024 tokens | {heads} |", _line(5)]
    for name in _MEMORY_ROWS:
        report = _report(KNOWN[name])
        assert report.kv_bytes_per_token is not None
        cells = " | ".join(_fit(report, quantize) for _, quantize in formats)
        rows.append(f"| {name} | {report.kv_bytes_per_token * 1024 / 2**20:.0f} MiB | {cells} |")
    return "\n".join(rows)


def _fit(report: ModelReport, quantize: Quantize) -> str:
    """Weights, all that a conversation needs, and the smallest usual machine that has it."""
    room = room_for(report, EngineConfig(quantize=quantize))
    total = room.weights + room.kv + PROGRAM_BYTES
    machine = next((each for each in _MACHINES if total <= _USABLE * each * 2**30), None)
    where = "more" if machine is None else f"{machine} GB"
    return f"{room.weights / 2**30:.1f}, {total / 2**30:.1f} GiB: {where}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} KiB"


def _refused() -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    rows = ["| refused | why | instead |", _line(3)]
    rows += [
        f"| {', '.join(names)} | {reason} | {OTHER_ENGINE} |" for reason, names in by_reason.items()
    ]
    return "\n".join(rows)


def _line(columns: int) -> str:
    return "|---" * columns + "|"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
