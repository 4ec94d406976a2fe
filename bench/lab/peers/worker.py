"""A worker as the driver sees it: a process that is asked, waited for, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .wire import Answer, Call, Job, Ready, write


class WorkerError(Exception):
    """The worker ended, or did not answer in time. The message is one line."""


class Worker:
    """One engine with one model loaded. Between calls its processes are stopped by a signal.

    So the threads of an engine that spin while they wait take nothing from the others.
    ``command`` makes its command line from the path of a job. Raises `WorkerError` throughout.
    """

    def __init__(
        self, command: Callable[[Path], list[str]], job: Job, folder: Path, *, timeout: float
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        job_path, self._log = folder / "job.json", folder / "log.txt"
        job_path.write_text(write(job), encoding="utf-8")
        self.timeout = timeout
        env = os.environ | {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"}
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command(job_path),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self._rest = b""

    def ready(self) -> Ready:
        """Wait until the model is loaded."""
        ready = Ready(**json.loads(self._line()))
        if ready.error:
            raise WorkerError(ready.error)
        self._signal(signal.SIGSTOP)
        return ready

    def ask(self, call: Call) -> Answer:
        """Have a call computed while all other workers stand still."""
        self._signal(signal.SIGCONT)
        try:
            _pipe(self._process.stdin).write(write(call).encode() + b"\n")
            _pipe(self._process.stdin).flush()
            return Answer(**json.loads(self._line()))
        except BrokenPipeError:
            raise WorkerError(self._death_reason()) from None
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process and all it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                _pipe(pipe).close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _line(self) -> bytes:
        """The next line it writes."""
        out, deadline = _pipe(self._process.stdout).fileno(), time.monotonic() + self.timeout
        while b"\n" not in self._rest:
            readable, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise WorkerError(f"no answer in {self.timeout:g} s")
            read = os.read(out, 2**20)
            if not read:
                raise WorkerError(self._death_reason())
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _death_reason(self) -> str:
        """The last line of its log that says something."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        return f"ended: {said[-1][:160] if said else 'without a word'}"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise WorkerError("no pipe")
    return pipe
