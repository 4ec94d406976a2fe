"""Separation of a model's reasoning from its content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from .output_parser import Event, OutputParser, ReaderParser, Reading, Reasoning, Source


@dataclass(frozen=True, slots=True)
class Thinking:
    """The delimiters around a thought. Line breaks directly after a delimiter belong to it.

    ``label``: text that always follows the first delimiter.
    """

    begin: str
    end: str
    label: str = ""

    def state(self, prompt_tail: str) -> ThinkingState:
        """Return whether a prompt leaves a thought open or closed, or a thought may begin."""
        tail = prompt_tail.rstrip()
        if tail.endswith(self.begin + self.label):
            return ThinkingState.OPEN
        return ThinkingState.CLOSED if tail.endswith(self.end) else ThinkingState.FREE


class ThinkingState(Enum):
    """Whether an answer begins inside a thought, may open one, or follows one."""

    OPEN = auto()
    FREE = auto()
    CLOSED = auto()


THINK = Thinking("<think>", "</think>")
MISTRAL_THINK = Thinking("[THINK]", "[/THINK]")
GEMMA_THINK = Thinking("<|channel>", "<channel|>", "thought")
COHERE_THINK = Thinking("<|START_THINKING|>", "<|END_THINKING|>")
KIMI_THINK = Thinking("\u25c1think\u25b7", "\u25c1/think\u25b7")
APERTUS_THINK = Thinking("<|inner_prefix|>", "<|inner_suffix|>")
MINIMAX_M3_THINK = Thinking("<mm:think>", "</mm:think>")
SEED_THINK = Thinking("<seed:think>", "</seed:think>")


def thinking_parser(marks: Thinking, state: ThinkingState, inner: OutputParser) -> OutputParser:
    """Return a parser that separates thoughts and gives other text to ``inner``."""
    if state is ThinkingState.CLOSED:
        return inner
    is_open = state is ThinkingState.OPEN
    return ReaderParser(partial(_read, marks=marks, is_open=is_open, inner=inner))


def _read(source: Source, *, marks: Thinking, is_open: bool, inner: OutputParser) -> Reading[None]:
    space = "" if is_open else (yield from source.white())
    if is_open or (yield from source.literal(marks.begin + marks.label)):
        yield from _line_breaks(source)
        if (yield from source.until(marks.end, Reasoning)):
            yield from source.literal(marks.end)
            yield from _line_breaks(source)
        space = ""
    elif (yield from source.literal(marks.end)):  # an answer without a thought may say so
        yield from _line_breaks(source)
        space = ""
    yield from inner.feed(space)
    yield from _rest(source, inner)


def _line_breaks(source: Source) -> Reading[None]:
    while (yield from source.literal("\n")):
        pass


def _rest(source: Source, inner: OutputParser) -> Reading[None]:
    while True:
        yield from _fed(inner, source.take_all())
        if source.is_ended:
            yield from inner.end(is_cut=source.is_cut)
            return
        yield None


def _fed(inner: OutputParser, text: str) -> Sequence[Event]:
    return inner.feed(text) if text else ()
