"""ResponsesSocket: the layer that serves /v1/responses over WebSockets."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...serving.errors import ApiError, to_api_error
from ...serving.limits import Limits
from ...types.request_context import AT_CLOSE
from ..error_forms import error_response
from .events import Cancel, read_event, refused
from .turn import PATH, Turn

logger = logging.getLogger(__name__)
MAX_LANES = 64  # lanes that one connection may run at the same time
MAX_KEPT = 4096  # unstored responses of a connection that it can continue
MAX_WAITING = 64  # waiting responses of a connection, in all its lanes
Refusal = Callable[[Scope], ApiError | None]
"""Returns why a request is refused before its route is reached, or None."""


class ResponsesSocket:
    """Serves WebSockets at /v1/responses, and passes other requests on.

    Each ``response.create`` runs through ``app`` as a POST to /v1/responses, so that limits, logs
    and metrics apply to it as they do over HTTP. ``refusal``: returns the error that refuses a
    handshake, or None.
    """

    def __init__(self, app: ASGIApp, limits: Limits, refusal: Refusal) -> None:
        self.app, self._limits, self._refusal = app, limits, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket until its client leaves, or pass the request on."""
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None and scope["path"] != PATH:
            refusal = ApiError(404, f"WebSockets are served at {PATH}", code="not_found")
        if refusal is not None:
            await error_response(scope, refusal)(scope, receive, send)
            return
        if (await receive())["type"] != "websocket.connect":
            return
        await send({"type": "websocket.accept"})
        await _Connection(self.app, self._limits, scope, send).serve(receive)


class _Connection:
    """One WebSocket.

    Responses with the same ``stream_id``, or without one, form a lane. They run one after another;
    different lanes run at the same time.
    """

    def __init__(self, app: ASGIApp, limits: Limits, scope: Scope, send: Send) -> None:
        self._app, self._limits, self._send = app, limits, send
        self._at_close: deque[Callable[[], None]] = deque(maxlen=MAX_KEPT)
        self._scope = {**scope, "state": {**scope["state"], AT_CLOSE: self._at_close}}
        self._running: dict[str | None, Turn] = {}
        self._waiting: dict[str | None, deque[Turn]] = {}

    async def serve(self, receive: Receive) -> None:
        """Serve the client's events until the client leaves; then end its responses."""
        try:
            async with asyncio.TaskGroup() as group:
                while (message := await receive())["type"] != "websocket.disconnect":
                    await self._take(message, group)
                self._waiting.clear()
                for turn in self._running.values():
                    turn.leave()
        finally:
            for forget in self._at_close:
                forget()

    async def _take(self, message: Message, group: asyncio.TaskGroup) -> None:
        """Process one event of the client; send an error event if it is wrong."""
        text = message.get("text")
        data = message.get("bytes") or b"" if text is None else text.encode()
        try:
            event = read_event(data)
            if isinstance(event, Cancel):
                self._cancel(event)
            else:
                self._begin(Turn(self._scope, event, self._frame), group)
        except ApiError as error:
            await self._frame(refused(error))

    def _begin(self, turn: Turn, group: asyncio.TaskGroup) -> None:
        """Run a turn after earlier turns of its lane. Raises `ApiError` 429 for too many turns."""
        waiting = [each for queue in self._waiting.values() for each in queue]
        num_bytes = turn.num_bytes + sum(each.num_bytes for each in waiting)
        if turn.lane in self._waiting:
            if len(waiting) >= MAX_WAITING or num_bytes > self._limits.max_body_bytes:
                raise _busy(f"{len(waiting)} responses of this connection wait already")
            self._waiting[turn.lane].append(turn)
            return
        if len(self._waiting) >= MAX_LANES:
            raise _busy(f"a connection may run at most {MAX_LANES} responses at once")
        self._waiting[turn.lane] = deque([turn])
        group.create_task(self._run_lane(turn.lane))

    async def _run_lane(self, lane: str | None) -> None:
        while queue := self._waiting.get(lane):
            turn = self._running[lane] = queue.popleft()
            try:
                await turn.run(self._app)
            except Exception as error:
                answer = to_api_error(error)
                if answer.status == 500:
                    logger.error("a stream failed", exc_info=error)
                if not turn.has_ended:
                    await self._frame(refused(answer, lane))
            finally:
                del self._running[lane]
        self._waiting.pop(lane, None)

    def _cancel(self, event: Cancel) -> None:
        """Cancel a running response, or one that waits for its lane. Raises `ApiError` 404.

        Without an id, the first response of the lane that is not ending already is cancelled.
        """
        waiting = (turn for queue in self._waiting.values() for turn in queue)
        for turn in (*self._running.values(), *waiting):  # the running one of a lane comes first
            if event.response_id is None:
                is_meant = turn.lane == event.lane and not turn.is_ending
            else:
                is_meant = turn.response_id == event.response_id
            if is_meant:
                turn.cancel()
                return
        raise ApiError(
            404, "no such response is running or waiting on this connection", param="response_id",
            code="response_not_found",
        )  # fmt: skip

    async def _frame(self, data: bytes) -> None:
        """Send a text frame, unless the client has left."""
        with suppress(OSError):  # if the client has left, `receive` reports it
            await self._send({"type": "websocket.send", "text": data.decode()})


def _busy(message: str) -> ApiError:
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="too_many_responses",
        headers={"retry-after": "1"},
    )
