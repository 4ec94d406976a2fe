"""FakeStream: a device that is slow, on the CPU.

What it is asked for it does when somebody waits for a mark behind that, and no more than that. So
whoever looks too early finds nothing, and what the host writes over before it is read is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from foretoken.core.ops.triton import graph_inputs
from support.fake_graph import FakeGraph, Memory, _Recorder


class FakeStream:
    """Work in the order in which it was asked for."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []
        self._num_done = 0
        self.num_waits = 0  # for what was not done yet
        self.is_driven = False

    @property
    def num_pending(self) -> int:
        """Operations that were asked for and not done."""
        return len(self._queue) - self._num_done

    def ask(self, work: Callable[[], object]) -> None:
        """Do it behind all that was asked for so far."""
        self._queue.append(work)

    def make_event(self, _: object = None) -> FakeMark:
        """In place of `graph_inputs.make_event`, before anything is made that has marks."""
        return FakeMark(self)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Whatever torch and Triton are asked for waits in the queue."""
        with pytest.MonkeyPatch.context() as patch, _Asker(self._queue):
            patch.setattr(InterpretedFunction, "run", self._deferred(InterpretedFunction.run))
            patch.setattr(graph_inputs, "_host_memory", _by_the_host(graph_inputs._host_memory))
            patch.setattr(self, "is_driven", True)
            yield

    def _deferred(self, launch: Any) -> Any:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.ask(lambda: launch(kernel, *args, **kwargs))

        return run

    def wait(self, count: int) -> None:
        """Until so many operations are done."""
        self.num_waits += self._num_done < count
        with _disable_current_modes(), torch.inference_mode():
            while self._num_done < count:
                self._queue[self._num_done]()
                self._num_done += 1

    def mark(self) -> int:
        """Number of operations that were asked for so far."""
        return len(self._queue)


class FakeMark:
    """`Event` of core/ops/machine/device.py."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._at = 0

    def record(self) -> None:
        self._at = self._stream.mark()

    def synchronize(self) -> None:
        self._stream.wait(self._at)


class StreamGraph(FakeGraph):
    """A graph that is captured before the stream is driven; then it is replayed on it."""

    def __init__(self, stream: FakeStream, memory: Memory) -> None:
        super().__init__(memory)
        self._stream = stream
        self.num_replayed = 0

    def replay(self) -> None:
        self.num_replayed += 1
        if self._stream.is_driven:
            self._stream.ask(super().replay)
        else:
            super().replay()


class _Asker(_Recorder):
    """Recorder of a graph in which the result of an operation is void until it is done.

    What it writes in place it writes when its turn comes: memory on the device may be in use still.
    """

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if not self.is_launching and func.overloadpacket.__name__ in ("copy_", "fill_", "zero_"):
            self.calls.append(lambda: func(*args, **(kwargs or {})))
            return args[0]
        num_made = len(self.made)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for made in self.made[num_made:]:
            made.fill_(torch.nan if made.is_floating_point() else 0)  # an index that is in range
        return result


def _by_the_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The host's memory is no affair of the device."""

    def made(*args: Any) -> Tensor:
        with _disable_current_modes():
            return make(*args)

    return made
