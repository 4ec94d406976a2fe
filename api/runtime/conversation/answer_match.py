"""Match of a rendered answer with its generated text: what the chat template kept or added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...parsing.formats.harmony import HARMONY_THINK
from ...parsing.reasoning import Thinking


@dataclass(frozen=True, slots=True)
class AnswerMatch:
    """Match between an answer and the text that the template rendered for it."""

    start: int = 0  # index of the first character of the answer that the template keeps
    opening: str = ""  # end of the prompt, which the template renders as part of the message


def match_answer(
    written: str, raw: str, message: Mapping[str, Any], thinking: Thinking | None
) -> AnswerMatch | None:
    """Return how the rendered text of an answer matches its generated text; None if they differ.

    White space is ignored, since templates trim it. Calls are not compared, since templates render
    them in their own form.
    """
    if written == raw:
        return AnswerMatch()
    shown, said = _squashed(written), _squashed(raw)
    if shown == said:
        return AnswerMatch()
    if message.get("tool_calls"):
        return _match_calls(written, raw, message, thinking)
    if said.endswith(shown):
        return AnswerMatch(_suffix(raw, len(shown)))
    if said and shown.endswith(said):
        return AnswerMatch(opening=_opening(written, raw, len(said)))
    return None


def _match_calls(
    written: str, raw: str, message: Mapping[str, Any], thinking: Thinking | None
) -> AnswerMatch | None:
    if _squashed(message.get("content") or "") not in _squashed(written):
        return None
    end = raw.find(thinking.end) if thinking is not None else -1
    if thinking is None or end < 0:
        return AnswerMatch()
    if thinking is HARMONY_THINK and not raw.startswith(thinking.begin):
        # Harmony also ends text before a call with this delimiter; its prompts open no reasoning.
        return AnswerMatch()
    if thinking.end not in written:
        rest = raw[end + len(thinking.end) :]
        return AnswerMatch(len(raw) - len(rest.lstrip("\n")))
    begin = thinking.begin + thinking.label
    if raw.lstrip().startswith(begin):
        return AnswerMatch()
    opened = written[: written.find(begin) + len(begin)]
    breaks = written[len(opened) :]
    return AnswerMatch(opening=opened + breaks[: len(breaks) - len(breaks.lstrip("\n"))])


def _squashed(text: str) -> str:
    return "".join(text.split())


def _suffix(text: str, count: int) -> int:
    """Return the index at which the last ``count`` non-space characters begin."""
    at = len(text)
    while count:
        at -= 1
        count -= not text[at].isspace()
    return at


def _opening(written: str, raw: str, count: int) -> str:
    """Return the rendered text before an answer, which is its last ``count`` non-space characters.

    White space with which the answer itself begins is left out.
    """
    opening = written[: _suffix(written, count)]
    space = raw[: len(raw) - len(raw.lstrip())]
    return opening.removesuffix(space) if space else opening


def openings(written: str, thinking: Thinking | None) -> list[str]:
    """Return the texts with which the prompt of an answer may have ended, after earlier messages.

    They are "" and, if the rendered message begins with reasoning, its opening delimiter.
    """
    if thinking is None or not written.startswith(thinking.begin):
        return [""]
    begin = thinking.begin + thinking.label
    breaks = written[len(begin) :]
    spaced = begin + breaks[: len(breaks) - len(breaks.lstrip("\n"))]
    return ["", begin] if spaced == begin else ["", spaced, begin]
