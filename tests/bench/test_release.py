"""`make release`: what it demands of the packages and of a server that it tries."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools._distutils.filelist import FileList
from setuptools.command.build_py import build_py

from foretoken.bench.lab import release
from foretoken.bench.lab.release import check_has, main, packages_of, run, serving, write_sums
from foretoken.core.ops.native import recipe
from foretoken.core.ops.native.recipe import is_intact

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


IN_GIT = pytest.mark.skipif(not (release.ROOT / ".git").exists(), reason="no checkout of git")


def test_a_package_that_lacks_a_file_stops_the_release(tmp_path: Path) -> None:
    package = tmp_path / "x.whl"
    package.write_bytes(b"x")
    check_has(package, ["a/b.py", "c.txt"], ("a/b.py", "c.txt"))
    with pytest.raises(SystemExit, match=r"x\.whl lacks d\.c"):
        check_has(package, ["a/b.py", "d.cc"], ("a/b.py", "d.c"))


def test_a_python_that_does_not_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code in (("python3.12", 127), ("python3.13", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = [release.running(name) for name in ("python3.11", "python3.12", "python3.13")]
    assert found == [None, None, str(tmp_path / "python3.13")]


@IN_GIT
def test_the_wheel_has_every_source_and_page_and_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of models for tests made it 12 MB."""
    monkeypatch.chdir(release.ROOT)
    project = Distribution({"script_name": "setup.py"})
    project.parse_config_files()
    command = project.get_command_obj("build_py")
    assert isinstance(command, build_py)
    command.ensure_finalized()
    files = [Path(name) for name in command.get_output_mapping().values()]
    needed = {Path(name) for name in release.tracked(*release.IN_WHEEL)}
    suffixes = {".c", ".h", ".html", ".css", ".js", ".toml", ".typed"}
    assert {path.suffix for path in needed} == suffixes
    assert needed <= set(files)
    assert {path.suffix for path in files} == {".py", *(path.suffix for path in needed)}
    with zipfile.ZipFile(tmp_path / "code.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for path in files:
            packed.write(path)
    assert (tmp_path / "code.zip").stat().st_size < 2_100_000


@IN_GIT
def test_the_source_distribution_is_the_repository() -> None:
    """Git tracks no file that it lacks: its tests read workflows, pages link to recorded JSON."""
    files = FileList()
    files.allfiles = release.tracked()
    for line in (release.ROOT / "MANIFEST.in").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            files.process_template_line(line)
    by_packages = {
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        *release.tracked(*release.IN_WHEEL),
    }
    code = {name for name in files.allfiles if name.endswith(".py")}
    assert set(files.allfiles) - set(files.files) - by_packages - code == set()


def test_checksums_are_read_by_the_usual_command(tmp_path: Path) -> None:
    packages = [tmp_path / name for name in ("a-1-py3-none-any.whl", "a-1.tar.gz")]
    for package in packages:
        package.write_text(package.name)
    wheels, sdist = packages_of(tmp_path)
    write_sums(tmp_path, [*wheels, sdist])
    check = ["sha256sum", "-c", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    packages[0].write_text("changed")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


SOURCES = {"sums/a.c": "#include <math.h>\nfloat f(float x) { return expf(x); }\n", "sums/a.h": ""}


CAN_COMPILE = (
    platform.machine() == "x86_64"
    and shutil.which("gcc") is not None
    and not recipe.unknown_flags()
)


@pytest.mark.skipif(not CAN_COMPILE, reason="no gcc 11 or newer for x86-64")
def test_the_wheel_with_kernels_has_all_that_the_other_has_and_sealed_libraries(tmp_path: Path):
    native = "foretoken/core/ops/native"
    how = Path(release.ROOT, "core/ops/native/recipe.py").read_text("utf-8")
    about = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{native}/recipe.py": how, "foretoken-1.dist-info/WHEEL": about}
    files |= {f"{native}/kernels/{name}": text for name, text in SOURCES.items()}
    files["foretoken-1.dist-info/RECORD"] = "old"
    pure = tmp_path / "foretoken-1-py3-none-any.whl"
    with zipfile.ZipFile(pure, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    release.add_kernels(pure)
    (tmp_path / "foretoken-1.tar.gz").touch()
    (first, second), _ = packages_of(tmp_path)
    assert first == pure
    assert re.fullmatch(r"foretoken-1-py3-none-manylinux_2_\d+_x86_64.whl", second.name)
    with zipfile.ZipFile(second) as packed:
        packed.extractall(tmp_path / "installed")
    installed = tmp_path / "installed" / native
    libraries = sorted(each.name.split("-")[1] for each in installed.glob("kernels-*.so"))
    assert libraries == ["amx", "avx2", "avx512", "scalar"]
    assert all(map(is_intact, installed.glob("kernels-*.so")))
    record = (tmp_path / "installed/foretoken-1.dist-info/RECORD").read_text("utf-8")
    assert {line.partition(",")[0] for line in record.splitlines()} == {
        *files,
        *(f"{native}/{each.name}" for each in installed.glob("kernels-*.so")),
    }


def test_a_compiler_that_is_too_old_ends_the_release_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some compiler that knows AVX2, as gcc 8 does, and not x86-64-v4."""
    gcc = tmp_path / "gcc"
    gcc.write_text('#!/bin/sh\ncase "$*" in *v4*) exit 1;; esac\n')
    gcc.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SystemExit, match=r"gcc does not know -march=x86-64-v4 .*need gcc 11"):
        recipe.package()
    monkeypatch.setattr(recipe, "PACKAGED", ("avx2",))
    assert recipe.unknown_flags() == ""


def test_the_tag_names_the_newest_version_of_glibc_that_is_called(tmp_path: Path) -> None:
    for name, content in {"a": b"\0GLIBC_2.4\0GLIBC_2.17\0", "b": b"GLIBC_2.9\0"}.items():
        (tmp_path / name).write_bytes(content)
    assert release.needed_glibc([tmp_path / "a", tmp_path / "b"]) == 17


def test_a_server_is_waited_for_and_ended(tmp_path: Path) -> None:
    with serving(sys.executable, "-c", SERVER, cwd=tmp_path) as url:
        assert release.answers(url)
    assert not release.answers(url)


def test_each_wheel_serves_under_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel with kernels has no compiler then, as for its other trials."""
    wheels = [
        tmp_path / "a-1-py3-none-any.whl",
        tmp_path / "a-1-py3-none-manylinux_2_34_x86_64.whl",
    ]
    served: list[dict[str, str]] = []

    @contextmanager
    def serve(*command: object, settings: dict[str, str], **_: object) -> Iterator[str]:
        served.append(settings)
        yield ""

    for name in ("run", "install"):
        monkeypatch.setattr(release, name, lambda *_, **__: None)
    monkeypatch.setattr(release, "serving", serve)
    release.try_wheels("python3", wheels)
    plain, packed = served
    assert plain["FORETOKEN_CACHE"] != packed["FORETOKEN_CACHE"]
    assert "PATH" not in plain
    assert packed["CC"] == ""
    assert packed["PATH"].endswith("/bin")


def test_a_server_has_the_settings_and_nothing_of_this_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    needs = "import os\nassert os.environ['A'] == 'b' and 'PYTHONPATH' not in os.environ\n"
    command = (sys.executable, "-c", needs + SERVER)
    with serving(*command, cwd=tmp_path, settings={"A": "b"}) as url:
        assert release.answers(url)


def test_a_server_that_ends_stops_the_release(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match="does not answer"),
        serving(sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path),
    ):
        pass


def test_a_command_that_fails_stops_the_release_unless_it_may(tmp_path: Path) -> None:
    run(sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path, may_fail=True)
    with pytest.raises(SystemExit, match="failed with status 3"):
        run(sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path)


def test_without_a_python_nothing_is_called_tried(tmp_path: Path) -> None:
    for name in ("a-1-py3-none-any.whl", "a-1.tar.gz"):
        (tmp_path / name).touch()
    with pytest.raises(SystemExit, match="no supported Python"):
        main(["--built", str(tmp_path), "--python", "no-such-python", "--no-readme"])
