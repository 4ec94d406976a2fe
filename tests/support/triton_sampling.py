"""The sampler's kernels and what they are held against, for their tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from foretoken.core.ops.triton.sampling.sampler import TritonSampler
from foretoken.core.sampling.drafted_row import DraftedRow
from foretoken.core.sampling.sampler import TorchSampler
from foretoken.core.sampling.verifier import SampledToken

ORACLE = TorchSampler()
SAMPLER = TritonSampler(tile=256)


def oracle(logits: torch.Tensor, rows: Sequence[DraftedRow]) -> list[SampledToken]:
    with torch.device("cpu"):
        return ORACLE.sample(logits.cpu(), rows)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Overflow is infinity and no warning. And quick: the interpreter prepares the language for
    every call of a function in a kernel; once for each module that has some is enough.
    """
    slow, prepared = InterpretedFunction.__call__, set[str]()

    def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ in prepared:
            return self.rewrite()(*args, **kwargs)
        prepared.add(self.fn.__module__)
        return slow(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "__call__", call)
    with np.errstate(all="ignore"):
        yield
