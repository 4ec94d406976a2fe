"""Limited processes, in which scorers run code: pytest over an answer, or a function of the user.

A process has limits of processor time, memory and file sizes, a folder of its own that is deleted
afterwards, and an environment without the caller's variables. It is a group of its own, which is
killed when its time is over. Where Linux allows it, it also has no network, and processes that it
leaves behind end with it.

This contains mistakes, such as a loop without end. It is no protection from hostile code: a process
can read and delete the files of its user. Compare models that you do not trust in a container.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MEMORY = 2**31  # bytes of address space of a process
FILE_BYTES = 2**24  # largest file that a process may write
OUTPUT_BYTES = 2**20  # bytes of output that are kept
GRACE_SECONDS = 1.0  # of wall time beyond the limit of processor time

_LAUNCHER = f"""
import ctypes, os, resource, signal, sys
seconds = int(sys.argv[1])
def limit(kind, most):
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))
limit(resource.RLIMIT_CPU, seconds)
limit(resource.RLIMIT_AS, {MEMORY})
limit(resource.RLIMIT_FSIZE, {FILE_BYTES})
limit(resource.RLIMIT_CORE, 0)
USER, PROCESSES, NETWORK = 0x10000000, 0x20000000, 0x40000000
unshare = getattr(ctypes.CDLL(None), "unshare", None)
if unshare is not None and unshare(USER | PROCESSES | NETWORK) == 0:
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Sets the limits and becomes the process. In a namespace of process ids, the first process is a
fork: when it ends, Linux kills all others of the namespace."""


class Ended(NamedTuple):
    """How a process ended: its exit status, None if its time was over, and its output."""

    status: int | None
    output: str


async def run_limited(
    command: Sequence[str], *, seconds: float, stdin: bytes = b"", files: Mapping[str, str] = {}
) -> Ended:
    """Run a command with limits, in a new folder with ``files``, and return how it ended.

    ``seconds``: limit of wall time and of processor time. ``command`` begins with an absolute path.
    """
    with tempfile.TemporaryDirectory(prefix="foretoken-") as folder:
        _write(Path(folder), files)
        return await _run(command, folder, seconds, stdin)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")


async def _run(command: Sequence[str], folder: str, seconds: float, stdin: bytes) -> Ended:
    limits = [sys.executable, "-I", "-S", "-c", _LAUNCHER, f"{max(1, round(seconds))}"]
    process = await asyncio.create_subprocess_exec(
        *limits,
        *command,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds + GRACE_SECONDS):
            output = await _talk(process, stdin)
            status = await process.wait()
    except TimeoutError:
        return Ended(None, "")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return Ended(status, output.decode("utf-8", "replace"))


async def _talk(process: asyncio.subprocess.Process, stdin: bytes) -> bytes:
    """Send the input, and return the first `OUTPUT_BYTES` of the output, read to its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(stdin)  # without waiting: the process may write before it reads
    process.stdin.close()
    output = bytearray()
    while piece := await process.stdout.read(2**16):
        output += piece[: max(0, OUTPUT_BYTES - len(output))]
    return bytes(output)
