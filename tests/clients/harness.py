"""Code that all clients' scripts share. Standard library only: it runs in their environments.

A script names one client's features, each a function that uses the client as its users do and
asserts what it gave. `Features.run` tells how each went, one JSON object a line.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO, TypeVar

Refusal = TypeVar("Refusal", bound=Exception)
URL = os.environ.get(
    "FORETOKEN_URL", "http://127.0.0.1:8000"
)  # of tests/support/scripted_server.py
SEEING_URL = os.environ.get(
    "FORETOKEN_SEEING_URL", "http://127.0.0.1:8001"
)  # of a tiny random model that sees images, with the same key
RANKING_URL = os.environ.get(
    "FORETOKEN_RANKING_URL", "http://127.0.0.1:8002"
)  # of a tiny random model that ranks documents, with the same key
MODEL = "foretoken-builtin"
SEEING, RANKING = "seeing", "ranking"  # the names of those other models
KEY = "sk-local"  # that server's --api-key

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
LONG = "All work and no play makes a prompt too long. " * 1_000
# Pictures of 8 x 8 pixels, PNG in base64.
RED = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR42mP4z8CAFTEMLQkA"
    "KP8/wc53yE8AAAAASUVORK5CYII="
)
BLUE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEElEQVR42mNgYPiPAw0pCQCp"
    "cD/B/MtF/AAAAABJRU5ErkJggg=="
)
PREFIX = " ".join(f"Rule {number} of the house holds." for number in range(40))


def say(answer: str) -> str:
    """A message that the scripted server answers so."""
    return f"Please answer. [[{answer}]]"


def call(name: str, /, **arguments: object) -> str:
    """Return a tool call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def expect(got: object, wanted: object, what: str = "") -> None:
    """Equal, or an AssertionError that shows both."""
    if got != wanted:
        raise AssertionError(f"{what or 'answer'}: got {got!r}, wanted {wanted!r}")


def check_sight(look: Callable[[str, str], tuple[str, int, int]], num_tokens: int = 4) -> None:
    """Pictures reach the model as so many tokens, and the cache keeps them apart.

    ``look`` asks about a picture with a text behind it, and returns the answer, the tokens of the
    image and those of the prompt that were cached.
    """
    who = f"{Path(sys.prefix).name}, {Path(sys.argv[0]).stem}"  # no other client's prompt
    text = f"Look well at this picture, then name its colour, {who}."
    first, again, other = look(RED, text), look(RED, text), look(BLUE, text)
    found = [each[1] for each in (first, again, other)]
    expect(found, [num_tokens] * 3, "tokens of the image")
    expect(again[0], first[0], "the answer about the same picture")
    if not again[2] > other[2]:
        raise AssertionError(f"cached tokens: {again[2]} with the same picture, {other[2]} else")


def check_ranking(rank: Callable[..., list[tuple[int, float, str | None]]]) -> None:
    """Documents come with their scores, the best first, and as many as were asked for.

    ``rank`` is given a query, documents and the most results; it returns the place, the score and
    the text of each, None where the client has no texts.
    """
    query, documents = "how long is a marathon?", ["Bears sleep.", "42 kilometres.", "It is run."]
    found = rank(query, documents, 3)
    expect(sorted(place for place, *_ in found), [0, 1, 2], "places")
    scores = [score for _, score, _ in found]
    expect(scores, sorted(scores, reverse=True), "scores")
    if not all(0 < score < 1 for score in scores) or len(set(scores)) < len(scores):
        raise AssertionError(f"scores: {scores}")
    for place, _, text in found:
        if text is not None:
            expect(text, documents[place], "document")
    expect([each[:2] for each in rank(query, documents, 2)], [each[:2] for each in found[:2]])


def refused(kind: type[Refusal], work: Callable[[], object]) -> Refusal:
    """Return the error of this kind that ``work`` raises; else raises AssertionError."""
    try:
        work()
    except kind as error:
        return error
    raise AssertionError(f"there was no {kind.__name__}")


class Features:
    """The features of one client."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        self._checks: list[tuple[str, Callable[[], Any]]] = []

    def feature(self, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """Decorates what shows a feature; a coroutine function may."""

        def add(check: Callable[[], Any]) -> Callable[[], Any]:
            self._checks.append((name, check))
            return check

        return add

    def run(self) -> None:
        """Print the versions, then how each feature went."""
        out = _own_stdout()
        versions = {name: version(name) for name in self._packages}
        print(json.dumps({"versions": versions}), file=out, flush=True)
        with asyncio.Runner() as runner:
            for name, check in self._checks:
                began = time.monotonic()
                detail = _failure(check, runner)
                seconds = round(time.monotonic() - began, 3)
                row = {"feature": name, "ok": not detail, "detail": detail, "seconds": seconds}
                print(json.dumps(row), file=out, flush=True)


def _own_stdout() -> TextIO:
    """The one we were started with; what clients print goes to stderr from here on."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _failure(check: Callable[[], Any], runner: asyncio.Runner) -> str:
    """Return the error that the check raised, with its line; empty if it raised none."""
    try:
        result = check()
        if inspect.iscoroutine(result):
            runner.run(result)
    except Exception as error:  # of any kind: it is the finding
        last = traceback.extract_tb(error.__traceback__)
        at = next((frame.lineno for frame in last if frame.name == check.__name__), None)
        return f"line {at}: {type(error).__name__}: {error}"[:2_000]
    return ""
