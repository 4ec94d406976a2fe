"""Building the kernels: once per cache, and with one clear line where that cannot be."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from foretoken.core.ops.machine import cache_folder as folders
from foretoken.core.ops.native import build as building
from foretoken.core.ops.native import library as loading
from foretoken.core.ops.native import recipe
from foretoken.core.ops.native.build import NativeBuildError, build, can_run, variants
from foretoken.core.ops.native.recipe import (
    FLAGS,
    KERNELS,
    WARNINGS,
    Variant,
    packaged_flags,
    packaged_name,
    seal,
)
from support.native_variants import EMULATION

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(building.SETTING, raising=False)
    loading._warn_unavailable.cache_clear()
    loading._load.cache_clear()
    yield
    loading._load.cache_clear()
    folders._trusted.cache_clear()


def test_every_cpu_can_run_the_portable_variant():
    assert variants()[-1] == "scalar"


def test_the_emulated_matrix_unit_is_in_no_other_librarys_sources(monkeypatch):
    assert EMULATION in building._sources("amx-emulated")
    assert EMULATION not in building._sources("amx")
    monkeypatch.setattr(building, "EMULATION", None)
    assert not can_run("amx-emulated")


@needs_compiler
def test_a_second_build_takes_the_library_from_the_cache(monkeypatch, tmp_path):
    source = tmp_path / "source.c"
    source.write_text("int f(void) { return 1; }\n")
    monkeypatch.setattr(building, "_sources", lambda _: [source])
    first = build("scalar")
    monkeypatch.setattr(building, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build("scalar") == first
    assert [p.name for p in first.parent.iterdir()] == [first.name]


@needs_compiler
def test_other_sources_flags_and_cpus_have_other_names(monkeypatch):
    command, sources = building._find_compiler(), building._sources("scalar")
    keys = {building._key(command, flags, sources) for flags in (("-O3",), ("-O2",))}
    monkeypatch.setattr(building, "cpu_flags", lambda: frozenset({"other"}))
    keys.add(building._key(command, ("-O3",), sources))
    keys.add(building._key(command, ("-O3",), []))
    assert len(keys) == 4


def test_a_source_that_changes_is_another_library(tmp_path):
    command, source = building._find_compiler(), tmp_path / "kernel.c"
    keys = set()
    for text in ("int a;\n", "int b;\n"):
        source.write_text(text)
        keys.add(building._key(command, ("-O3",), [source]))
    assert len(keys) == 2


def test_without_a_compiler_one_log_line_says_so(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert loading.native_library("scalar") is None
        assert loading.native_library("scalar") is None
    assert len(caplog.records) == 1
    assert "no C compiler was found (tried no-such-compiler)" in caplog.text


@pytest.fixture
def small(monkeypatch, tmp_path) -> Path:
    """A source that compiles at once, in place of the kernels."""
    source = tmp_path / "source.c"
    source.write_text("int f(void) { return 1; }\n")
    monkeypatch.setattr(building, "_sources", lambda _: [source])
    return source


@needs_compiler
def test_a_damaged_library_of_the_cache_is_built_anew(small, caplog):
    path = build("scalar")
    whole = path.read_bytes()
    for damaged in (whole[:-40], whole[:100] + b"?" + whole[101:], b""):
        path.write_bytes(damaged)
        assert build("scalar") == path
        assert path.read_bytes() == whole
    assert "is damaged: compiling it again" in caplog.text


@needs_compiler
def test_a_library_that_others_may_write_is_built_anew(small, caplog):
    """Others could have put any code into it, with the right checksum."""
    path = build("scalar")
    first = path.stat().st_ino
    path.chmod(0o757)
    assert build("scalar") == path
    assert path.stat().st_ino != first
    assert path.stat().st_mode & 0o777 == 0o755
    assert "others may write to" in caplog.text


@needs_compiler
def test_a_library_may_be_used_whatever_the_umask_is(small, monkeypatch):
    """A umask of 002, usual where each user has a group, lets the group write new files."""
    old = os.umask(0o002)
    try:
        build("scalar")
    finally:
        os.umask(old)
    monkeypatch.setattr(building, "_compile", lambda *_: pytest.fail("compiled again"))
    build("scalar")


@needs_compiler
def test_a_library_in_a_folder_that_others_may_write_is_not_loaded(small, tmp_path, monkeypatch):
    path = build("scalar")
    path.parent.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders._trusted.cache_clear()
    other = build("scalar")
    assert other.name == path.name
    assert other.parent == tmp_path / f"foretoken-{os.geteuid()}"


@pytest.fixture
def packaged(monkeypatch, tmp_path) -> Path:
    """A packaged library, which differs from the one that is compiled here."""
    source = tmp_path / "packaged.c"
    source.write_text("int packaged(void) { return 1; }\n")
    monkeypatch.setattr(building, "FOLDER", tmp_path)
    library = tmp_path / packaged_name("scalar")
    subprocess.run(["cc", *packaged_flags("scalar"), "-o", library, source], check=True)
    seal(library)
    return library


@needs_compiler
def test_a_packaged_library_needs_no_compiler(packaged, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert building.load("scalar")._name == str(packaged)
    assert not os.path.exists(os.environ["FORETOKEN_CACHE"])


@needs_compiler
def test_the_functions_of_the_host_are_compiled_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "FOLDER", tmp_path)  # nothing is packaged
    library = building.load_host()
    assert library.ft_lay_out
    assert library.ft_fill_pass
    assert not hasattr(library, "ft_linear")


@needs_compiler
def test_packaged_kernels_have_the_functions_of_the_host(packaged, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert building.load_host()._name == str(packaged)


@needs_compiler
def test_a_compiler_that_is_named_compiles_in_place_of_a_packaged_library(
    packaged, small, monkeypatch
):
    monkeypatch.setenv("CC", "cc")
    assert building.load("scalar")._name == str(build("scalar"))


@needs_compiler
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_compiler_that_does_not_compile_leaves_the_packaged_library(
    packaged, compiler, monkeypatch, caplog
):
    """A packaged library needs none, so a `CC` that is wrong must not turn the kernels off."""
    monkeypatch.setenv("CC", compiler)
    assert building.load("scalar")._name == str(packaged)
    (message,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert message.startswith("using the packaged kernels: ")
    assert compiler in message or "the C compiler failed" in message


@needs_compiler
@pytest.mark.parametrize("fault", ["cut", "made for another system"])
def test_a_packaged_library_that_does_not_do_is_replaced_or_refused(
    packaged, small, fault, monkeypatch, caplog
):
    if fault == "cut":
        packaged.write_bytes(packaged.read_bytes()[:-1000])
    else:
        packaged.write_bytes(b"no library")
        seal(packaged)
    assert building.load("scalar")._name == str(build("scalar"))
    assert "using the compiled kernels: " in caplog.text
    monkeypatch.setenv("PATH", "")
    caplog.clear()
    assert loading.native_library("scalar") is None
    (message,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert packaged.name in message
    assert "no C compiler was found" in message


def test_packaged_libraries_of_other_sources_or_flags_have_other_names(monkeypatch, tmp_path):
    names = {packaged_name("avx2"), packaged_name("avx512")}
    (tmp_path / "source.c").write_text("int a;\n")
    monkeypatch.setattr(recipe, "sources", lambda: [tmp_path / "source.c"])
    assert len({*names, packaged_name("avx2")}) == 3
    assert not any("native" in flag for flag in packaged_flags("avx512"))


@needs_compiler
def test_a_compile_error_is_told_and_leaves_nothing_behind(monkeypatch, tmp_path):
    broken = tmp_path / "broken.c"
    broken.write_text("int f(void) { return nothing; }\n")
    monkeypatch.setattr(building, "_sources", lambda _: [broken])
    with pytest.raises(NativeBuildError, match="nothing"):
        build("scalar")
    assert not list((tmp_path / "cache").iterdir())


@needs_compiler
def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NativeBuildError, match=r"cache folder: .*; set FORETOKEN_CACHE to another"):
        build("scalar")


def test_a_disk_without_room_is_told_as_the_cause(tmp_path):
    script = tmp_path / "cc"
    script.write_text(
        "#!/bin/sh\necho 'ld: final link failed: No space left on device' >&2\n"
        "echo 'collect2: error: ld returned 1 exit status' >&2\nexit 1\n"
    )
    script.chmod(0o700)
    with pytest.raises(NativeBuildError, match="final link failed: No space left on device"):
        building._run([str(script)], timeout=10)


def test_a_compiler_that_hangs_is_told_in_one_line():
    with pytest.raises(NativeBuildError, match=r"^the C compiler took longer than 0\.01 s$"):
        building._run(["sleep", "60"], timeout=0.01)


@needs_compiler
def test_a_compilation_is_announced(monkeypatch, tmp_path, caplog):
    source = tmp_path / "small.c"
    source.write_text("int f(void) { return 1; }\n")
    monkeypatch.setattr(building, "_sources", lambda _: [source])
    with caplog.at_level(logging.INFO):
        build("scalar")
        build("scalar")
    assert sum("compiling" in message for message in caplog.messages) == 1


def test_an_unknown_cpu_is_not_given_the_portable_variant_unasked(monkeypatch, caplog):
    monkeypatch.setattr(building, "cpu_flags", lambda: frozenset({"sse2"}))
    with caplog.at_level(logging.WARNING):
        assert loading.native_library() is None
    assert "no kernels for this CPU" in caplog.text


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("variant", get_args(Variant))
def test_the_sources_are_free_of_warnings(variant):
    """The sources of the matrix unit are checked even on a machine without one."""
    sources = [str(p) for p in building._sources(variant) if p.suffix == ".c"]
    flags = [*FLAGS, *building.variant_flags(variant), *WARNINGS]
    flags.append(f"-I{KERNELS}")
    command = ["cc", *flags, "-Wextra", "-Werror", "-fsyntax-only", *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized" in done.stderr or "bad value" in done.stderr:
        pytest.skip("this compiler does not know the variant")
    assert done.returncode == 0, done.stderr[:2000]
