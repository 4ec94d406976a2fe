"""Text of a replay for the terminal: a line for each equal turn, two columns for others."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from .outcome import CallLine, Outcome, Played, Side, printable

WORDS = {
    "equal": "equal",
    "parted": "parts from the recording",
    "changed": "another answer",
    "same": "the same answer",
    "new": "nothing recorded to compare with",
}
SOURCES = {
    "recording": "result from the recording",
    "tool": "result of the tool",
    "": "no result",
}
MARKS = "»", "«"  # around the first token that differs
GAP = " │ "


def turn_lines(turn: Played, width: int) -> list[str]:
    """Return the lines of a turn, of at most ``width`` columns, without control characters."""
    return [printable(each) for each in _turn_lines(turn, width)]


def _turn_lines(turn: Played, width: int) -> list[str]:
    head = f"{title(turn)}: {facts(turn)}"
    lines = [head] if len(head) <= width else textwrap.wrap(head, width, subsequent_indent="  ")
    lines += [f"  {note}" for note in turn.notes]
    if turn.kind in ("equal", "same"):
        return lines + [f"  call {each.now}"[:width] for each in turn.calls]
    if turn.recorded is not None:
        lines += _columns(turn.recorded, turn.now, width)
    elif turn.now.text:
        lines += _indented(shown(turn.now), width)
    for call in turn.calls:
        lines += _indented(call_text(call), width)
    return lines


def title(turn: Played) -> str:
    """Return the name of a turn."""
    return "new turn" if turn.number is None else f"turn {turn.number}"


def facts(turn: Played) -> str:
    """Return how a turn compares, with its counts."""
    where = "" if turn.position is None else f" from token {turn.position} on"
    sizes = f"{turn.num_items} messages, " if turn.num_items else ""
    saved = turn.now.num_tokens - turn.num_generated
    counts = f"{turn.now.num_tokens} tokens, {saved} of them recorded, in {turn.num_steps} steps"
    if turn.now.is_cut and not turn.now.num_tokens:
        return WORDS[turn.kind]
    return f"{WORDS[turn.kind]}{where} ({sizes}{counts})"


def call_text(call: CallLine) -> str:
    """Return a call, what it replaces, and where its result is from."""
    if not call.now:
        return f"no longer called: {call.recorded}"
    if not call.is_changed:
        return f"the same call: {call.now} ({SOURCES[call.source]})"
    if not call.recorded:
        return f"new call: {call.now} ({SOURCES[call.source]})"
    return f"changed call: {call.now} ({SOURCES[call.source]}); recorded {call.recorded}"


def shown(side: Side) -> str:
    """Return an answer with its first different token marked."""
    marked = f"{MARKS[0]}{side.token}{MARKS[1]}" if side.token else ""
    cut = " ..." if side.is_cut else ""
    return f"{side.same}{marked}{side.rest}{cut}"


def summary(outcome: Outcome) -> list[str]:
    """Return the last lines: how many turns are equal, the end, tokens and time."""
    turns = outcome.turns
    equal = outcome.count("equal")
    lines = []
    if outcome.changes:
        parted = next((turn for turn in turns if turn.kind == "parted"), None)
        others = len(turns) - equal
        lines.append(
            f"{_turns(equal)} before the change verified; {_turns(others)} after it: "
            f"{outcome.count('changed', 'new')} other, {outcome.count('same')} the same"
        )
        calls = [call for turn in turns for call in turn.calls if call.is_changed]
        count = {0: "no call", 1: "1 call"}.get(len(calls), f"{len(calls)} calls")
        lines.append(f"{count} changed")
        if parted is not None:
            lines.append(f"{title(parted)} is not changed, yet its answer is another")
    else:
        lines.append(f"{equal} of {outcome.num_turns} turns equal")
    lines += outcome.notes
    if outcome.ended:
        lines.append(f"ended: {outcome.ended}")
    lines.append(outcome.totals)
    if not outcome.exact:
        lines.append("the model is not exact: its tokens may depend on the batch (docs/models.md)")
    return lines


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def _columns(recorded: Side, now: Side, width: int) -> list[str]:
    """Return two answers beside each other."""
    half = max(20, (width - len(GAP) - 2) // 2)
    left = ["recorded", *_wrapped(shown(recorded), half)]
    right = ["now", *_wrapped(shown(now), half)]
    height = max(len(left), len(right))
    left += [""] * (height - len(left))
    right += [""] * (height - len(right))
    return [f"  {a:<{half}}{GAP}{b}".rstrip() for a, b in zip(left, right, strict=True)]


def _indented(text: str, width: int) -> list[str]:
    return [f"  {line}" for line in _wrapped(text, width - 2)]


def _wrapped(text: str, width: int) -> Sequence[str]:
    lines = printable(text).split("\n")
    return [part for line in lines for part in textwrap.wrap(line, width) or [""]]
