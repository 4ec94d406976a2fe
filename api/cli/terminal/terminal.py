"""Answers in the terminal: streamed, coloured by draft source, with statistics."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, TextIO

from ....core.interface.request import Usage
from ....core.telemetry.spec_decode_stats import by_source
from ...runtime.chat import ChatClient
from ...sdk.async_llm import AsyncLLM
from ...sdk.options import ChatOptions
from ...types.results import TextDelta
from ...types.sampling_params import SamplingParams

COLOURS = {"green": 32, "cyan": 36, "magenta": 35, "yellow": 33, "blue": 34, "red": 31}
GREY = "\x1b[90m"
RESET = "\x1b[0m"


def wants_colour(stream: TextIO) -> bool:
    """Whether to use colours: NO_COLOR disables them, FORCE_COLOR enables them, else on a
    terminal.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Palette:
    """Assigns a colour to each draft source in order of appearance; the target has none."""

    def __init__(self, *, coloured: bool) -> None:
        self.coloured = coloured
        self._sources: list[str] = []

    def name(self, source: str) -> str:
        """Return the name of a source's colour."""
        if not source:
            return "plain"
        if source not in self._sources:
            self._sources.append(source)
        return list(COLOURS)[self._sources.index(source) % len(COLOURS)]

    def paint(self, text: str, source: str) -> str:
        """Return the text with the escape codes of a source's colour."""
        name = self.name(source)
        if not text or not source or not self.coloured:
            return text
        return f"\x1b[{COLOURS[name]}m{text}{RESET}"


class Painter:
    """Colours one answer by adding escape codes; the text itself is unchanged.

    ``decode`` decodes a token and returns the characters that it adds to the text. The text may
    arrive later than its tokens: until then the number of each token's characters waits in a queue.
    """

    def __init__(self, palette: Palette, decode: Callable[[int], str]) -> None:
        self._palette = palette
        self._decode = decode
        self._ahead: deque[tuple[int, str]] = deque()  # characters not shown yet, by source
        self._counts: Counter[str] = Counter()

    def paint(self, delta: TextDelta) -> str:
        """Return the coloured text of the next delta."""
        for token_id, source in zip(delta.token_ids, delta.sources, strict=True):
            self._ahead.append((len(self._decode(token_id)), source))
            self._counts[source] += 1
        parts, start = [], 0
        while start < len(delta.text):
            rest = len(delta.text) - start
            size, source = self._ahead.popleft() if self._ahead else (rest, "")
            if size > rest:
                self._ahead.appendleft((size - rest, source))
            parts.append(self._palette.paint(delta.text[start : start + size], source))
            start += size
        return "".join(parts)

    def legend(self) -> str:
        """Return a line with the number of tokens and the colour of each source."""
        parts = []
        for source, count in self._counts.items():
            colour = f" = {self._palette.name(source)}" if self._palette.coloured else ""
            parts.append(f"{source or 'the model itself'}{colour}: {count}")
        return f"[tokens by source: {', '.join(parts)}]"


class Style(NamedTuple):
    """Options for further output, such as the statistics of an answer."""

    colours: Palette | None = None  # colours of draft sources
    has_stats: bool = False  # whether to print statistics


PLAIN = Style()


def style_of(parsed: argparse.Namespace) -> Style:
    """Return the output options of the command line."""
    if not parsed.show_drafts:
        return Style(has_stats=parsed.stats)
    return Style(Palette(coloured=wants_colour(sys.stdout)), has_stats=True)


