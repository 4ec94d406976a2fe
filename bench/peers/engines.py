"""The engines: where each one lives, how it is started, what it is asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .rows import Row
from .shapes import HOME

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One column of the table. ``environment``: its folder's name; none for our own."""

    name: str
    script: str  # run_*.py
    environment: str
    converter: str = ""  # convert_*.py, where the engine wants a form of its own
    mode: str = ""
    kinds: tuple[str, ...] = ()  # of rows; all, if none is named
    dtypes: tuple[str, ...] = ("bf16",)
    min_batch: int = 1
    unwanted: tuple[str, ...] = ()  # packages whose builds quarrel with the engine's torch

    @property
    def python(self) -> Path:
        """Of its environment."""
        if not self.environment:
            return Path(sys.executable)
        return HOME / self.environment / "bin" / "python"

    @property
    def requirements(self) -> Path:
        """Pinned."""
        return HERE / f"requirements-{self.environment}.txt"

    @property
    def is_installed(self) -> bool:
        """Whether `setup` came to its end."""
        return not self.environment or (HOME / self.environment / ".done").is_file()

    def command(self, job: Path) -> list[str]:
        """Starts a worker."""
        if not self.environment:
            module = f"{__package__}.{self.script.removesuffix('.py')}"
            return [str(self.python), "-m", module, "--job", str(job)]
        return [str(self.python), str(HERE / self.script), "--job", str(job)]

    def takes(self, row: Row) -> bool:
        """Whether the row means anything for this engine."""
        wanted = not row.only or self.name in row.only
        known = row.setting.dtype in self.dtypes and (not self.kinds or row.kind in self.kinds)
        return wanted and known and row.batch >= self.min_batch and not self._is_doubled(row)

    def _is_doubled(self, row: Row) -> bool:
        return bool(self.mode) and row.setting.depth > 0  # the engine's plain way has that


ENGINES = (
    Engine(
        name="foretoken",
        script="run_foretoken.py",
        environment="",
        dtypes=("bf16", "int8", "int4"),
    ),
    Engine(name="transformers", script="run_transformers.py", environment="transformers"),
    Engine(
        name="transformers-cb",
        script="run_transformers.py",
        environment="transformers",
        mode="continuous",
        kinds=("decode", "burst"),
        min_batch=2,
    ),
    Engine(
        name="llama.cpp",
        script="run_llama_cpp.py",
        environment="llama_cpp",
        converter="convert_llama_cpp.py",
        dtypes=("bf16", "int8", "int4"),
    ),
    Engine(
        name="openvino",
        script="run_openvino.py",
        environment="openvino",
        converter="convert_openvino.py",
        dtypes=("bf16", "int8", "int4"),
        unwanted=("torchvision",),
    ),
    Engine(
        name="vllm",
        script="run_vllm.py",
        environment="vllm",
        converter="convert_vllm.py",
        dtypes=("bf16", "int8"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
)
OURS = ENGINES[0]
NAMES = tuple(engine.name for engine in ENGINES)


def find(names: list[str]) -> list[Engine]:
    """Engines by name, ours first in any case."""
    return [engine for engine in ENGINES if engine is OURS or engine.name in names]
