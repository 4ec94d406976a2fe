"""Judges: models that score an answer by the probabilities of their labels, as /v1/decisions does.

No text is generated, so a judge needs no seed and no parser, and its score is the same each time.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from ...core.errors import ForetokenError
from ..sdk.async_llm import AsyncLLM
from ..serving.http_client import HttpServer
from .answer import Answer
from .tasks import Task

QUESTION = "The answer is correct."
WITH_EXPECTED = "The answer agrees with the expected answer."


def question_of(task: Task) -> dict[str, Any]:
    """Return the question about an answer: a predicate, or a score if the task has levels."""
    usual = QUESTION if task.expected is None else WITH_EXPECTED
    asked: dict[str, Any] = {"instructions": task.question or usual}
    if task.levels is None:
        return {"type": "predicate", **asked}
    return {"type": "score", "levels": [{"label": each} for each in task.levels], **asked}


def input_of(task: Task, answer: Answer) -> str:
    """Return the text that a judge reads: the task, the expected answer and the answer."""
    parts = [("Question", task.text)]
    if task.expected is not None:
        parts.append(("Expected answer", f"{task.expected}"))
    parts.append(("Answer", answer.text))
    return "\n\n".join(f"{title}:\n{text}" for title, text in parts)


def score_of(task: Task, value: float) -> float:
    """Return the score from 0 to 1 of a decision's value; the best level scores 1.

    Raises `ValueError` if the value is not a number.
    """
    most = 1 if task.levels is None else len(task.levels) - 1
    if math.isnan(value):
        raise ValueError("a decision without a value")
    return min(max(value / most, 0.0), 1.0)


class Judge(Protocol):
    """A model that scores answers."""

    async def score(self, task: Task, answer: Answer) -> float:
        """Return the score of an answer, from 0 to 1."""
        ...


class LocalJudge:
    """A judge on an engine of this process."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def score(self, task: Task, answer: Answer) -> float:
        """Return the probability of yes, or the expected level divided by the best one."""
        try:
            found = await self._llm.decide(input_of(task, answer), [question_of(task)])
            return score_of(task, float(found.answers[0].value))
        except ValueError as error:  # also of an answer that is no valid Unicode
            raise ForetokenError(f"the judge failed: {error}") from None


class ServerJudge:
    """A judge on a server of foretoken."""

    def __init__(self, server: HttpServer, model: str) -> None:
        self._server, self._model = server, model

    async def score(self, task: Task, answer: Answer) -> float:
        """Return the probability of yes, or the expected level divided by the best one."""
        body = {
            "model": self._model,
            "input": input_of(task, answer),
            "questions": [question_of(task)],
        }
        found = await self._server.json("POST", "/v1/decisions", body)
        try:
            decision = found["answers"][0]
            value = decision["probability" if task.levels is None else "score"]
            return score_of(task, float(value))
        except (LookupError, TypeError, ValueError):
            raise ForetokenError(f"{self._server.url} did not answer with a decision") from None
