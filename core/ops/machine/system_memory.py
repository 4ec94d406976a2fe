"""available_memory: memory that this process can still take, on its machine and in its container.

Linux control groups limit a container. A process that exceeds their limit is killed, and the
machine's own numbers do not show the limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

UNKNOWN = 2**40  # bytes, if the system reports no number


class _Names(NamedTuple):
    """Names of a control group's files in one version of the hierarchy."""

    limit: str  # file with "max" (version 2) or a huge number (version 1) if there is no limit
    usage: str
    cache: tuple[str, ...]  # fields of memory.stat that count file cache


# Mapped weights are active file cache: the system may drop them and read them again.
_V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still take.

    File cache that the system drops when memory is short counts as available. ``root``: the folder
    with ``proc`` and ``sys``. A file that cannot be read sets no limit.
    """
    limits = [_left(folder, names) for folder, names in _groups(root)]
    return min([_of_machine(root), *(left for left in limits if left is not None)])


def free_swap(root: Path = Path("/")) -> int:
    """Return the bytes of free swap space.

    With swap a process that exceeds the memory is slow instead of killed.
    """
    return _fields(root / "proc/meminfo").get("SwapFree:", 0) * 1024


def _of_machine(root: Path) -> int:
    kib = _fields(root / "proc/meminfo").get("MemAvailable:")
    if kib is not None:
        return kib * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # some systems do not report it
        return UNKNOWN


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of this process's control groups and of all their parents, with file names.

    Each group may have a limit. In a container, the process's own group may be mounted as the top
    folder; the path in ``proc/self/cgroup`` then does not exist.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            top, names = mount, _V2
        elif "memory" in controllers.split(","):
            top, names = mount / "memory", _V1
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield top / folder, names


def _left(group: Path, names: _Names) -> int | None:
    """Return the bytes left below a group's limit, or None if it has no limit."""
    try:
        limit, usage = (int(_text(group / name)) for name in (names.limit, names.usage))
    except ValueError:
        return None
    fields = _fields(group / "memory.stat")
    return max(0, limit - usage + sum(fields.get(name, 0) for name in names.cache))


def _fields(file: Path) -> dict[str, int]:
    """Return the numbers of a file by name; each line has a name, a number and perhaps a unit."""
    lines = (line.split() for line in _text(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
