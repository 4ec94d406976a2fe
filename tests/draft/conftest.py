"""Requests made of plain lists."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest

from foretoken.core.interface.request import Request, Usage
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.draft.sources.source import Source

MakeRequest = Callable[..., Request]


@pytest.fixture
def make_request() -> MakeRequest:
    """``make_request(prompt, output, namespace=, cached=, seed=, temperature=, prediction=)``."""
    count = 0

    def make(
        prompt: Sequence[int],
        output: Sequence[int] = (),
        *,
        namespace: str | None = None,
        cached: int = 0,
        seed: int = 0,
        temperature: float = 1.0,
        prediction: Sequence[int] | None = None,
    ) -> Request:
        nonlocal count
        count += 1
        return Request(
            request_id=f"r-{count}",
            tokens=array("q", [*prompt, *output]),
            sampling=SamplingMetadata(
                params=TokenSamplingParams(temperature=temperature),
                seed=seed,
                prompt_len=len(prompt),
            ),
            namespace=namespace,
            prediction=None if prediction is None else array("q", prediction),
            serial=count,
            usage=Usage(cached_tokens=cached),
        )

    return make


@pytest.fixture
def index_all() -> Callable[[Source, Request], int]:
    """Index until there is nothing left; returns the number of tokens."""

    def index_all(source: Source, request: Request) -> int:
        total = 0
        while taken := source.index(request):
            total += taken
        return total

    return index_all
