"""Limited processes, in which scorers run code: pytest over an answer, or a function of the user.

A process has limits of processor time, memory and file sizes, a folder of its own that is deleted
afterwards, and an environment without the caller's variables. It is a group of its own, which is
killed when its time is over, and it ends with this process. Where Linux allows it, it also has no
network, processes that it leaves behind end with it, and their number has a limit (from Linux 6 on,
and not for root). Each process has the other limits anew.

This contains mistakes, such as a loop without end. It is no protection from hostile code: a process
can read and delete the files of its user, and reach servers by the files of their sockets. Compare
models that you do not trust in a container.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.errors import ForetokenError
from ..runtime.process_group import end_group, start_group

MEMORY = 2**31  # bytes of address space of a process
FILE_BYTES = 2**24  # largest file that a process may write
PROCESSES = 128  # processes and threads at the same time
OUTPUT_BYTES = 2**20  # bytes at the end of the output that are kept
GRACE_SECONDS = 1.0  # beyond the limit of time, for the start of Python
ENVIRONMENT = {
    "PATH": os.defpath,
    "PYTHONDONTWRITEBYTECODE": "1",
    # By default, NumPy starts a thread per core, which may exceed the limits of a process.
    "OMP_NUM_THREADS": "1",
}

_LAUNCHER = f"""
import ctypes, os, resource, signal, sys
seconds = int(sys.argv[1])
libc = ctypes.CDLL(None)
def end_with_parent():
    PR_SET_PDEATHSIG = 1
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
end_with_parent()
def limit(kind, most):
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))
limit(resource.RLIMIT_CPU, seconds)
limit(resource.RLIMIT_AS, {MEMORY})
limit(resource.RLIMIT_FSIZE, {FILE_BYTES})
limit(resource.RLIMIT_CORE, 0)
USER, PIDS, NETWORK = 0x10000000, 0x20000000, 0x40000000
unshare = getattr(libc, "unshare", None)
if unshare is not None and unshare(USER | PIDS | NETWORK) == 0:
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    end_with_parent()
    if int(os.uname().release.split(".")[0]) >= 6:  # older ones count all processes of the user
        limit(resource.RLIMIT_NPROC, {PROCESSES})
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Sets the limits and becomes the process. In a namespace of process ids, the first process is a
fork: when it ends, Linux kills all others of the namespace."""


class Ended(NamedTuple):
    """Result of a process: its exit status, or None if its time was over, and its output."""

    status: int | None
    output: str


async def run_limited(
    command: Sequence[str], *, seconds: float, stdin: bytes = b"", files: Mapping[str, str] = {}
) -> Ended:
    """Run a command with limits, in a new folder with ``files``, and return how it ended.

    ``seconds``: limit of wall time, and of the processor time of each process, to which
    `GRACE_SECONDS` are added. ``command`` begins with an absolute path. Raises `ForetokenError` if
    no process can be started.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="foretoken-")
        try:
            _write(Path(folder.name), files)
            return await _run(command, folder.name, seconds, stdin)
        finally:  # code may have written very many files; a cancellation deletes them, too
            await asyncio.shield(asyncio.to_thread(folder.cleanup))
    except OSError as error:  # no space, no processes or no memory are left
        raise ForetokenError(f"a scorer's process cannot run: {error.strerror}") from None
    except RecursionError:
        raise ForetokenError("a scorer's folder is too deep to delete: remove it by hand") from None


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")


async def _run(command: Sequence[str], folder: str, seconds: float, stdin: bytes) -> Ended:
    # A plain loop reaches the limit of wall time first, which the result tells from a failure.
    processor = math.ceil(seconds + GRACE_SECONDS)
    limits = [sys.executable, "-I", "-S", "-c", _LAUNCHER, f"{processor}"]
    process = await start_group(
        *limits,
        *command,
        cwd=folder,
        env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(seconds + GRACE_SECONDS):
            output = await _talk(process, stdin)
            status = await process.wait()
    except TimeoutError:
        return Ended(None, "")
    finally:
        await end_group(process)
    return Ended(status, output.decode("utf-8", "replace"))


async def _talk(process: asyncio.subprocess.Process, stdin: bytes) -> bytes:
    """Send the input, and return the last `OUTPUT_BYTES` of the output, read to its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(stdin)  # without waiting: the process may write before it reads
    process.stdin.close()
    output = bytearray()
    while piece := await process.stdout.read(2**16):
        output += piece
        del output[:-OUTPUT_BYTES]
    return bytes(output)
