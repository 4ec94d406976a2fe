"""FrontSessions: the replica of each session, and the end of sessions on all replicas."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from msgspec.structs import replace

from ....core.interface.request import Request
from ..wire.messages import EndSession, ExpectTurn
from .questions import ask_all, number_of
from .replica_link import ReplicaLink
from .roster import Roster

MAX_SESSIONS = 4096  # the oldest of more sessions are forgotten


class FrontSessions:
    """The replica that served the latest request of each session. Belongs to one event loop."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        # Peers by session and namespace.
        self._places: OrderedDict[tuple[str, str | None], bytes] = OrderedDict()
        self._tasks: set[asyncio.Task[object]] = set()

    def placed(self, request: Request, link: ReplicaLink) -> None:
        """Record the replica of a request, if the request belongs to a session."""
        if request.cache.session is None:
            return
        key = request.cache.session, request.namespace
        self._places[key] = link.peer
        self._places.move_to_end(key)
        if len(self._places) > MAX_SESSIONS:
            self._places.popitem(last=False)

    def expect(self, session: str, label: str, namespace: str | None) -> None:
        """Tell the replica of a session what the session waits for; ignore unknown sessions."""
        peer = self._places.get((session, namespace))
        link = None if peer is None else self._roster.links.get(peer)
        if link is not None:
            message = ExpectTurn(session=session, label=label, namespace=namespace)
            self._roster.send(link, message)

    def ended(self, request: Request) -> None:
        """End the session of an ended request on all replicas, if the request ends it."""
        session = request.cache.session
        if session is not None and request.cache.ends_session:
            asked = ask_all(self._roster, EndSession(session=session), number_of, skips=True)
            task: asyncio.Task[object] = asyncio.create_task(asked)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def end(self, session: str, live: Iterable[Request]) -> bool:
        """End a session on all replicas; return whether any had pages of it.

        The session's requests among the ``live`` ones give up their pages when they end.
        """
        for request in live:
            if request.cache.session == session:
                request.cache = replace(request.cache, ends_session=True)
        question = EndSession(session=session)
        return any((await ask_all(self._roster, question, number_of)).values())
