"""Sessions in files of recorded requests: their turns, and which turn continues which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ...core.errors import ForetokenError, InvalidRequest
from ..certify.records import RecordedRequest, files_in
from .forms import FORMS, Form, Item

T = TypeVar("T")
MOST_LISTED = 10  # sessions that an error lists


@dataclass(slots=True)
class Turn:
    """One HTTP request of a session: its recorded answers, and the turn that it continues.

    ``number`` counts from 1, in the order of arrival. ``parent`` is the turn whose answer the
    client sent back, if there is one; ``place`` is the index of that answer among the items of this
    turn.
    """

    records: list[RecordedRequest]
    number: int = 0
    parent: Turn | None = None
    place: int = 0

    @property
    def id(self) -> str:
        """The id of the first answer."""
        return self.records[0].id

    @property
    def session(self) -> str:
        """The session's id that the client sent, or ""."""
        asked = self.records[0].asked
        return "" if asked is None else asked.session

    @property
    def at(self) -> float:
        """Time of arrival, in seconds since 1970."""
        asked = self.records[0].asked
        return 0.0 if asked is None else asked.at

    @property
    def path(self) -> str:
        """The path of the request, or ""."""
        asked = self.records[0].asked
        return "" if asked is None else asked.path

    @property
    def body(self) -> dict[str, Any] | None:
        """The body that the client sent, if it was recorded."""
        bodies = (each.asked.body for each in self.records if each.asked is not None)
        return next((each for each in bodies if each is not None), None)

    @property
    def form(self) -> Form | None:
        """The form of the conversation in the body; None if it has none."""
        return None if self.body is None else FORMS.get(self.path)

    @property
    def items(self) -> list[Item]:
        """The messages or input items of the body."""
        return [] if self.form is None or self.body is None else self.form.items(self.body)


@dataclass(slots=True)
class Session:
    """The turns of a session, in the order of arrival. ``name``: the id to print."""

    name: str
    turns: list[Turn] = field(default_factory=list)

    @property
    def first(self) -> RecordedRequest:
        """The first recorded answer."""
        return self.turns[0].records[0]

    def conversation(self, last: Turn | None = None) -> list[Turn]:
        """Return the turns of one conversation, each of which continues the one before it.

        It ends with ``last``, or else is the longest of the session.
        """
        ends = self.turns if last is None else [last]
        return max(map(_ancestry, reversed(ends)), key=len)


def _ancestry(turn: Turn) -> list[Turn]:
    found: list[Turn] = []
    at: Turn | None = turn
    while at is not None:
        found.insert(0, at)
        at = at.parent
    return found


class _AskedHead(Struct):
    http: str
    session: str = ""


class _Head(Struct):
    id: str
    asked: _AskedHead | None = None


def find_session(name: str, place: Path) -> tuple[Session, Turn | None]:
    """Return the session with this id, or the session of the request with this id.

    In the second case, the request's turn is returned too. Raises `InvalidRequest` if there is
    neither, and `ForetokenError` for a file that cannot be read.
    """
    for file in files_in(place):
        heads = list(_read(file, _Head))
        if any(head.asked is not None and head.asked.session == name for head in heads):
            turns = _turns(file, lambda head: head.asked is not None and head.asked.session == name)
            return _session(name, turns), None
        if any(each.id == name for each in heads):
            turns = _turns(file, lambda _: True)
            turn = next(each for each in turns if any(one.id == name for one in each.records))
            found = next(each for each in sessions_of(turns) if turn in each.turns)
            return found, turn
    message = f"{place} has no session and no request {name} (see serve --record-requests DIR)"
    raise InvalidRequest(message, param="id")


def only_session(file: Path) -> Session:
    """Return the session of a file that has just one. Raises `InvalidRequest` for more or none."""
    found = sessions_of(_turns(file, lambda _: True))
    if not found:
        raise InvalidRequest(f"{file} has no recorded requests", param="id")
    if len(found) > 1:
        listed = [f"{each.name} ({len(each.turns)} turns)" for each in found[:MOST_LISTED]]
        if len(found) > MOST_LISTED:
            listed.append(f"and {len(found) - MOST_LISTED} more")
        message = (
            f"{file} has {len(found)} sessions: {', '.join(listed)}; name one of them and give the "
            "file with --requests"
        )
        raise InvalidRequest(message, param="id")
    return found[0]


def sessions_of(turns: Sequence[Turn]) -> list[Session]:
    """Return the sessions of turns, in the order of their first turns.

    Turns with a session's id belong together. A turn without one belongs to the session of the turn
    that it continues.
    """
    _connect(turns)
    found: dict[str, Session] = {}
    names: dict[int, str] = {}
    for turn in turns:
        before = None if turn.parent is None else names.get(id(turn.parent))
        name = turn.session or before or turn.id
        names[id(turn)] = name
        found.setdefault(name, Session(name)).turns.append(turn)
    for session in found.values():
        _number(session)
    return [*found.values()]


def _session(name: str, turns: list[Turn]) -> Session:
    _connect(turns)
    session = Session(name, turns)
    _number(session)
    return session


def _number(session: Session) -> None:
    for number, turn in enumerate(session.turns, 1):
        turn.number = number


def _turns(file: Path, is_wanted: Callable[[_Head], bool]) -> list[Turn]:
    """Return the turns of the wanted records of a file, in the order of arrival."""
    by_http: dict[str, Turn] = {}
    for record in _read(file, RecordedRequest, is_wanted):
        http = record.id if record.asked is None else record.asked.http
        by_http.setdefault(http, Turn([])).records.append(record)
    turns = sorted(by_http.values(), key=lambda turn: turn.at)
    for turn in turns:
        turn.records.sort(key=lambda record: 0 if record.asked is None else record.asked.part)
    return turns


def _read(
    file: Path, kind: type[T], is_wanted: Callable[[_Head], bool] | None = None
) -> Iterator[T]:
    """Yield the records of a file. Raises `ForetokenError` that names the line of a wrong one."""
    decode, decode_head = msgspec.json.Decoder(kind).decode, msgspec.json.Decoder(_Head).decode
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                try:
                    if is_wanted is None or is_wanted(decode_head(line)):
                        yield decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    torn = "" if line.endswith(b"\n") else "; the file ends inside the line"
                    message = f"{file}, line {number}: not a recorded request: {error}{torn}"
                    raise ForetokenError(message) from None
    except OSError as error:
        raise ForetokenError(f"{file}: {error.strerror}") from None


# -- growth -------------------------------------------------------------------------------------


def _connect(turns: Sequence[Turn]) -> None:
    """Set the parent of each turn.

    A response continues the one that its ``previous_response_id`` names. Any other turn continues
    the longest earlier turn with the same first user message and fewer items, if the first
    additional item is an answer. O(turns squared).
    """
    by_id = {record.id: turn for turn in turns for record in turn.records}
    for index, turn in enumerate(turns):
        if turn.form is None or turn.body is None:
            continue
        if (previous := turn.body.get("previous_response_id")) is not None:
            turn.parent = by_id.get(str(previous))
            continue
        items = turn.items
        found = [each for each in turns[:index] if _continues(each, turn, items)]
        if found:
            turn.parent = max(found, key=lambda each: len(each.items))
            turn.place = len(turn.parent.items)


def _continues(before: Turn, now: Turn, items: Sequence[Item]) -> bool:
    earlier, form = before.items, now.form
    return (
        form is not None
        and before.form is form
        and before.session == now.session
        and 0 < len(earlier) < len(items)
        and form.is_answer(items[len(earlier)])
        and form.first_user(earlier) == form.first_user(items)
    )
