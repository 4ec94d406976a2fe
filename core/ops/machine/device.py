"""The device: its choice, free memory, CPU features, copies and timing.

Only this folder and the backends use `torch.cuda`; all other code uses this module or an `Ops`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...errors import ModelLoadError
from .system_memory import available_memory

logger = logging.getLogger(__name__)


def choose_device(requested: torch.device | str) -> torch.device:
    """Return the requested device; ``auto`` is cuda if torch sees a CUDA device, else cpu.

    Raises `ModelLoadError` for an unavailable or unsupported device.
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
    """Return the bytes available on a device now; on the CPU within its container's limits."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # returns freed memory that torch keeps
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's features by their Linux names; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split())


class Event(Protocol):
    """A mark in the device's queue of work, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Set the mark after all work launched so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached the mark."""


def make_event(device: torch.device) -> Event:
    """Return a reusable event."""
    if device.type == "cuda":
        return torch.cuda.Event()  # type: ignore[no-untyped-call]
    return _HostEvent()


def default_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which work goes to the default stream of ``device``, in any thread.

    The thread of an event loop may have made another stream or another GPU its current one. On the
    CPU the context does nothing.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.default_stream(device))


def prepare_thread(device: torch.device) -> None:
    """Create what the calling thread needs once before it launches work on ``device``.

    This is torch's handle of cuBLAS, which has memory on the device: each thread has one, and
    another thread's warm-up does not create it. Compiled kernels, graphs and buffers belong to the
    process, and each launch chooses its stream itself. On the CPU the function does nothing.
    """
    if device.type == "cuda":
        with default_stream(device):
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


class _HostEvent:
    """An event that never waits: the CPU is done when a call returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PageCopier:
    """Copies between KV pages and staging buffers, and waits only for its own copies.

    ``stream``: a GPU queue for these copies only, so that they do not wait for steps computed
    meanwhile. None on the host.
    """

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair into the first; returns when all copies are done."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()


class Stream(Protocol):
    """A device's queue of work, such as `torch.cuda.Stream`."""

    def synchronize(self) -> None:
        """Wait until all work in the queue is done."""


def make_copier(device: torch.device) -> PageCopier:
    """Return a `PageCopier`, on a GPU with its own stream."""
    is_cuda = device.type == "cuda"
    return PageCopier(torch.cuda.Stream(device) if is_cuda else None)  # type: ignore[no-untyped-call]


class Stopwatch(Protocol):
    """Measures the seconds that a device takes for the work launched between `start` and `stop`.

    A GPU works asynchronously: the host's clock would measure only the launches.
    """

    def start(self) -> None:
        """Start the timer once all work launched so far is done."""

    def stop(self) -> None:
        """Stop the timer once all work launched since the start is done."""

    def seconds(self) -> float:
        """Return the seconds from start to stop; waits until the device has reached the stop."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    """Return a reusable stopwatch."""
    return _CudaStopwatch() if device.type == "cuda" else _HostStopwatch()


class _HostStopwatch:
    """The host's clock: the CPU is done when a call returns."""

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
