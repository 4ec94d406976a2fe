"""The build of the C kernels, and a check that a compiled library is intact.

This module needs only the standard library and no other file of foretoken: a release loads it by
its path to compile the kernels of the wheel for Linux on x86-64. A container image does this with
``python -m foretoken.core.ops.native.recipe``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

Variant: TypeAlias = Literal["amx", "avx512", "avx2", "scalar", "amx-emulated"]
"""``amx-emulated`` has C functions in place of the matrix unit of ``amx``, for tests."""

PACKAGED: tuple[Variant, ...] = ("amx", "avx512", "avx2", "scalar")
FOLDER = Path(__file__).parent
KERNELS = FOLDER / "kernels"  # the C sources, in a folder for each subject

# -ffp-contract=off: the choice of fused products must not depend on the unrolling of a loop.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
WARNINGS = ("-Wall", "-Wno-unknown-pragmas", "-Wno-psabi")
LIBRARIES = ("-lm",)
TUNED = "-mtune=native"  # changes only the order of instructions, not the bits of results
AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", TUNED)
VARIANT_FLAGS: dict[Variant, tuple[str, ...]] = {
    "amx": (*AVX512_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512": AVX512_FLAGS,
    "avx2": ("-march=x86-64-v3", TUNED),
    "scalar": ("-DFT_SCALAR",),
    "amx-emulated": (
        "-march=x86-64-v3",
        "-DFT_SCALAR",
        "-DFT_SCALAR_LANES=16",
        "-DFT_AMX_EMULATED",
        "-O1",  # builds in a third of the time; only tests run this variant
    ),
}
_SEAL_BYTES = hashlib.sha256().digest_size


def sources() -> list[Path]:
    """Return the C files and headers, sorted."""
    return sorted(path for path in KERNELS.rglob("*") if path.suffix in (".c", ".h"))


def compile_library(
    files: Sequence[Path], output: Path, run: Callable[[Sequence[str]], object]
) -> None:
    """Compile the C files among ``files``, one per core at a time, and link them to ``output``.

    ``run`` calls the compiler with its flags and the given arguments, and raises if it fails.
    Object files are kept beside ``output`` until the library is linked.
    """
    compiled = sorted((path for path in files if path.suffix == ".c"), key=_size, reverse=True)
    objects = [output.with_suffix(f".{number}.o") for number in range(len(compiled))]
    pairs = zip(compiled, objects, strict=True)
    try:
        with ThreadPoolExecutor(_num_cores()) as pool:
            for _ in pool.map(lambda pair: run(_compiling(*pair)), pairs):
                pass
        run([*map(str, objects), "-o", str(output), *LIBRARIES])
    finally:
        for each in objects:
            each.unlink(missing_ok=True)


def _compiling(source: Path, target: Path) -> list[str]:
    return ["-c", f"-I{KERNELS}", str(source), "-o", str(target)]


def _size(path: Path) -> int:
    """Return a file's size; larger files take longer to compile and are started first."""
    return path.stat().st_size


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def packaged_flags(variant: Variant) -> tuple[str, ...]:
    """Return the flags of a library that also runs on machines other than the compiling one."""
    own = (flag for flag in VARIANT_FLAGS[variant] if flag != TUNED)
    return (*FLAGS, *own, *WARNINGS)


def packaged_name(variant: Variant) -> str:
    """Return the file name of a packaged library, which depends on sources and flags."""
    digest = hashlib.sha256("\0".join(packaged_flags(variant)).encode())
    add_sources(digest, sources())
    return f"kernels-{variant}-packaged-{digest.hexdigest()[:24]}.so"


def add_sources(digest: hashlib._Hash, files: Sequence[Path]) -> None:
    """Add the names and contents of files to a digest."""
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")


def seal(library: Path) -> None:
    """Append a library's SHA-256 to its file; the system's loader does not read it."""
    content = library.read_bytes()
    with library.open("ab") as file:
        file.write(hashlib.sha256(content).digest())


def is_intact(library: Path) -> bool:
    """Whether a sealed library exists and is unchanged. A truncated one could crash."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_SEAL_BYTES]).digest() == content[-_SEAL_BYTES:]


def package() -> list[Path]:
    """Compile the packaged libraries beside the sources, and return their paths.

    Exits the process if gcc is too old or fails.
    """
    if lacking := unknown_flags():
        sys.exit(f"gcc does not know {lacking}: packaged kernels need gcc 11 or newer")
    made = []
    for variant in PACKAGED:
        library = FOLDER / packaged_name(variant)
        compile_library(sources(), library, partial(_gcc, packaged_flags(variant)))
        seal(library)
        made.append(library)
        print(library, flush=True)
    return made


def _gcc(flags: Sequence[str], arguments: Sequence[str]) -> None:
    """Run gcc; exit the process if it fails."""
    command = ["gcc", *flags, *arguments]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(f"failed with {code}: {' '.join(command)}")


def unknown_flags() -> str:
    """Return the first variant's flags that gcc does not accept, or "" if it accepts all."""
    for variant in PACKAGED:
        flags = packaged_flags(variant)
        command = ["gcc", *flags, "-fsyntax-only", "-x", "c", os.devnull]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return " ".join(VARIANT_FLAGS[variant])
    return ""


if __name__ == "__main__":
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        package()
    else:
        print(f"no kernels are packaged for {platform.system()} on {platform.machine()}")
