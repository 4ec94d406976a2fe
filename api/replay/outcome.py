"""Outcome: the answers of each turn, recorded and now, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..runtime.conversation.prompt_history import common_len

Kind = Literal["equal", "parted", "changed", "same", "new"]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Side:
    """One answer, split at the first token that differs from the other side's.

    ``same`` and ``rest`` are the text before and after that token. Without a difference, ``same``
    is the whole text. ``is_cut``: whether the answer was not computed to its end.
    """

    same: str
    token: str = ""
    rest: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    is_cut: bool = False

    @property
    def text(self) -> str:
        """The whole text."""
        return self.same + self.token + self.rest


@dataclass(frozen=True, slots=True)
class CallLine:
    """A tool call now, the recorded call in its place, and where its result is from.

    ``source``: "recording", "tool", or "" if there is no result.
    """

    now: str
    recorded: str
    source: str

    @property
    def is_changed(self) -> bool:
        """Whether the call is another one than the recorded."""
        return self.now != self.recorded


@dataclass(slots=True, kw_only=True)
class Played:
    """One turn as it was replayed.

    - ``number``: the recorded turn's number from 1; None for a turn that the recording lacks.
    - ``kind``: the turn is as recorded and its answer equal ("equal") or not ("parted"); or
      something before the answer was changed, and the answer is another ("changed") or the same
      ("same"); or the recording has no answer to compare with ("new").
    - ``position``: index of the first token that differs; None if all are equal.
    - ``num_items``: number of messages of the request. ``num_generated``: tokens of the answer that
      the recording did not give as a draft.
    """

    number: int | None
    id: str
    kind: Kind
    recorded: Side | None
    now: Side
    position: int | None = None
    num_items: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_generated: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    calls: list[CallLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A replayed session. ``ended``: why it ended before the recording did; "" if it did not."""

    session: str
    model: str
    changes: list[str] = field(default_factory=list)
    turns: list[Played] = field(default_factory=list)
    num_turns: int = 0  # number of turns in the recording
    ended: str = ""
    is_stuck: bool = False  # it ended because a call has no result, or a turn was refused
    exact: bool = True
    notes: list[str] = field(default_factory=list)

    def count(self, *kinds: Kind) -> int:
        """Return the number of turns of the given kinds."""
        return sum(turn.kind in kinds for turn in self.turns)

    @property
    def totals(self) -> str:
        """Tokens and time, in one line."""
        answers = sum(turn.now.num_tokens for turn in self.turns)
        generated = sum(turn.num_generated for turn in self.turns)
        steps = sum(turn.num_steps for turn in self.turns)
        cached = sum(turn.cached_tokens for turn in self.turns)
        prompts = sum(turn.prompt_tokens for turn in self.turns)
        seconds = sum(turn.seconds for turn in self.turns)
        recorded = sum(turn.recorded_seconds for turn in self.turns)
        return (
            f"{answers:,} answer tokens: {answers - generated:,} given by the recording, "
            f"{generated:,} generated, in {steps:,} steps; {prompts:,} prompt tokens, {cached:,} "
            f"of them cached; {seconds:.1f} s, recorded in {recorded:.1f} s"
        )


def printable(text: str) -> str:
    """Return a text without characters that control a terminal; line ends and tabs stay."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)


def sides(
    recorded: Sequence[int], now: Sequence[int], position: int | None, decode: Decode
) -> tuple[Side, Side]:
    """Return both answers, split at the token ``position``."""
    return _side(recorded, position, decode), _side(now, position, decode)


def _side(tokens: Sequence[int], position: int | None, decode: Decode) -> Side:
    whole = decode(tokens)
    if position is None:
        return Side(whole, num_tokens=len(tokens))
    begin = common_len(decode(tokens[:position]), whole)
    end = max(begin, common_len(decode(tokens[: position + 1]), whole))
    return Side(whole[:begin], whole[begin:end], whole[end:], len(tokens))


def sides_by_text(recorded: str, now: Sequence[int], decode: Decode) -> tuple[Side, Side, int]:
    """Return the answers of two models, split at this model's first different token, and its index.

    The recorded side is split at the same character. O(tokens squared).
    """
    position = 0
    while position < len(now):
        text = decode(now[: position + 1])
        if not recorded.startswith(text.rstrip("\ufffd")):  # a character may have several tokens
            break
        position += 1
    own = _side(now, position, decode)
    begin = common_len(own.same, recorded)
    return Side(recorded[:begin], "", recorded[begin:]), own, position


def first_difference(
    recorded: Sequence[int], now: Sequence[int], reasons: tuple[str, str]
) -> int | None:
    """Return the index of the first token that differs; None for equal answers.

    ``reasons``: the finish reasons. If they differ, the answers differ at their end.
    """
    pairs = enumerate(zip(recorded, now, strict=False))
    found = next((at for at, (a, b) in pairs if a != b), None)
    if found is None and (len(recorded) != len(now) or reasons[0] != reasons[1]):
        return min(len(recorded), len(now))
    return found
