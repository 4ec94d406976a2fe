"""Find the packaged C kernels, or compile them once with the system's compiler.

The wheel for Linux on x86-64 has compiled libraries beside the sources. Otherwise the library is in
a per-user cache under a name derived from everything that affects it: sources, compiler, flags and
the CPU's features. ``FORETOKEN_CACHE`` names another cache folder, ``FORETOKEN_NATIVE_VARIANT`` a
variant other than the fastest, and ``CC`` a compiler, which is then used in spite of packaged
libraries.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import get_args

from ...startup import COMPILING, on_progress
from ..machine.cache_folder import cache_folder, whoever_writes
from ..machine.device import cpu_flags
from .recipe import (
    AVX512_FLAGS,
    FLAGS,
    FOLDER,
    PACKAGED,
    VARIANT_FLAGS,
    WARNINGS,
    Variant,
    add_sources,
    compile_library,
    is_intact,
    packaged_name,
    seal,
    sources,
)

logger = logging.getLogger(__name__)

SETTING = "FORETOKEN_NATIVE_VARIANT"
EMULATION: Path | None = None
"""C source of the emulated matrix unit. Tests set it; without it ``amx-emulated`` cannot run."""

_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_TIMEOUT = 300  # seconds per file
_AVX2 = frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"])
_AVX512 = _AVX2 | {
    *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni", "avx512_bf16")
}
_NEEDED: dict[Variant, frozenset[str]] = {
    "amx": _AVX512 | {"amx_tile", "amx_bf16", "amx_int8"},
    "avx512": _AVX512,
    "avx2": _AVX2,
    "scalar": frozenset(),
    "amx-emulated": _AVX2,
}
# arch_prctl on x86-64, and its arguments that request the tile registers
_ARCH_PRCTL = 158
_REQUEST_STATE, _TILE_DATA = 0x1023, 18


class NativeBuildError(Exception):
    """The kernels are unavailable on this machine; the message says why in one line."""


def variants() -> tuple[Variant, ...]:
    """Return the variants that this process can run, fastest first, without the emulated one."""
    return tuple(v for v in get_args(Variant) if v != "amx-emulated" and can_run(v))


def can_run(variant: Variant) -> bool:
    """Whether the CPU has the variant's features and Linux permits AMX tiles if it needs them."""
    if variant == "amx-emulated" and EMULATION is None:
        return False
    return _NEEDED[variant] <= cpu_flags() and (variant != "amx" or tiles_permitted())


@cache
def tiles_permitted() -> bool:
    """Request AMX tiles from Linux, once for all threads of the process; return whether granted.

    The CPU's flags are not enough: without permission the first tile instruction ends the process.
    """
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        return False
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    system_call.restype = ctypes.c_long
    arguments = (_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)
    permitted: bool = system_call(*map(ctypes.c_long, arguments)) == 0
    if not permitted and _NEEDED["amx"] <= cpu_flags():
        error = os.strerror(ctypes.get_errno())
        logger.warning(
            "Linux does not permit the use of AMX (%s): using the AVX-512 kernels", error
        )
    return permitted


def engine_variants() -> tuple[Variant, ...]:
    """Return the variants to try for the engine: the one named by `SETTING`, else fastest first.

    Raises `NativeBuildError` if the named variant is unknown or cannot run here, or if only the
    scalar variant can: torch is faster.
    """
    requested = os.environ.get(SETTING, "auto")
    if requested == "auto":
        found = tuple(variant for variant in variants() if variant != "scalar")
        if not found:
            raise NativeBuildError(f"there are no kernels for this CPU ({platform.machine()})")
        return found
    for variant in get_args(Variant):
        if variant == requested and can_run(variant):
            return (variant,)
    raise NativeBuildError(
        f"{SETTING} is {requested}, but this machine runs {', '.join(variants())}"
    )


def load(variant: Variant) -> ctypes.CDLL:
    """Load the packaged kernels if there are any, else build and load them.

    With ``CC`` set, building is tried first. If the first way fails, the second one is tried and
    the log says so. Raises `NativeBuildError` if all ways fail.
    """
    ways = [("using the compiled kernels", _load_built)]
    if variant in PACKAGED and (FOLDER / packaged_name(variant)).exists():
        packaged = ("using the packaged kernels", _load_packaged)
        ways.insert(1 if os.environ.get("CC") else 0, packaged)
    failed: list[str] = []
    for taken, way in ways:
        try:
            library = way(variant)
        except (NativeBuildError, OSError) as error:
            failed.append(str(error))
            continue
        if failed:
            logger.warning("%s: %s", taken, failed[0])
        return library
    raise NativeBuildError(", and ".join(failed))


def _load_packaged(variant: Variant) -> ctypes.CDLL:
    """Load a packaged library.

    Raises `NativeBuildError` for a damaged library, `OSError` for one of another system.
    """
    packaged = FOLDER / packaged_name(variant)
    if not is_intact(packaged):
        raise NativeBuildError(f"{packaged.name} is damaged")
    return ctypes.CDLL(str(packaged))


