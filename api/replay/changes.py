"""Changes of a recorded session: paths into bodies, sampling parameters, results of tools.

A path names a value of a body: ``messages[7].content``, ``system``, ``tools[0].description``. It
has names and indices, counted from 0; ``turns[3].`` before it restricts it to one turn, counted
from 1. ``PATH=TEXT`` sets a text, ``PATH:=JSON`` another value.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...core.errors import InvalidRequest
from ..types.sampling_params import SamplingParams

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens", "min_tokens", "ignore_eos", "seed",
)  # fmt: skip
"""Sampling parameters that a replay can change."""
STEP = re.compile(r"\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]")
Step = str | int


@dataclass(frozen=True, slots=True)
class Change:
    """A value of a body, replaced in every turn that has it, or only in the turn ``turn``."""

    text: str  # the path as it was given
    steps: tuple[Step, ...]
    value: object
    turn: int | None = None

    def apply(self, body: Mapping[str, Any], number: int) -> dict[str, Any] | None:
        """Return the body of a turn with the change; None if the turn does not have the value."""
        if self.turn is not None and self.turn != number:
            return None
        if self.missing(body) is not None:
            return None
        changed: dict[str, Any] = copy.deepcopy(dict(body))
        at: Any = changed
        for step in self.steps[:-1]:
            at = at[step]
        at[self.steps[-1]] = copy.deepcopy(self.value)
        return changed

    def missing(self, body: Mapping[str, Any]) -> str | None:
        """Return which part of the path a body does not have; None if it has all.

        The last name of a path may be new, if what stands before it is an object.
        """
        at: Any = body
        for index, step in enumerate(self.steps):
            where = shown(self.steps[:index])
            if isinstance(step, int):
                if not isinstance(at, list):
                    return f"{where} is not a list"
                if step >= len(at):
                    return f"{where} has {len(at)} entries, so {where}[{step}] does not exist"
            elif not isinstance(at, dict):
                return f"{where} is not an object, so it has no {step}"
            elif step not in at:
                is_new = 0 < index == len(self.steps) - 1
                return None if is_new else f"{where or 'the body'} has no {step}"
            at = at[step]
        return None


def shown(steps: Sequence[Step]) -> str:
    """Return steps as they are written in a path."""
    text = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in steps)
    return text.removeprefix(".")


def read_change(text: str) -> Change:
    """Return the change in PATH=TEXT or PATH:=JSON.

    Raises `InvalidRequest`, which names the wrong part.
    """
    path, equals, value = text.partition("=")
    if not equals:
        raise _refused(f"--change {text}: must be PATH=TEXT or PATH:=JSON")
    is_json = path.endswith(":")
    path = path.removesuffix(":").strip()
    steps, at = list[Step](), 0
    while at < len(path):
        found = STEP.match(path, at)
        if found is None or not _follows(found, steps):
            expected = "is neither .NAME nor [INDEX]" if steps else "does not begin with a name"
            raise _refused(f"--change {path}: {path[at:]!r} {expected}")
        steps.append(found[1] or int(found[2]))
        at = found.end()
    turn = None
    if steps[0:1] == ["turns"] and len(steps) > 1 and isinstance(steps[1], int):
        turn, steps = steps[1], steps[2:]
    if not steps:
        raise _refused(f"--change {text}: the path names no value")
    return Change(path, tuple(steps), _json(path, value) if is_json else value, turn)


def _follows(found: re.Match[str], steps: Sequence[Step]) -> bool:
    """Whether a step may follow ``steps``: a name without a dot comes first, nothing else does."""
    is_first = found[1] is not None and not found[0].startswith(".")
    return is_first != bool(steps)


def _json(path: str, text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _refused(f"--change {path}: the value after := is not JSON: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Everything that a replay changes.

    ``results``: new texts of recorded results, by the id or the number of the call. ``system``: the
    new system prompt. ``other_model``: whether another model answers.
    """

    bodies: Sequence[Change] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    other_model: bool = False

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        has_texts = bool(self.bodies or self.sampling or self.results)
        return has_texts or self.system is not None or self.other_model


def read_sampling(texts: Sequence[str]) -> dict[str, Any]:
    """Return the sampling parameters in NAME=VALUE. Raises `InvalidRequest`."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in SAMPLING:
            message = f"--sampling {text}: must be NAME=VALUE; names are {', '.join(SAMPLING)}"
            raise InvalidRequest(message, param="sampling")
        try:
            found[name] = json.loads(value)
        except ValueError:
            message = f"--sampling {text}: {value!r} is not a number, true, false or null"
            raise InvalidRequest(message, param="sampling") from None
    try:
        SamplingParams(**found)
    except InvalidRequest as error:
        raise InvalidRequest(f"--sampling: {error}", param="sampling") from None
    return found


def read_results(texts: Sequence[str]) -> dict[str, str]:
    """Return the new results in CALL=TEXT. Raises `InvalidRequest`."""
    found: dict[str, str] = {}
    for text in texts:
        call, equals, value = text.partition("=")
        if not equals or not call:
            message = f"--tool-result {text}: must be CALL=TEXT, with a call's number or id"
            raise InvalidRequest(message, param="tool_result")
        found[call] = value
    return found


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="change")
