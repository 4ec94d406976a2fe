"""Choices that a pause ended: trainers continue them, so they are no errors."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from ....core.engine.rollouts.updatable_engine import PAUSED
from ...dialects.openai.writing import Writer, reason_body
from ...types.results import Choice, TextDelta


def is_pause(ended: Choice | TextDelta) -> bool:
    """Whether a pause ended a choice, maybe before its first token."""
    return ended.finish_reason == "abort" and ended.stop_reason == PAUSED


def reason_of(ended: Choice | TextDelta) -> str:
    """Return ``finish_reason``: "abort" after a pause, as vLLM has it, else OpenAI's."""
    return "abort" if is_pause(ended) else reason_body(ended.finish_reason or "")


class PausedWriter(Writer[Any, Any, Any]):
    """A writer that reports a pause as the finish reason "abort"."""

    @override
    def refuse_aborted(self, choice: Choice) -> None:
        if not is_pause(choice):
            super().refuse_aborted(choice)

    @override
    def reason(self, ended: Choice | TextDelta) -> str:
        return reason_of(ended)
