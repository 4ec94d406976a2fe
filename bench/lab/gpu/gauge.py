"""Gauge: describes a device and measures times by the device's own clock."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ....core.ops.machine.device import make_stopwatch

WARM_UP = 3  # Calls before the timed ones.


@dataclass(slots=True)
class Activity:
    """Kernels and copies of a device during a measurement; empty on a device without a profiler."""

    busy_seconds: float = 0.0  # Seconds in which at least one kernel or copy ran.
    num_kernels: int = 0
    seconds_by_name: Counter[str] = field(default_factory=Counter)


class Gauge:
    """Times calls on one device: by events on a GPU, by the host's clock otherwise."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"

    def card(self) -> dict[str, object]:
        """Return name, memory in bytes, multiprocessors, cache and capability of a GPU."""
        if not self.is_gpu:
            return {"name": self.device.type}
        found = torch.cuda.get_device_properties(self.device)
        return {
            "name": found.name,
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
            "cache_bytes": found.L2_cache_size,
            "capability": f"{found.major}.{found.minor}",
            "cuda": torch.version.cuda,
        }

    def synchronize(self) -> None:
        """Wait for all launched work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Return the memory of freed tensors to the device."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def seconds(self, call: Callable[[], object], *, repeats: int) -> list[float]:
        """Return the device seconds of each of ``repeats`` calls, launched back to back."""
        for _ in range(WARM_UP):
            call()
        self.synchronize()
        watches = [make_stopwatch(self.device) for _ in range(repeats)]
        for watch in watches:
            watch.start()
            call()
            watch.stop()
        return [watch.seconds() for watch in watches]

    def host_seconds(self, call: Callable[[], object], *, repeats: int) -> float:
        """Return the mean host seconds to launch a call, without the device's own work."""
        for _ in range(WARM_UP):
            call()
        self.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        spent = time.perf_counter() - began
        self.synchronize()
        return spent / repeats

    def graph(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a replay of the call as one CUDA graph; on other devices the call itself."""
        if not self.is_gpu:
            return call
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # Memory that a first call allocates must not be captured.
            call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        return captured.replay

    @contextmanager
    def watch(self) -> Iterator[Activity]:
        """Fill an `Activity` with the device's work inside the block, launched by any thread."""
        found = Activity()
        if not self.is_gpu:
            yield found
            return
        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield found
            self.synchronize()
        _add_up(profiler.events(), found)


def _add_up(events: Any, found: Activity) -> None:  # noqa: ANN401 - the profiler's own
    """Add up the time in which anything ran; kernels may overlap, so they cannot be summed."""
    spans = []
    for event in events:
        if event.device_type.name != "CUDA":
            continue
        start, end = event.time_range.start, event.time_range.end  # Microseconds.
        spans.append((start, end))
        found.seconds_by_name[event.name] += (end - start) / 1e6
    found.num_kernels = len(spans)
    reached = float("-inf")
    for start, end in sorted(spans):
        found.busy_seconds += max(0.0, end - max(start, reached)) / 1e6
        reached = max(reached, end)
