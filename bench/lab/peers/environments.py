"""One command makes an engine's environment and its form of the checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .checkpoints import HOME, SHAPES
from .engines import HERE, Engine
from .rows import Row


def set_up(engines: Iterable[Engine], rows: Sequence[Row]) -> bool:
    """Install, and convert what the rows want; a failure is printed in one line and skipped.

    Returns whether all went well.
    """
    for shape in {row.setting.shape for row in rows}:
        SHAPES[shape].write()
    wanted = [engine for engine in engines if engine.environment]
    return all([_set_up_one(engine, rows) for engine in wanted])  # noqa: C419 - try every one


def forms(engine: Engine, rows: Iterable[Row]) -> dict[str, list[str]]:
    """Forms that an engine with a converter needs, by shape: ``int8``, ``bf16-draft``."""
    found: dict[str, set[str]] = {}
    for row in filter(engine.takes, rows if engine.converter else ()):
        suffixes = ("", "-draft") if row.setting.depth else ("",)
        found.setdefault(row.setting.shape, set()).update(row.setting.dtype + s for s in suffixes)
    return {shape: sorted(names) for shape, names in found.items()}


def _set_up_one(engine: Engine, rows: Sequence[Row]) -> bool:
    log = HOME / f"{engine.environment}.log"
    try:
        _install(engine, log)
        for shape, names in forms(engine, rows).items():
            converter = str(HERE / engine.converter)
            _run([str(engine.python), converter, str(SHAPES[shape].folder), *names], log)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{engine.name}: skipped: {error}; see {log}", flush=True)
        return False
    print(f"{engine.name}: ready", flush=True)
    return True


def _install(engine: Engine, log: Path) -> None:
    """A fresh venv whenever the requirements changed."""
    done = HOME / engine.environment / ".done"
    wanted = engine.requirements.read_text(encoding="utf-8")
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    print(f"{engine.name}: installing into {done.parent}", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(done.parent)], log)
    pip = [str(engine.python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "-r", str(engine.requirements)], log)
    if engine.unwanted:
        _run([*pip, "uninstall", "-y", *engine.unwanted], log)
    done.write_text(wanted, encoding="utf-8")


def _run(command: list[str], log: Path) -> None:
    env = os.environ | {"CMAKE_BUILD_PARALLEL_LEVEL": "2", "HF_HUB_OFFLINE": "1"}
    with log.open("a", encoding="utf-8") as out:
        subprocess.run(command, stdout=out, stderr=out, check=True, env=env)
