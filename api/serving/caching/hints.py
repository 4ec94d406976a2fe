"""Hints about a request from an agent's framework: Dynamo's ``nvext`` and vLLM's ``kv_hints``.

The engine may ignore a hint. Actions of other types, and fields that are not listed here, have no
effect.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ....core.errors import InvalidRequest
from ....core.interface.request import MAX_TTL, Pin
from .fields import WHOLE

MAX_ACTIONS, MAX_DIRECTIVES = 16, 128
MAX_RETAINED = 32  # directives of a body that ask to keep something
MAX_HINTED = 4  # pins of a body's hints
RETAIN, RETAIN_VERSION = "kv.retain", "1"  # type of an action, and its major version
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class AgentHints(Struct, kw_only=True):
    """``nvext.agent_hints``."""

    priority: Int32 | None = None  # higher is more urgent
    osl: Count | None = None  # expected number of answer tokens; has no effect
    speculative_prefill: bool | None = None  # whether to compute the next turn's prompt in advance


class NvExt(Struct, kw_only=True):
    """``nvext``, Dynamo's extension of a body."""

    agent_hints: AgentHints | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None


class KvHintAction(Struct, kw_only=True):
    """An action of ``kv_hints``. Its type decides which fields ``payload`` has."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class KvHints(Struct, kw_only=True):
    """``kv_hints``, vLLM's envelope of actions on the KV of a request."""

    protocol_version: str
    message_id: str
    actions: Annotated[list[KvHintAction], Meta(max_length=MAX_ACTIONS)]


class RetainDirective(Struct, kw_only=True, forbid_unknown_fields=True):
    """A range of the prompt's tokens, and how long to keep them. A priority of 0 keeps nothing."""

    priority: Annotated[int, Meta(ge=0, le=100)]
    start: Count | None = None
    end: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None  # None: the end of the prompt
    # Seconds; None: as long as the server allows.
    duration: Annotated[float, Meta(ge=0, le=MAX_TTL)] | None = None
    covers_output: bool = False  # True: the directive is about the answer, and ignored


class Retain(Struct, kw_only=True):
    """``payload`` of a ``kv.retain`` action."""

    scope: str | None = None
    directives: Annotated[list[RetainDirective], Meta(max_length=MAX_DIRECTIVES)]


def hinted_pins(hints: KvHints | None) -> tuple[Pin, ...]:
    """Return pins for the `MAX_HINTED` longest prefixes that the hints ask to retain.

    A directive about a later part of the prompt also pins all tokens before that part, because the
    cache finds a page by all tokens before it. Raises `InvalidRequest`, which names the field.
    """
    if hints is None:
        return ()
    found: list[Pin] = []
    for index, action in enumerate(hints.actions):
        if action.action_type == RETAIN:
            found += _retained(action, f"kv_hints.actions[{index}]")
    if len(found) > MAX_RETAINED:
        message = f"kv_hints may retain at most {MAX_RETAINED} parts of a prompt, not {len(found)}"
        raise InvalidRequest(message, param="kv_hints")
    # The longest time of equal prefixes replaces the shorter ones.
    found.sort(key=lambda pin: (pin.num_tokens, pin.ttl))
    longest = {pin.num_tokens: pin for pin in found}
    return tuple(longest.values())[-MAX_HINTED:]


def _retained(action: KvHintAction, path: str) -> list[Pin]:
    if action.action_version.partition(".")[0] != RETAIN_VERSION:
        message = f"{path}.action_version: only version {RETAIN_VERSION} of {RETAIN} is supported"
        raise InvalidRequest(message, param=f"{path}.action_version")
    try:
        given = msgspec.convert(action.payload, Retain)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        where = f"{path}.payload{place.removesuffix('`')}"
        raise InvalidRequest(f"{where}: {message}", param=where) from None
    _check(given.directives, f"{path}.payload.directives")
    return [
        Pin(each.end or WHOLE, MAX_TTL if each.duration is None else each.duration)
        for each in given.directives
        if each.priority and each.duration != 0 and not each.covers_output
    ]


def _check(directives: list[RetainDirective], path: str) -> None:
    """Raise `InvalidRequest` for wrong directives.

    Ranges must not be empty, and a later range must not have a higher priority than an earlier one.
    """
    for index, each in enumerate(directives):
        where = f"{path}[{index}]"
        if each.covers_output and not (each.start is None and each.end is None):
            message = f"{where}.covers_output cannot be combined with start or end"
            raise InvalidRequest(message, param=f"{where}.covers_output")
        if each.end is not None and each.end <= (each.start or 0):
            raise InvalidRequest(f"{where}.end must be above its start", param=f"{where}.end")
    order = sorted(
        range(len(directives)),
        key=lambda index: (directives[index].covers_output, directives[index].start or 0),
    )
    for before, after in pairwise(order):
        if directives[after].priority > directives[before].priority:
            where = f"{path}[{after}].priority"
            message = f"{where} must not exceed the priority of tokens before it"
            raise InvalidRequest(message, param=where)
