"""The device: which one computes, its memory and its CPU's features, how long it takes.

Other rooms use this module or an `Ops`: the engine names `torch.cuda` in this folder alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...errors import ModelLoadError
from .system_memory import available_memory

logger = logging.getLogger(__name__)


def choose_device(requested: torch.device | str) -> torch.device:
    """The device of that name; ``auto`` is cuda where torch sees one, else cpu.

    Raises `ModelLoadError` for one that is not there, or of another kind.
    """
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
        logger.info("device auto: %s", _describe(requested))
    device = torch.device(requested)
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {device.type} is not supported; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(f"device cuda is not available: {_why_no_cuda()}")
    return device


def _describe(kind: str) -> str:
    return f"cuda, {torch.cuda.get_device_name()}" if kind == "cuda" else f"cpu, {_why_no_cuda()}"


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return "torch sees no CUDA device"


def free_memory(device: torch.device) -> int:
    """Bytes that could be had on a device now; on the CPU within the limits of a container."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of memory that was freed is free as well
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


@cache
def cpu_flags() -> frozenset[str]:
    """Features of the CPU by their names in Linux; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split())


class Event(Protocol):
    """A mark in the device's queue of work, as `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Set the mark behind all that was launched so far."""

    def synchronize(self) -> None:
        """Wait until the device has come to the mark, and no further."""


def make_event(device: torch.device) -> Event:
    """One that may be set again and again."""
    if device.type == "cuda":
        return torch.cuda.Event()  # type: ignore[no-untyped-call]
    return _HostEvent()


class _HostEvent:
    """The CPU is done when a call returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PageCopier:
    """Copies between pages and staged records, and waits for its own copies alone.

    ``stream``: the queue of a GPU that they have for themselves, as `torch.cuda.Stream` is one: so
    they do not wait for the steps that are computed meanwhile. None on the host.
    """

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor into the first; all are there when this returns."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()


class Stream(Protocol):
    """A queue of work of a device."""

    def synchronize(self) -> None:
        """Wait until all that is in it is done."""


def make_copier(device: torch.device) -> PageCopier:
    """Make one with a stream of its own on a GPU."""
    is_cuda = device.type == "cuda"
    return PageCopier(torch.cuda.Stream(device) if is_cuda else None)  # type: ignore[no-untyped-call]


class Stopwatch(Protocol):
    """Seconds that a device took for the work launched between `start` and `stop`.

    A GPU computes behind the host's back: what the host sees is how long asking took.
    """

    def start(self) -> None:
        """Begin, behind all that was launched so far."""

    def stop(self) -> None:
        """End, behind all that was launched since."""

    def seconds(self) -> float:
        """Seconds from start to stop; waits until the device is there."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    """Make a stopwatch that may be started again and again."""
    return _CudaStopwatch() if device.type == "cuda" else _HostStopwatch()


class _HostStopwatch:
    """The CPU is done when a call returns."""

    def __init__(self) -> None:
        self._began = self._ended = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        return self._ended - self._began


class _CudaStopwatch:
    """Two events in the stream: the host waits only when it reads the time."""

    def __init__(self) -> None:
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        self._ended.synchronize()
        milliseconds: float = self._began.elapsed_time(self._ended)
        return milliseconds / 1000
