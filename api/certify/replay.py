"""Compute a recorded request again and compare the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ...core.interface.request import CacheOptions
from ..runtime.engine_client import EngineClient
from ..runtime.interrupts import ending_at_once
from ..sdk.async_llm import AsyncLLM
from .records import RecordedRequest, kernels_of


class Replayed(Struct, kw_only=True):
    """An answer that was computed again from a record.

    ``position``: index of the first token that differs from the record; None if the answers are
    equal.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    position: int | None
    exact: bool
    kernels: str


async def replay(
    record: RecordedRequest, model: str | None, options: Mapping[str, Any]
) -> Replayed:
    """Compute a recorded request on a new engine.

    ``model`` and ``options``, where given, replace the values in the record.
    """
    asked = {**record.options, **options}
    llm = AsyncLLM(model or record.model, **asked)
    with ending_at_once():
        await llm.start()
    async with llm:
        return await replay_with(llm, record)


async def replay_with(llm: EngineClient, record: RecordedRequest) -> Replayed:
    """Compute a recorded request on a started engine, and compare the answers."""
    answer = await llm.open(
        record.prompt,
        record.sampling,
        cache=CacheOptions(write=False),
        needs_closing=record.closes,
        shown_ids=frozenset(record.shown),
    )
    done = await llm.finish(answer)
    found = list(done.token_ids)
    return Replayed(
        text=done.text,
        tokens=found,
        finish_reason=done.finish_reason,
        position=_first_difference(record, found, done.finish_reason),
        exact=llm.built.exact,
        kernels=kernels_of(llm.built.settings),
    )


def _first_difference(record: RecordedRequest, found: list[int], reason: str) -> int | None:
    pairs = zip(record.tokens, found, strict=False)
    differing = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if differing is not None:
        return differing
    if len(found) != len(record.tokens) or reason != record.finish_reason:
        return min(len(found), len(record.tokens))
    return None
