"""The engines: where each one lives, how it is started, what it is asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from .checkpoints import HOME
from .rows import Row

HERE = Path(__file__).parent
LOOK_UP_DEPTH = 8  # draft tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One column of the table. ``environment``: its folder's name; none for our own."""

    name: str
    script: str  # run_*.py
    environment: str
    converter: str = ""  # convert_*.py, where the engine wants a form of its own
    mode: str = ""
    depth: int = 0  # draft tokens of that mode
    kinds: tuple[str, ...] = ()  # of rows; all, if none is named
    dtypes: tuple[str, ...] = ("bf16",)
    min_batch: int = 1
    named_only: bool = False  # takes the rows alone that name it
    unwanted: tuple[str, ...] = ()  # packages whose builds quarrel with the engine's torch

    @property
    def python(self) -> Path:
        """Python of the engine's environment."""
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
        wanted = self.name in row.only if row.only or self.named_only else True
        known = row.setting.dtype in self.dtypes and (not self.kinds or row.kind in self.kinds)
        return wanted and known and row.batch >= self.min_batch and not self._is_doubled(row)

    def _is_doubled(self, row: Row) -> bool:
        return bool(self.mode) and row.setting.depth > 0  # the engine's plain way has that


_FORETOKEN = Engine(
    name="foretoken",
    script="run_foretoken.py",
    environment="",
    dtypes=("bf16", "int8", "int4"),
)
_TRANSFORMERS = Engine(
    name="transformers", script="run_transformers.py", environment="transformers"
)
_LLAMA_CPP = Engine(
    name="llama.cpp",
    script="run_llama_cpp.py",
    environment="llama_cpp",
    converter="convert_llama_cpp.py",
    dtypes=("bf16", "int8", "int4"),
)
_OPENVINO = Engine(
    name="openvino",
    script="run_openvino.py",
    environment="openvino",
    converter="convert_openvino.py",
    dtypes=("bf16", "int8", "int4"),
    unwanted=("torchvision",),
)
_VLLM = Engine(
    name="vllm",
    script="run_vllm.py",
    environment="vllm",
    converter="convert_vllm.py",
    dtypes=("bf16", "int8"),
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)


def _look_up(engine: Engine, mode: str) -> Engine:
    """One more way of an engine, for rows of text: it guesses by what was said before."""
    name = f"{engine.name}-{mode}"
    return replace(engine, name=name, mode=mode, depth=LOOK_UP_DEPTH, kinds=("text",))


ENGINES = (
    _FORETOKEN,
    _TRANSFORMERS,
    replace(_FORETOKEN, name="foretoken-base", mode="base", named_only=True),
    replace(
        _TRANSFORMERS,
        name="transformers-cb",
        mode="continuous",
        kinds=("decode", "burst"),
        min_batch=2,
    ),
    _look_up(_TRANSFORMERS, "lookup"),
    _LLAMA_CPP,
    _look_up(_LLAMA_CPP, "lookup"),
    _OPENVINO,
    _look_up(_OPENVINO, "lookup"),
    _VLLM,
    _look_up(_VLLM, "ngram"),
    _look_up(_VLLM, "suffix"),
)
OURS = ENGINES[0]
NAMES = tuple(engine.name for engine in ENGINES)


def find(names: list[str]) -> list[Engine]:
    """Engines by name, ours first in any case."""
    return [engine for engine in ENGINES if engine is OURS or engine.name in names]
