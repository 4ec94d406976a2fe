"""Pages that tell their key, and processes that write them to a disk store until they are killed.

Run as a script, it forks such a process for each line of its input: the number of the first page.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from foretoken.core.tiers.stores.slab_store import SlabStore

FINGERPRINT = hashlib.blake2b(b"weights", digest_size=32).digest()
PAGE_BYTES = 20_000  # five blocks, the last one in part
TAG = b"\0" * 8
NUM_PAGES = 80
SIZE = 4096 + NUM_PAGES * (20_480 + 64)  # bytes
SLAB_BYTES = 30 * 20_480


def key_of(number: int) -> bytes:
    """The key of a page."""
    return hashlib.blake2b(number.to_bytes(8), digest_size=32).digest()


def page_of(key: bytes, num_bytes: int = PAGE_BYTES) -> bytes:
    """The bytes that belong to a key."""
    return (key * (num_bytes // len(key) + 1))[:num_bytes]


def opened(folder: Path) -> SlabStore:
    """The store that is written to."""
    return SlabStore(folder, FINGERPRINT, PAGE_BYTES, SIZE, slab_bytes=SLAB_BYTES)


class Writers:
    """Processes that write pages, one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    def write_and_die(self, first: int, num_pages: int) -> int:
        """Kill a writer once so many pages are kept; the last page that it said it keeps."""
        pid, last = self.start(first), first - 1
        for _ in range(num_pages):
            last = int(self._output.readline())
        os.kill(pid, signal.SIGKILL)
        while (line := self._output.readline()) != "dead\n":
            last = int(line)
        return last

    def start(self, first: int) -> int:
        """Let a process hold the store and write; its id."""
        print(first, file=self._input, flush=True)
        return int(self._output.readline())


@contextlib.contextmanager
def writers(folder: Path) -> Iterator[Writers]:
    """The script, which ends with the block."""
    command = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Writers(process)


def _main(folder: Path) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the end of the test is theirs
    for line in sys.stdin:
        if not os.fork():
            _write(folder, int(line))
        os.wait()
        _tell("dead")


def _write(folder: Path, number: int) -> None:
    store = opened(folder)
    _tell(os.getpid())
    while True:
        store.put(key_of(number), TAG, memoryview(page_of(key_of(number))), lambda: True)
        _tell(number)
        number += 1


def _tell(news: object) -> None:
    os.write(1, f"{news}\n".encode())


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
