"""Sessions in files of recorded requests: their turns, and which turn continues which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ...core.errors import ForetokenError, InvalidRequest
from ..certify.records import RecordedRequest, files_in, read_record
from .forms import FORMS, Form, Item, bare, canonical, route_of
from .outcome import printable

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
        return None if self.body is None else FORMS.get(route_of(self.path))

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

    @property
    def session(self) -> str:
        """The session's id that the client sent, or ""."""
        return "" if self.asked is None else self.asked.session


_head = msgspec.json.Decoder(_Head).decode


def find_session(name: str, place: Path) -> tuple[Session, Turn | None]:
    """Return the session with this id, or the session of the request with this id.

    In the second case, the request's turn is returned too. Raises `InvalidRequest` if there is
    neither, or if several files have a session with this id: each has the requests of one caller.
    Raises `ForetokenError` for a file that cannot be read.
    """
    names = name, f"{name}-0"  # each of several choices has the id with its number
    with_session, with_request = list[Path](), None
    for file in files_in(place):
        for head in _read(file, _head, skips_torn=True):
            if head.session == name and file not in with_session:
                with_session.append(file)
            elif head.id in names:
                with_request = file, head.session
    if len(with_session) > 1:
        files = ", ".join(each.name for each in with_session)
        message = f"{name} is a session of {files}; give one of these files with --requests"
        raise InvalidRequest(message, param="id")
    if with_session:
        return _session(name, _turns(with_session[0], lambda head: head.session == name)), None
    if with_request is not None:
        file, own = with_request
        turns = _turns(file, lambda head: head.session == own if own else True)
        turn = next(each for each in turns if any(one.id in names for one in each.records))
        return next(each for each in sessions_of(turns) if turn in each.turns), turn
    message = f"{place} has no session and no request {name} (see serve --record-requests DIR)"
    raise InvalidRequest(message, param="id")


def only_session(file: Path) -> Session:
    """Return the session of a file that has just one. Raises `InvalidRequest` for more or none."""
    found = sessions_of(_turns(file, lambda _: True))
    if not found:
        raise InvalidRequest(f"{file} has no recorded requests", param="id")
    if len(found) > 1:
        names = [(printable(each.name), len(each.turns)) for each in found[:MOST_LISTED]]
        listed = [f"{name} ({count} turns)" for name, count in names]
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
    for record in _read(file, read_record, is_wanted):
        http = record.id if record.asked is None else record.asked.http
        by_http.setdefault(http, Turn([])).records.append(record)
    turns = sorted(by_http.values(), key=lambda turn: turn.at)
    for turn in turns:
        turn.records.sort(key=lambda record: 0 if record.asked is None else record.asked.part)
    return turns


def _read(
    file: Path,
    decode: Callable[[bytes], T],
    is_wanted: Callable[[_Head], bool] | None = None,
    *,
    skips_torn: bool = False,
) -> Iterator[T]:
    """Yield the records of a file. Raises `ForetokenError` that names the line of a wrong one.

    ``skips_torn``: leave out a wrong line in which the file ends.
    """
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.isspace():
                    continue
                try:
                    if is_wanted is None or is_wanted(_head(line)):
                        yield decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    if skips_torn and not line.endswith(b"\n"):
                        return
                    torn = "" if line.endswith(b"\n") else "; the file ends inside the line"
                    message = f"{file}, line {number}: not a recorded request: {error}{torn}"
                    raise ForetokenError(message) from None
    except OSError as error:
        raise ForetokenError(f"{file}: {error.strerror}") from None


# -- growth -------------------------------------------------------------------------------------


def _connect(turns: Sequence[Turn]) -> None:
    """Set the parent of each turn: an earlier turn.

    A response continues the one that its ``previous_response_id`` names. Any other turn continues
    one with the same first user message and fewer items, if the first additional item is an answer:
    the turn of which it repeats the most items from the start. If there are several, the longest is
    taken. (Clients may edit earlier items.) O(turns squared).
    """
    by_id: dict[str, Turn] = {}
    begun: dict[tuple[str, str, str], list[Turn]] = {}  # by session, route and first user message
    for turn in turns:
        if turn.form is not None and turn.body is not None:
            first = canonical(turn.form.first_user(turn.items))
            alike = begun.setdefault((turn.session, route_of(turn.path), first), [])
            if (previous := turn.body.get("previous_response_id")) is not None:
                turn.parent = by_id.get(str(previous))
            else:
                _find_parent(turn, alike)
            alike.append(turn)
        by_id |= {record.id: turn for record in turn.records}


def _find_parent(turn: Turn, alike: Sequence[Turn]) -> None:
    items, form = turn.items, turn.form
    sizes = [(len(each.items), each) for each in alike]
    found = [
        (size, each)
        for size, each in sizes
        if form is not None and 0 < size < len(items) and form.is_answer(items[size])
    ]
    most = -1  # items that the turn repeats
    for size, each in sorted(found, key=lambda pair: pair[0], reverse=True):
        if size <= most:
            break  # no shorter turn has more of them
        if (same := _num_same(items, each.items)) > most:
            most, turn.parent, turn.place = same, each, size


def _num_same(items: Sequence[Item], earlier: Sequence[Item]) -> int:
    pairs = zip(earlier, items, strict=False)
    others = (at for at, (a, b) in enumerate(pairs) if a != b and bare(a) != bare(b))
    return next(others, len(earlier))
