"""Answers streamed to the terminal, with colours and cost; ``foretoken run``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, TextIO

from ....core.interface.request import Usage
from ....core.telemetry.spec_decode_stats import by_source
from ...runtime.generation import Answer
from ...runtime.preprocess import Prompt
from ...sdk.async_llm import AsyncLLM
from ...types.results import TextDelta
from ...types.sampling_params import SamplingParams
from .progress import watch_loading

COLOURS = {"green": 32, "cyan": 36, "magenta": 35, "yellow": 33, "blue": 34, "red": 31}
RESET = "\x1b[0m"
NOTHING_CAME = "[no text came: run continues a text as it stands; `foretoken chat` asks questions]"


def wants_colour(stream: TextIO) -> bool:
    """Whether to use colours: NO_COLOR disables, FORCE_COLOR enables, else only on a terminal."""
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
        """The name of the colour of a source."""
        if not source:
            return "plain"
        if source not in self._sources:
            self._sources.append(source)
        return list(COLOURS)[self._sources.index(source) % len(COLOURS)]

    def paint(self, text: str, source: str) -> str:
        """The text with the escape codes of the colour of a source."""
        name = self.name(source)
        if not text or not source or not self.coloured:
            return text
        return f"\x1b[{COLOURS[name]}m{text}{RESET}"


class Painter:
    """Colours one answer; it adds escape codes and does not change the text.

    The text may lag behind the tokens. ``push`` returns the number of characters that a token adds
    to the text; they wait in a queue until the text is shown.
    """

    def __init__(self, palette: Palette, push: Callable[[int], str]) -> None:
        self._palette = palette
        self._push = push
        self._ahead: deque[tuple[int, str]] = deque()  # characters not shown yet, and their source
        self._counts: Counter[str] = Counter()

    def paint(self, delta: TextDelta) -> str:
        """The text of the next delta."""
        for token_id, source in zip(delta.token_ids, delta.sources, strict=True):
            self._ahead.append((len(self._push(token_id)), source))
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
        """One line with the number of tokens and the colour of each source."""
        parts = []
        for source, count in self._counts.items():
            colour = f" = {self._palette.name(source)}" if self._palette.coloured else ""
            parts.append(f"{source or 'the model itself'}{colour}: {count}")
        return f"[tokens by source: {', '.join(parts)}]"


def run(
    prompt: str,
    model: str | None,
    params: SamplingParams,
    options: Mapping[str, Any],
    *,
    show_drafts: bool = False,
) -> int:
    """Complete one prompt: text on stdout, cost on stderr."""
    colours = palette(show_drafts=show_drafts)
    texts: list[str] = []

    async def answer() -> None:
        llm = AsyncLLM(model, **options)
        await watch_loading(model, llm.start())
        async with llm:
            await show(llm, prompt, params, colours, texts)
        if not "".join(texts).strip():
            print(NOTHING_CAME, file=sys.stderr)

    asyncio.run(answer())
    return 0


def palette(*, show_drafts: bool) -> Palette | None:
    """The colours of drafters, if they are to be shown."""
    return Palette(coloured=wants_colour(sys.stdout)) if show_drafts else None


async def show(
    llm: AsyncLLM,
    prompt: Prompt,
    params: SamplingParams,
    colours: Palette | None,
    texts: list[str],
) -> list[int] | None:
    """Print an answer as it comes and append its text to ``texts``; then print its cost.

    With ``colours`` the text has those of its drafters, and a legend follows. Returns the token ids
    that stand for the text, None if there are none.
    """
    answer = await llm.open(prompt, params)
    painter = colours and Painter(colours, llm.tokenizer.detokenizer(answer.prompt_token_ids).push)
    ids: list[int] = []
    last = TextDelta()
    try:
        async with aclosing(answer.deltas()) as deltas:
            async for last in deltas:
                ids += last.token_ids
                texts.append(last.text)
                print(painter.paint(last) if painter else last.text, end="", flush=True)
    finally:
        llm.forget(answer)
    print(flush=True)  # before the lines on stderr, wherever both go
    if painter:
        print(painter.legend(), file=sys.stderr)
    print(cost_line(answer), file=sys.stderr)
    return _standing(llm, ids, last)


def _standing(llm: AsyncLLM, ids: list[int], last: TextDelta) -> list[int] | None:
    """The ids of an answer without its stop token; None if its text is not that of all of them."""
    if last.finish_reason == "stop":
        ids = ids[:-1]
    is_cut = isinstance(last.stop_reason, str)
    return None if is_cut or llm.tokenizer.has_silent(ids, frozenset()) else ids


def cost_line(answer: Answer) -> str:
    """Cost of the answer, in one line."""
    usage = answer.usage
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
