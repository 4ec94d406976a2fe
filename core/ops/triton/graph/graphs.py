"""Graph: work recorded once and launched as a whole from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

T = TypeVar("T")  # what work leaves: tensors


class Graph(Protocol):
    """One recording. What it reads and writes stays where it was while it was recorded."""

    def capture(self, work: Callable[[], T]) -> T:
        """Record ``work``; where every `replay` leaves what it returned."""

    def replay(self) -> None:
        """Do the work again, behind what the device was asked for so far."""


MakeGraph: TypeAlias = Callable[[], Graph]


class CudaGraph:
    """A CUDA graph. Those with the same ``memory`` use it in turn: one is over, then the next.

    So its result holds until another of them is replayed.
    """

    def __init__(self, memory: Any) -> None:  # noqa: ANN401 - torch has no public name for it
        self._graph = torch.cuda.CUDAGraph()
        self._memory = memory

    def capture(self, work: Callable[[], T]) -> T:
        """Record ``work``, after doing it once: what compiles or allocates on first use does."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        # Other threads may use the device meanwhile; only this one's calls are recorded.
        with torch.cuda.graph(self._graph, pool=self._memory, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()


def cuda_graphs() -> MakeGraph:
    """Graphs that share what memory they need in between."""
    memory = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(memory)
