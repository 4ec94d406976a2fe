"""A copy of the repository, in which mistakes are made and tests are run."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .code import Code, Place
from .mutation import Mutation

_PLUGINS = ("-p", "pytest_timeout")  # those that the settings in pyproject.toml belong to
_OPTIONS = (*_PLUGINS, "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-rfE")
_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+)", re.MULTILINE)  # without its parameters


@dataclass(frozen=True, slots=True)
class TestRun:
    """Outcome of some tests."""

    __test__ = False  # pytest: this is none of yours

    status: int | None  # pytest's exit status; None: they took too long
    failed: tuple[str, ...]  # as pytest names them, without parameters
    output: str
    seconds: float


class Workplace:
    """The repository's files, tracked and new, below ``folder``; kernels are compiled there too."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.root = folder / "foretoken"
        self._libraries = folder / "kernels"
        for name in _files(repository):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / name, target)
        self.code = Code(self.root)
        # By its hash, not by its time: a mistake made and mended within a second must count.
        compileall.compile_dir(
            self.root, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
        self._environment = os.environ | {
            "PYTHONPATH": str(folder),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the others take seconds, and none is needed
            "OMP_NUM_THREADS": "1",
            "FORETOKEN_CACHE": str(self._libraries),
        }
        self._output = folder / "output.txt"
        self._forker = self._start_forker()
        self._answer()  # it is ready

    def close(self) -> None:
        """End the process that runs tests."""
        self._forker.kill()
        self._forker.communicate()

    @property
    def num_libraries(self) -> int:
        """Variants of the kernels that were compiled so far."""
        return len(list(self._libraries.glob("*.so")))

    def tests_of(self, mutation: Mutation) -> list[str]:
        """The tests that must notice it, as pytest names them, the surest first."""
        return [test for name in mutation.tests for test in self.code.tests_named(name)]

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[Place]:
        """The mistake is in the code, at this place. Raises `DoesNotApply`."""
        place, mutated = self.code.mutate(mutation)
        path = self.root / place.file
        text = path.read_text(encoding="utf-8")
        path.write_text(mutated, encoding="utf-8")
        try:
            yield place
        finally:
            path.write_text(text, encoding="utf-8")

    def run_tests(
        self, tests: Sequence[str], *, timeout_s: float, stop_early: bool = True
    ) -> TestRun:
        """Run these in a process of their own, with ``stop_early`` up to the first that fails."""
        began = time.monotonic()
        asked = {
            "args": [*_OPTIONS, *(["-x"] if stop_early else []), *tests],
            "output": str(self._output),
            "seconds": timeout_s,
        }
        self._ask(json.dumps(asked))
        status = json.loads(self._answer())["status"]
        output = self._output.read_text(encoding="utf-8", errors="replace")
        failed = tuple(_FAILED.findall(output))
        return TestRun(status, failed, output, time.monotonic() - began)

    def _start_forker(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.prove.forker"],
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, line: str) -> None:
        assert self._forker.stdin is not None
        self._forker.stdin.write(line + "\n")
        self._forker.stdin.flush()

    def _answer(self) -> str:
        assert self._forker.stdout is not None
        line = self._forker.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests has ended")
        return line


def _files(repository: Path) -> list[str]:
    """Names of all files but the ignored ones; those that were deleted just now are left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    names = dict.fromkeys(filter(None, listed.stdout.split("\0")))
    return [name for name in names if (repository / name).is_file()]