class Printer:
    """Prints one answer as it arrives: text to stdout, reasoning in grey to a terminal."""

    def __init__(self) -> None:
        self._last = ""  # last character of the text
        self._is_thinking = False
        self._shows_thoughts = _is_terminal(sys.stdout) and _is_terminal(sys.stderr)

    def think(self, text: str) -> None:
        """Print a part of the reasoning to stderr, if stdout and stderr are terminals."""
        if text and self._shows_thoughts:
            self._is_thinking = True
            grey = f"{GREY}{text}{RESET}" if wants_colour(sys.stderr) else text
            print(grey, end="", file=sys.stderr, flush=True)

    def write(self, text: str, painted: str = "") -> None:
        """Print a part of the text.

        ``painted``: the part with colour codes, which is printed instead if it is not empty.
        """
        if not text:
            return
        self._end_thoughts()
        self._last = text[-1]
        print(painted or text, end="", flush=True)

    def end(self) -> None:
        """End the last line."""
        self._end_thoughts()
        if self._last not in ("", "\n"):
            print(flush=True)

    def _end_thoughts(self) -> None:
        if self._is_thinking:
            print("\n", file=sys.stderr, flush=True)
        self._is_thinking = False


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


class Shown(Protocol):
    """A running answer."""

    @property
    def usage(self) -> Usage:
        """The usage so far."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""

    def deltas(self) -> AsyncGenerator[TextDelta]:
        """Yield the answer step by step."""


class LocalModel:
    """A model in this process, whose answers are printed."""

    def __init__(self, llm: AsyncLLM, style: Style) -> None:
        self._llm, self._style = llm, style
        self.name = llm.built.name
        self.sampling: Mapping[str, Any] = llm.built.sampling_defaults.in_force
        # Colours belong to tokens, so no text may be removed.
        self._chats = ChatClient(llm, reasoning_parser="auto" if style.colours is None else "none")

    async def answer(
        self, messages: list[dict[str, Any]], params: SamplingParams, texts: list[str]
    ) -> list[int] | None:
        """Print the answer to a conversation and append its text to ``texts``.

        Returns the token ids that can replace the answer in later prompts, or None.
        """
        chat = ChatOptions(None, None).chat_input(messages, params)
        answer = await self._chats.open(chat, hands_out=True)
        try:
            return (await self._show(answer, texts)).message_ids
        finally:
            answer.close()

    async def complete(self, prompt: str, params: SamplingParams, texts: list[str]) -> None:
        """Print the continuation of a text and append it to ``texts``."""
        answer = await self._llm.open(prompt, params)
        try:
            await self._show(answer, texts)
        finally:
            self._llm.forget(answer)

    async def _show(self, answer: Shown, texts: list[str]) -> TextDelta:
        """Print an answer as it arrives, then the legend and statistics. Return its last delta."""
        colours, painter = self._style.colours, None
        if colours is not None:
            detokenizer = self._llm.tokenizer.detokenizer(answer.prompt_token_ids)
            painter = Painter(colours, detokenizer.decode)
        printer, last = Printer(), TextDelta()
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for last in deltas:
                    texts.append(last.text)
                    printer.think(last.reasoning)
                    printer.write(last.text, painter.paint(last) if painter else "")
        finally:
            printer.end()  # ends the line before lines on stderr follow
        if painter:
            print(painter.legend(), file=sys.stderr)
        if self._style.has_stats:
            print(cost_line(answer.usage), file=sys.stderr)
        return last


def cost_line(usage: Usage) -> str:
    """Return the statistics of an answer in one line."""
    parts = [
        f"{usage.completion_tokens} tokens in {usage.verify_steps} steps",
        f"{usage.completion_tokens / max(1, usage.verify_steps):.2f} tokens/step",
        _draft_cost(usage),
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached",
        f"first token {usage.time_to_first_token * 1e3:.0f} ms",
    ]
    seconds = usage.total_time - usage.time_to_first_token
    if usage.completion_tokens > 1 and seconds > 0:
        parts.append(f"then {(usage.completion_tokens - 1) / seconds:.0f} tokens/s")
    return f"[{', '.join(parts)}]"


def _draft_cost(usage: Usage) -> str:
    if not usage.proposed_tokens:
        return "no drafts"
    accepted = f"{usage.accepted_tokens} of {usage.proposed_tokens} draft tokens accepted"
    return f"{accepted} ({by_source(usage.proposed_by_source, usage.accepted_by_source)})"
