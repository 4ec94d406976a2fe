"""Compile the C kernels with the system's compiler, once per machine and version.

The library lies in a per-user cache under a name made of everything that shapes it: sources,
compiler, flags, and the CPU's features. ``FORETOKEN_CACHE`` names another cache folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias, get_args

Variant: TypeAlias = Literal["avx512", "avx2", "scalar"]

_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_TIMEOUT = 180  # seconds
# -ffp-contract=off: whether a product is fused must not depend on how a loop was unrolled.
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
_WARNINGS = ("-Wall", "-Wno-unknown-pragmas", "-Wno-psabi")
_VARIANT_FLAGS: dict[Variant, tuple[str, ...]] = {
    "avx512": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mtune=native"),
    "avx2": ("-march=x86-64-v3", "-mtune=native"),
    "scalar": ("-DFT_SCALAR",),
}
_NEEDED: dict[Variant, frozenset[str]] = {
    "avx512": frozenset(
        [
            "avx2",
            "fma",
            "f16c",
            "bmi2",
            "avx512f",
            "avx512bw",
            "avx512vl",
            "avx512dq",
            "avx512cd",
            "avx512_vnni",
            "avx512_bf16",
        ]
    ),
    "avx2": frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"]),
    "scalar": frozenset(),
}


class NativeBuildError(Exception):
    """The kernels cannot be had on this machine; the message says why in one line."""


def variants() -> tuple[Variant, ...]:
    """The variants that this CPU can run, the fastest first."""
    flags = cpu_flags()
    return tuple(v for v in get_args(Variant) if _NEEDED[v] <= flags)


def fastest_variant() -> Variant:
    """Raises `NativeBuildError` when only the portable one is left: torch is faster than that."""
    best = variants()[0]
    if best == "scalar":
        raise NativeBuildError(f"no kernels for this CPU ({platform.machine()})")
    return best


def build(variant: Variant) -> Path:
    """Path of the compiled library. Raises `NativeBuildError` when it cannot be built."""
    compiler = _find_compiler()
    flags = (*_FLAGS, *_VARIANT_FLAGS[variant], *_WARNINGS)
    target = _cache_dir() / f"kernels-{variant}-{_key(compiler, flags)}.so"
    if not target.exists():
        _compile([*compiler, *flags], target)
    return target


def _find_compiler() -> list[str]:
    """The compiler's command; CC may hold options as well."""
    asked = shlex.split(os.environ.get("CC", ""))
    for command in [asked] if asked else [[name] for name in _COMPILERS]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise NativeBuildError(f"no C compiler (tried {' '.join(asked) or ', '.join(_COMPILERS)})")


def _compile(command: list[str], target: Path) -> None:
    """Build beside the target and rename, so that another process never sees half a file."""
    sources = [str(path) for path in _sources() if path.suffix == ".c"]
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            output = Path(folder) / target.name
            _run([*command, *sources, "-o", str(output), "-lm"], timeout=_COMPILE_TIMEOUT)
            output.replace(target)
    except OSError as error:
        raise NativeBuildError(f"the cache folder cannot be written: {error}") from error


def _run(command: list[str], timeout: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"the C compiler failed: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error:" in line] or ["no message"]
        raise NativeBuildError(f"the C compiler failed: {lines[0]}")
    return done.stdout


def _key(compiler: list[str], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    version = _run([*compiler, "--version"], timeout=10)
    parts = [version, *compiler, *flags, platform.machine(), *sorted(cpu_flags())]
    digest.update("\0".join(parts).encode())
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _sources() -> list[Path]:
    folder = Path(__file__).parent
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))


def _cache_dir() -> Path:
    own = os.environ.get("FORETOKEN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"


@cache
def cpu_flags() -> frozenset[str]:
    """Features of the CPU by their names in Linux; none elsewhere, which leaves "scalar"."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split())
