"""Verify a recorded session: every turn again by its tokens, with its answer as the draft."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from ..certify.records import RecordedRequest
from ..runtime.conversation.prompt_history import common_len
from ..runtime.generation import Answer
from .client import ReplayClient
from .outcome import Outcome, Played, Side, first_difference, sides
from .sessions import Session, Turn

SHOWN = 24  # tokens of a different answer that are computed after the first difference
Tell = Callable[[Played], None]


async def verify_session(llm: ReplayClient, session: Session, tell: Tell) -> Outcome:
    """Compute every answer of a session again, each after its recorded prompt.

    Prompts and equal answers are kept in the cache, so a turn costs its new prompt tokens.
    """
    outcome = Outcome(
        session=session.name,
        model=llm.built.name,
        num_turns=sum(len(turn.records) for turn in session.turns),
        exact=llm.built.exact and session.first.exact,
    )
    for turn in session.turns:
        for record in turn.records:
            played = await _verified(llm, turn, record)
            outcome.turns.append(played)
            tell(played)
    return outcome


async def _verified(llm: ReplayClient, turn: Turn, record: RecordedRequest) -> Played:
    if record.redacted is not None or not record.prompt or min(record.prompt) < 0:
        why = "was redacted" if record.redacted is not None else "has images"
        note = f"turn {turn.number} {why}: the recording has no tokens to verify"
        now = Side("", is_cut=True)
        return Played(
            number=turn.number, id=record.id, kind="new", recorded=None, now=now, notes=[note]
        )
    params = dataclasses.replace(record.sampling, **llm.draft(record.tokens))
    answer = await llm.open(
        record.prompt, params, needs_closing=record.closes, shown_ids=frozenset(record.shown)
    )
    try:
        tokens, reason = await _until_difference(answer, record)
    finally:
        llm.forget(answer)
    position = first_difference(record.tokens, tokens, (record.finish_reason, reason))
    if not reason and position is None:
        position = len(record.tokens)
    decode = partial(llm.tokenizer.decode, skip_special_tokens=False)
    recorded, now = sides(record.tokens, tokens, position, decode)
    now = dataclasses.replace(now, finish_reason=reason, is_cut=not reason)
    return Played(
        number=turn.number,
        id=record.id,
        kind="equal" if position is None else "parted",
        recorded=dataclasses.replace(recorded, finish_reason=record.finish_reason),
        now=now,
        position=position,
        num_items=len(turn.items),
        recorded_seconds=record.seconds,
        **usage_of(answer),
    )


async def _until_difference(answer: Answer, record: RecordedRequest) -> tuple[list[int], str]:
    """Return the tokens up to some after the first difference, and the finish reason, or ""."""
    tokens: list[int] = []
    at, is_equal = 0, True  # number of equal tokens so far
    async with aclosing(answer.generations[0].deltas()) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                return tokens, delta.finish_reason
            if is_equal:
                recorded = array("q", record.tokens[at : len(tokens)])
                at += common_len(recorded, array("q", tokens[at:]))
                is_equal = at == len(tokens)
            if len(tokens) > at + SHOWN:
                return tokens, ""
    return tokens, ""


def usage_of(answer: Answer) -> dict[str, Any]:
    """Return the counts of an answer as fields of `Played`."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "num_generated": usage.completion_tokens
        - min(usage.accepted_prediction_tokens, usage.completion_tokens),
        "num_steps": usage.verify_steps,
        "seconds": usage.total_time,
    }
