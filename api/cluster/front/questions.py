"""Questions: a call to all replicas of a front, and their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from ....core.errors import EngineDead, ForetokenError
from ...types.results import Body
from ..wire.forms import WireError
from ..wire.messages import Answer, Question, body_of
from .replica_link import ReplicaLink
from .roster import Roster

logger = logging.getLogger(__name__)
CALL_SECONDS = 30.0  # timeout of a call; an audit waits for the end of a step
T = TypeVar("T")


async def ask_all(
    roster: Roster,
    question: Question,
    read: Callable[[Answer], T],
    *,
    links: Sequence[ReplicaLink] | None = None,
    seconds: float = CALL_SECONDS,
    skips: bool = False,
) -> dict[ReplicaLink, T]:
    """Return the answers of ``links`` (default: all replicas) to a question.

    ``read`` decodes an answer, or raises the error that it contains. Replicas that are lost
    meanwhile are left out. An error of a replica is raised; with ``skips`` the replica is left out
    instead.
    """
    links = list(roster.links.values()) if links is None else links
    asked = [_ask(roster, each, question, seconds) for each in links]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found: dict[ReplicaLink, T] = {}
    for link, answer in zip(links, answers, strict=True):
        try:
            if isinstance(answer, BaseException):
                raise answer
            found[link] = read(answer)
        except WireError as error:
            roster.lose(link, "wrong", str(error))
        except EngineDead:
            logger.info("skipping %s: it is no longer connected", link)
        except ForetokenError:
            if not skips:
                raise
    return found


async def _ask(roster: Roster, link: ReplicaLink, question: Question, seconds: float) -> Answer:
    message, answer = link.ask(question)
    roster.send(link, message)
    try:
        return await asyncio.wait_for(answer, seconds)
    except TimeoutError:
        raise ForetokenError(f"{link} did not answer within {seconds:g} s") from None


def number_of(answer: Answer) -> int:
    """Return the number in an answer. Raises the answer's error, or `WireError`."""
    result = _result(answer)
    if not isinstance(result, int):
        raise WireError("the replica sent an answer that is not a number")
    return result


def body_in(answer: Answer) -> Body:
    """Return the JSON object in an answer. Raises the answer's error, or `WireError`."""
    return body_of(bytes_of(answer))


def bytes_of(answer: Answer) -> bytes:
    """Return the bytes in an answer. Raises the answer's error, or `WireError`."""
    result = _result(answer)
    if not isinstance(result, bytes):
        raise WireError("the replica sent an answer that is not bytes")
    return result


def _result(answer: Answer) -> int | bytes | None:
    if answer.error is not None:
        raise answer.error
    return answer.result
