"""Graph: work that is recorded once and then launched as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

T = TypeVar("T")  # tensors that the work returns


class Graph(Protocol):
    """A recording of work, whose inputs and outputs stay at the same addresses."""

    def capture(self, work: Callable[[], T]) -> T:
        """Record ``work``; return the tensors to which every `replay` writes its results."""

    def replay(self) -> None:
        """Launch the work again, after everything launched so far."""


MakeGraph: TypeAlias = Callable[[], Graph]


class CudaGraph:
    """A CUDA graph. Graphs with the same ``memory`` use it one after another.

    So a graph's result is valid until another graph with this memory is replayed.
    """

    def __init__(self, memory: Any) -> None:  # noqa: ANN401 - torch has no public name for it
        self._graph = torch.cuda.CUDAGraph()
        self._memory = memory

    def capture(self, work: Callable[[], T]) -> T:
        """Record ``work`` after doing it once, so that compilation and allocation are done."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        # Other threads may use the device meanwhile; only this thread's calls are recorded.
        with torch.cuda.graph(self._graph, pool=self._memory, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


def cuda_graphs() -> MakeGraph:
    """Return a function that makes CUDA graphs with shared memory for intermediate results."""
    memory = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(memory)
