"""Sets up an engine's environment and its form of a checkpoint in one command."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from .checkpoints import HOME, Checkpoint

HERE = Path(__file__).parent
SOURCE = {"llama.cpp": "llama_cpp", "openvino": "openvino", "vllm": "vllm"}
"""Environments by engine; each has a requirements file and a converter with its name."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose builds do not match the engine's torch."""
LLAMA_CPP = "llama-cpp-python==0.3.36"  # The package's sources include llama.cpp's.
CMAKE_FLAGS = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI", "OPENSSL")


def python(environment: str) -> Path:
    """Return the path of an environment's Python."""
    return HOME / environment / "bin" / "python"


def set_up(engines: Iterable[str], checkpoint: Checkpoint, dtype: str) -> bool:
    """Install and convert; return whether every engine succeeded.

    A failure is printed in one line, and the next engine follows.
    """
    checkpoint.write()
    return all([_set_up_one(engine, checkpoint, dtype) for engine in engines])  # noqa: C419


def _set_up_one(engine: str, checkpoint: Checkpoint, dtype: str) -> bool:
    environment = SOURCE[engine]
    log = HOME / f"{environment}.log"
    forms = [dtype, f"{dtype}-draft"] if checkpoint.has_draft else [dtype]
    try:
        _install(environment, log)
        converter = str(HERE / f"convert_{environment}.py")
        _run([str(python(environment)), converter, str(checkpoint.folder), *forms], log)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{engine}: skipped: {error}; see {log}", flush=True)
        return False
    print(f"{engine}: ready", flush=True)
    return True


def _install(environment: str, log: Path) -> None:
    """Make a fresh venv if the requirements changed."""
    home = HOME / environment
    done, requirements = home / ".done", HERE / f"requirements-{environment}.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    print(f"{environment}: installing into {home}", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(home)], log)
    pip = [str(python(environment)), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "-r", str(requirements)], log)
    if environment == "llama_cpp":
        _build_llama_cpp(home, pip, log)
    else:
        _run([*pip, "uninstall", "-y", *UNWANTED], log)
    done.write_text(wanted, encoding="utf-8")


def _build_llama_cpp(home: Path, pip: Sequence[str], log: Path) -> None:
    """Compile llama.cpp's server and quantiser for this machine, into ``bin``."""
    sources = ["--no-deps", "--no-binary", ":all:", "--dest", str(home), LLAMA_CPP]
    _run([*pip, "download", *sources], log)
    (archive,) = home.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(home, filter="data")
    (source,) = home.glob("llama_cpp_python-*/vendor/llama.cpp")
    source.rename(home / "source")
    build, cmake = str(home / "build"), str(home / "bin" / "cmake")
    flags = [f"-DLLAMA_{name}=OFF" for name in CMAKE_FLAGS]
    flags += ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"]
    _run([cmake, "-S", str(home / "source"), "-B", build, *flags], log)
    names = ("llama-server", "llama-quantize")
    _run([cmake, "--build", build, "--parallel", "2", "--target", *names], log)
    for name in names:
        (home / "build" / "bin" / name).rename(home / "bin" / name)


def _run(command: Sequence[str], log: Path) -> None:
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    with log.open("a", encoding="utf-8") as out:
        subprocess.run(command, stdout=out, stderr=out, check=True, env=env)
