"""FakeGraph: what a CUDA graph does, on the CPU.

It records every operation of torch and every launch of a Triton kernel (under the interpreter):
tensors by reference, numbers by value. A replay does exactly those again into the same tensors, so
that whatever the host decides anew for each pass, and does not write to where the graph reads it,
is missing from the result.

Graphs of one factory share memory, and more strictly than CUDA's: nothing that any of them made
outlives the next replay. So whoever holds a result for too long finds it void.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

# What needs a value of the device, which is not there while a graph is captured.
REFUSED = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")
VOID = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


Memory: TypeAlias = list[Tensor]  # what the graph that was replayed last has made


def fake_graphs() -> Callable[[], FakeGraph]:
    """In place of `cuda_graphs`: graphs that share their memory."""
    memory: Memory = []
    return lambda: FakeGraph(memory)


class FakeGraph:
    """`Graph` of core/ops/triton/graph/graphs.py. Those with the same ``memory`` use it in turn."""

    def __init__(self, memory: Memory) -> None:
        self._calls: list[Callable[[], object]] = []
        self._made: list[Tensor] = []
        self._memory = memory

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record ``work``. What it made is void until a replay: nothing is computed here."""
        assert not self._calls, "a graph is captured once"
        recorder = _Recorder(self._calls)
        with recorder, _recorded_launches(recorder):
            out = work()
        self._made = recorder.made
        _void(self._made)
        return out

    def replay(self) -> None:
        """Do all of it again. What its peers or it itself had left is void."""
        _void(self._memory)
        self._memory[:] = self._made
        for call in self._calls:
            call()


class _Recorder(TorchDispatchMode):
    """Adds each operation of torch to ``calls``."""

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        super().__init__()
        self.calls = calls
        self.made: list[Tensor] = []
        self.is_launching = False  # the interpreter uses torch, too

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_launching:
            return result
        name = func.overloadpacket.__name__
        if name in REFUSED:
            raise RuntimeError(f"{name} reads the device while a graph is captured")
        fresh = _fresh(result, args, kwargs)
        self.made += fresh
        if name not in VOID:
            self.calls.append(lambda: _again(func, args, kwargs, fresh))
        return result


def _void(tensors: Sequence[Tensor]) -> None:
    for each in tensors:
        each.fill_(torch.nan if each.is_floating_point() else -1)


def _again(func: Any, args: Sequence[Any], kwargs: Any, fresh: Sequence[Tensor]) -> None:
    """The operation on what its tensors hold now, and into the tensors that it made then."""
    result = func(*args, **kwargs)
    for before, now in zip(fresh, _fresh(result, args, kwargs), strict=True):
        before.copy_(now)


def _fresh(result: object, *sources: object) -> list[Tensor]:
    """The tensors of a result that have memory of their own."""
    known = {each.untyped_storage().data_ptr() for each in _tensors(sources)}
    return [each for each in _tensors(result) if each.untyped_storage().data_ptr() not in known]


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _recorded_launches(recorder: _Recorder) -> Iterator[None]:
    launch = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert isinstance(grid, tuple), "a grid is a number of programs, decided at capture"
        recorder.is_launching = True
        launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        recorder.is_launching = False
        recorder.calls.append(lambda: launch(kernel, *args, grid=grid, warmup=warmup, **kwargs))

    InterpretedFunction.run = run
    try:
        yield
    finally:
        InterpretedFunction.run = launch
