"""Sessions: the cause of the wait after a turn, and the request that ends a session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec.structs import replace

from ...core.errors import (
    DeadlineExceeded,
    ForetokenError,
    InvalidRequest,
    QueueFull,
    Unavailable,
)
from ...core.interface.request import CacheOptions, Request
from ..types.request_context import CONTEXT, caller_key, header
from ..types.results import Choice
from .serving_engine import ServingEngine

logger = logging.getLogger(__name__)
ENDS = ("x-session-close", "x-dynamo-session-final")
"""Headers of a session's last request, with "true"; the second one is Dynamo's."""
LOAD_ERRORS = (QueueFull, DeadlineExceeded, Unavailable)
END_SECONDS = 0.5  # longest delay of a refusal by the end of its session
SWITCH = {"true": True, "1": True, "false": False, "0": False}


def in_session(cache: CacheOptions, session: str) -> CacheOptions:
    """Return the cache options ``cache`` for a request of a session.

    Raises `InvalidRequest`, which names the header, for a header of `ENDS` that is not a Boolean.
    """
    return replace(cache, session=session, ends_session=any(map(_is_on, ENDS)))


class SessionEnds:
    """The ends of an engine's sessions. Belongs to one event loop.

    ``listeners`` are called with the key of each session that has ended, or whose last request the
    engine has accepted. A request that is refused changes nothing for them.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[str], None]] = []
        self.num_running = 0  # number of calls of `end` that wait for the engine

    def tell(self, session: str) -> None:
        """Call the listeners for a session."""
        for listener in self.listeners:
            listener(session)

    async def end(self, engine: ServingEngine, session: str) -> bool:
        """End a session; return whether the cache had pages that it kept for the session.

        Raises the errors of `ServingEngine.end_session`. The listeners are not called then.
        """
        self.num_running += 1
        try:
            deleted = await engine.end_session(session)
        finally:
            self.num_running -= 1
        self.tell(session)
        return deleted

    async def end_refused(
        self, engine: ServingEngine, cache: CacheOptions, error: BaseException
    ) -> None:
        """End the session of a last request that was refused because of the server's load.

        The client does not know when there will be room, and may not ask again. An invalid request
        ends no session: its caller has to correct it and send it again. A replica that answers late
        still ends the session.
        """
        if cache.session is not None and cache.ends_session and isinstance(error, LOAD_ERRORS):
            try:
                async with asyncio.timeout(END_SECONDS):
                    await self.end(engine, cache.session)
            except TimeoutError:
                logger.info("a replica did not confirm the end of a refused request's session")
                self.tell(cache.session)
            except ForetokenError as failure:  # the client must get the error of its request
                logger.warning("the session of a refused request was not ended: %s", failure)


def _is_on(name: str) -> bool:
    context = CONTEXT.get()
    given = "" if context is None else header(context.scope, name.encode())
    if not given:
        return False
    if (found := SWITCH.get(given.lower())) is None:
        raise InvalidRequest(f"the header {name} must be true or false", param=name)
    return found


def label_of(choice: Choice) -> str:
    """Return the label of the wait that follows an answer: the caller's key of its tools.

    It is "" if the answer waits for a person.
    """
    tools = "+".join(sorted({call.name for call in choice.tool_calls}))
    return caller_key(tools) if tools else ""


def tell_wait(engine: ServingEngine, request: Request, choice: Choice) -> None:
    """Tell the engine what the session of a request waits for after this answer."""
    session = request.cache.session
    if session is not None and choice.finish_reason != "abort":
        engine.expect_turn(session, label_of(choice), request.namespace)
