"""Prompts computed for another server, requested with ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ....core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    Unavailable,
)
from ...serving.answers import AnswerReply
from ...serving.errors import ApiError, unavailable
from ...serving.sampling import is_prewarm
from ...serving.serving_context import Service
from ...serving.sse import Reply
from .bodies import OpenAISampling

if TYPE_CHECKING:
    from ....core.tiers.transfer_params import TransferParams

NO_ROOM = "the KV pages of earlier prompts are still waiting to be read by other servers"


def transfer_of(body: OpenAISampling, *, num_prompts: int = 1) -> Mapping[str, Any] | None:
    """Return the ``kv_transfer_params`` of a body; None if they do not apply.

    They do not apply to several prompts, to a prompt that is only cached, and to a stream of a
    prompt for another server, since a stream cannot return the new parameters.
    """
    params = body.kv_transfer_params
    if params is None or num_prompts != 1 or is_prewarm(body):
        return None
    if body.stream and params.get("do_remote_decode"):
        return None  # a stream cannot return the new parameters
    return params


async def handing_over(
    service: Service,
    transfer: Mapping[str, Any] | None,
    open_reply: Callable[[], Awaitable[AnswerReply[Any]]],
) -> Reply:
    """Open a reply. If another server continues the prompt, the answer has ``kv_transfer_params``.

    Raises the errors of ``open_reply``, and `ApiError` 503 if the server cannot compute more
    prompts for other servers now.
    """
    transfers = service.llm.built.transfers
    if transfers is None or not transfers.is_prefill(transfer):
        return await open_reply()
    if transfers.is_full:
        raise unavailable(NO_ROOM)
    with _as_unavailable():
        return PrefillReply(await open_reply(), transfers)


class PrefillReply(Reply):
    """The answer to a prompt that another server continues, with the location of its KV pages."""

    def __init__(self, reply: AnswerReply[Any], transfers: TransferParams) -> None:
        self._reply, self._transfers = reply, transfers
        self._is_answered = False

    async def whole(self) -> object:
        """Return the answer, with the ``kv_transfer_params`` for the other server."""
        with _as_unavailable():
            body = await self._reply.whole()
        if isinstance(body, Struct):
            setattr(body, "kv_transfer_params", self._transfers.write(self._reply.request))  # noqa: B010
        self._is_answered = True
        return body

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the events, which have no ``kv_transfer_params``."""
        return self._reply.events()

    def close(self) -> None:
        """Abort the request if it still runs. Free its KV pages unless they were offered to the
        other server.
        """
        self._reply.close()
        if not self._is_answered:
            self._transfers.drop(self._reply.request)


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Convert temporary errors to 503, the only status after which routers try another server."""
    try:
        yield
    except (InvalidRequest, Unavailable, EngineDead, DeadlineExceeded, ApiError):
        raise
    except ForetokenError as error:
        raise unavailable(str(error)) from error