def _load_built(variant: Variant) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(variant)))


def build(variant: Variant) -> Path:
    """Return the path of the compiled library, and compile it if it is missing.

    Raises `NativeBuildError` if it cannot be built.
    """
    flags = (*FLAGS, *variant_flags(variant), *WARNINGS)
    return _built(f"kernels-{variant}", flags, _sources(variant))


def load_host() -> ctypes.PyDLL:
    """Load the functions of kernels/host, whose calls keep the GIL.

    Packaged kernels have them; otherwise these files alone are compiled, in about a second. Raises
    `NativeBuildError` or `OSError`.
    """
    packaged = FOLDER / packaged_name("scalar")
    if is_intact(packaged) and not os.environ.get("CC"):
        return ctypes.PyDLL(str(packaged))
    files = [path for path in sources() if path.parent.name == "host" or path.name == "common.h"]
    return ctypes.PyDLL(str(_built("host", (*FLAGS, *WARNINGS), files)))


def _built(name: str, flags: Sequence[str], files: Sequence[Path]) -> Path:
    compiler = _find_compiler()
    try:
        target = cache_folder() / f"{name}-{_key(compiler, flags, files)}.so"
        if not _may_load(target):
            _compile([*compiler, *flags], files, target)
    except OSError as error:
        message = f"cannot write to the cache folder: {error}; set FORETOKEN_CACHE to another"
        raise NativeBuildError(message) from error
    return target


def _may_load(library: Path) -> bool:
    """Whether a compiled library exists, is intact, and cannot have been written by other users."""
    return is_intact(library) and not whoever_writes(library)


def variant_flags(variant: Variant) -> tuple[str, ...]:
    """Return a variant's compiler flags. The emulated one uses AVX-512 if the CPU has it."""
    if variant == "amx-emulated" and can_run("avx512"):
        return (*AVX512_FLAGS, "-DFT_AMX_EMULATED")
    return VARIANT_FLAGS[variant]


def _find_compiler() -> list[str]:
    """Return the compiler's command; ``CC`` may contain options, too.

    Raises `NativeBuildError` if no compiler is found.
    """
    requested = shlex.split(os.environ.get("CC", ""))
    for command in [requested] if requested else [[name] for name in _COMPILERS]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise NativeBuildError(
        f"no C compiler was found (tried {' '.join(requested) or ', '.join(_COMPILERS)})"
    )


def _compile(command: list[str], files: Sequence[Path], target: Path) -> None:
    """Compile beside the target and rename, so that other processes never see half a file.

    Raises `OSError` if the folder cannot be written, `NativeBuildError` if the compiler fails.
    """
    with _locked(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if _may_load(target):
            return
        if target.exists():
            why = whoever_writes(target) or f"{target} is damaged"
            logger.warning("%s: compiling it again", why)
        output = Path(folder) / target.name
        logger.info("compiling %s, once for this version and CPU", target)
        compile_library(
            files, output, _reporting(command, sum(file.suffix == ".c" for file in files))
        )
        seal(output)
        output.chmod(0o755)  # the group may not write it, whatever the umask is
        output.replace(target)


def _reporting(command: list[str], num_files: int) -> Callable[[Sequence[str]], None]:
    """Return a function that runs ``command`` with its arguments and reports the progress."""
    tell, done = on_progress.get(), count(1)
    tell(COMPILING, 0.0)

    def run(arguments: Sequence[str]) -> None:
        _run([*command, *arguments], _COMPILE_TIMEOUT)
        tell(COMPILING, min(1.0, next(done) / num_files))

    return run


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder, so that one process at a time builds in it; the system ends stale locks."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _run(command: list[str], timeout: float) -> str:
    """Run a compiler's command and return its output; kill it and its children at the timeout.

    Raises `NativeBuildError` if it fails or takes longer than ``timeout`` seconds.
    """
    try:
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"the C compiler took longer than {timeout:g} s") from error
    except OSError as error:
        raise NativeBuildError(f"the C compiler failed: {error}") from error
    if process.returncode != 0:
        full = os.strerror(errno.ENOSPC)
        lines = [line for line in errors.splitlines() if "error:" in line or full in line]
        raise NativeBuildError(f"the C compiler failed: {(lines or ['no message'])[0]}")
    return output


def _key(compiler: list[str], flags: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    version = _run([*compiler, "--version"], timeout=10)
    parts = ["sealed", version, *compiler, *flags, platform.machine(), *sorted(cpu_flags())]
    digest.update("\0".join(parts).encode())
    add_sources(digest, files)
    return digest.hexdigest()[:24]


def _sources(variant: Variant) -> list[Path]:
    """Return C files and headers; for ``amx-emulated`` also the emulation of the matrix unit."""
    own = sources()
    return [*own, EMULATION] if variant == "amx-emulated" and EMULATION is not None else own
