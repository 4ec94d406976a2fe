"""Processes of their own without the seconds that importing torch and transformers takes.

Each is forked from one process a session that has imported them (`multiprocessing`'s fork server).
It has its own arguments, environment, standard streams, signals and exit status, and runs what is
registered for the end of an interpreter. A test of what is imported, or of a crash at the very end,
needs a true new process.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import reduction
from typing import IO, Any

IMPORTED = (
    "foretoken.api.cli.commands",
    "foretoken.api.build.engine_builder",
    "foretoken.api.server.process",
    "foretoken.api.sdk.llm",
    "foretoken.api.text.tokenizer",
    "foretoken.core.execution.model_runner",
    "transformers.models.auto",
    "httpx",
)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(IMPORTED))


class Descriptor:
    """A file descriptor that reaches the forked process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return type(self)._taken, (reduction.DupFd(self.descriptor),)

    @staticmethod
    def _taken(duplicate: Any) -> int:
        found: int = duplicate.detach()
        return found


class Forked:
    """A forked process; as much of `subprocess.Popen` as tests use."""

    def __init__(
        self,
        run: Callable[..., object],
        *args: object,
        stdin: int | IO[Any],
        stdout: int | IO[Any],
        stderr: int | IO[Any],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        streams = [
            Descriptor(each if isinstance(each, int) else each.fileno())
            for each in (stdin, stdout, stderr)
        ]
        self._process = _CONTEXT.Process(
            target=_begin,
            args=(streams, dict(os.environ if env is None else env), str(cwd or os.getcwd())),
            kwargs={"run": run, "args": args},
            daemon=True,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; below 0 the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it, if the process runs."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class Talking(Forked):
    """A forked process with pipes to its standard streams, as text."""

    def __init__(self, run: Callable[..., object], *args: object) -> None:
        (stdin, write), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        super().__init__(run, *args, stdin=stdin, stdout=stdout, stderr=stderr, env=env)
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self.stdin = open(write, "w", buffering=1)  # noqa: SIM115 - closed by `close`
        self.stdout, self.stderr = open(out), open(err)  # noqa: SIM115

    def close(self) -> None:
        """End it, and the pipes."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def started(run: Callable[..., object], *args: object) -> Iterator[Talking]:
    """Start a process that is ended with the block in any case."""
    process = Talking(run, *args)
    try:
        yield process
    finally:
        process.close()


def run_forked(
    run: Callable[..., object],
    *args: object,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run to the end, as `subprocess.run` with all that is printed."""
    with (
        tempfile.TemporaryFile() as read,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        read.write(stdin.encode())
        read.seek(0)
        forked = Forked(run, *args, stdin=read, stdout=out, stderr=err, env=env, cwd=cwd)
        try:
            code = forked.wait(timeout)
        finally:
            forked.kill()
        printed = []
        for stream in (out, err):
            stream.seek(0)
            printed.append(stream.read().decode())
    return subprocess.CompletedProcess([run.__name__, *map(str, args)], code, *printed)


def command(*args: str) -> None:
    """``foretoken ARGS``."""
    from foretoken.api.cli.commands import main

    sys.argv = ["foretoken", *args]
    sys.exit(main(args))


def code(text: str) -> None:
    """``python -c TEXT``."""
    sys.argv = ["-c"]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def script(path: str, *args: str) -> None:
    """``python PATH ARGS``."""
    sys.argv = [path, *args]
    runpy.run_path(path, run_name="__main__")


def _begin(
    streams: Sequence[int],
    env: Mapping[str, str],
    cwd: str,
    *,
    run: Callable[..., object],
    args: Sequence[object],
) -> None:
    os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    at_once = bool(env.get("PYTHONUNBUFFERED"))
    sys.stdout = open(1, "w", closefd=False, buffering=1 if at_once else -1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    try:
        run(*args)
    finally:
        atexit._run_exitfuncs()
