"""Free memory: the machine's, within the control groups of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from foretoken.core.ops.machine import device
from foretoken.core.ops.machine.system_memory import available_memory

GIB = 2**30
MEMINFO = (
    "MemTotal: 67108864 kB\nMemFree: 1048576 kB\nMemAvailable: 33554432 kB\nHugePages_Total: 0\n"
)
FREE = 32 * GIB  # file cache that can be dropped included, MemFree does not say so
UNLIMITED = 9223372036854771712  # what version 1 has for no limit


class Machine:
    """A tree of files as Linux shows them to a process."""

    def __init__(self, root: Path, own_groups: str = "") -> None:
        self.root = root
        self._write("proc/meminfo", MEMINFO)
        self._write("proc/self/cgroup", own_groups)

    def limit_v2(self, group: str, limit: int | str, usage: int, cache: int | None = None) -> None:
        self._write(f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
        self._write(f"sys/fs/cgroup/{group}/memory.current", f"{usage}\n")
        if cache is not None:
            self._write(
                f"sys/fs/cgroup/{group}/memory.stat",
                f"anon 5\ninactive_anon 3\ninactive_file {cache // 4}\n"
                f"active_file {cache - cache // 4}\n",
            )

    def limit_v1(self, group: str, limit: int, usage: int, cache: int | None = None) -> None:
        self._write(f"sys/fs/cgroup/memory/{group}/memory.limit_in_bytes", f"{limit}\n")
        self._write(f"sys/fs/cgroup/memory/{group}/memory.usage_in_bytes", f"{usage}\n")
        if cache is not None:
            self._write(
                f"sys/fs/cgroup/memory/{group}/memory.stat",
                f"inactive_file 1\ntotal_inactive_file {cache // 4}\n"
                f"total_active_file {cache - cache // 4}\n",
            )

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_without_groups_it_is_the_machines_with_cache_that_can_be_dropped(tmp_path: Path) -> None:
    Machine(tmp_path)
    assert available_memory(tmp_path) == FREE


def test_version_2_limits_with_cache_that_can_be_dropped(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/pod/container\n")
    machine.limit_v2("pod/container", 4 * GIB, 3 * GIB, cache=GIB // 2)
    assert available_memory(tmp_path) == GIB + GIB // 2


@pytest.mark.parametrize("limiting", ["", "pod", "pod/container"])
def test_any_group_up_to_the_top_may_limit(limiting: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/pod/container\n")
    for group in ("pod", "pod/container"):
        machine.limit_v2(group, "max", 7 * GIB, cache=GIB)
    machine.limit_v2(limiting, 8 * GIB, 7 * GIB, cache=0)
    assert available_memory(tmp_path) == GIB


def test_the_group_of_a_container_may_be_mounted_as_the_top_one(tmp_path: Path) -> None:
    """The process sees a path that does not exist where it is."""
    machine = Machine(tmp_path, "5:cpu:/docker/4f\n4:memory:/docker/4f\n1:name=systemd:/x\n")
    machine.limit_v1("", 2 * GIB, GIB, cache=GIB // 4)
    assert available_memory(tmp_path) == GIB + GIB // 4


def test_version_1_has_a_hierarchy_of_its_own_and_a_number_for_no_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:cpu,memory:/a/b\n0::/a\n")
    machine.limit_v1("", UNLIMITED, 60 * GIB)
    machine.limit_v1("a", 3 * GIB, 2 * GIB)
    machine.limit_v1("a/b", UNLIMITED, 2 * GIB)
    assert available_memory(tmp_path) == GIB
    machine.limit_v1("a", UNLIMITED, 2 * GIB)
    assert available_memory(tmp_path) == FREE


def test_groups_of_others_do_not_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/mine\n")
    machine.limit_v2("other", GIB, GIB)
    assert available_memory(tmp_path) == FREE


def test_a_group_beyond_its_limit_leaves_nothing_and_never_less(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n")
    machine.limit_v2("", GIB, 2 * GIB)
    assert available_memory(tmp_path) == 0


def test_a_large_limit_does_not_exceed_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n")
    machine.limit_v2("", 500 * GIB, GIB)
    assert available_memory(tmp_path) == FREE


@pytest.mark.parametrize("text", ["", "nonsense", "0::\n\n:", "4:memory\n"])
def test_files_that_make_no_sense_set_no_limit(text: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, text)
    machine.limit_v2("", "nonsense", GIB)
    machine.limit_v1("", 7, -1)
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").unlink()
    assert available_memory(tmp_path) == FREE


def test_where_linux_shows_nothing_the_system_is_asked(tmp_path: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory(tmp_path) <= total


def test_the_free_memory_of_a_cpu_is_within_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_memory", lambda: 77)
    assert device.free_memory(torch.device("cpu")) == 77
