"""Events of clients on a WebSocket, and the frames that answer them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ...serving.errors import ApiError, bad_json

CREATE, CANCEL, RESUME = "response.create", "response.cancel", "response.resume"
MAX_LANE_CHARS = 256
_RESPONSE_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")
DATA = b"data: "
_encode = msgspec.json.Encoder().encode
_read_fields = msgspec.json.Decoder(dict[str, Raw]).decode


class Create(Struct, frozen=True, kw_only=True):
    """``response.create``: the body of a request to /v1/responses, as JSON."""

    lane: str | None
    body: bytes


class Cancel(Struct, frozen=True, kw_only=True):
    """``response.cancel``: ends a response.

    Without an id, it ends the first response of a lane that is not ending already.
    """

    lane: str | None
    response_id: str | None


class Resume(Struct, frozen=True, kw_only=True):
    """``response.resume``: asks for the events of a response after a sequence number.

    ``starting_after``: -1 asks for all events. ``cache_salt``: the salt of the response.
    """

    lane: str | None
    response_id: str
    starting_after: int
    cache_salt: str | None = None


ClientEvent = Create | Cancel | Resume


class WireError(Struct, kw_only=True):
    """``error`` of an error event. ``headers``: retry-after and x-request-id of the HTTP answer."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | UnsetType = UNSET


class ErrorFrame(Struct, kw_only=True, tag_field="type", tag="error"):
    """The event of a request that was refused. ``status`` is its HTTP status."""

    status: int
    error: WireError
    stream_id: str | UnsetType = UNSET


class CancelledFrame(Struct, kw_only=True, tag_field="type", tag="response.cancelled"):
    """The last event of a cancelled response; ``response`` has the fields of its first event."""

    sequence_number: int
    response: Mapping[str, Any]
    stream_id: str | UnsetType = UNSET


def read_event(data: bytes) -> ClientEvent:
    """Return the event of a client. Raises `ApiError` 400, which names the field."""
    try:
        data.decode()  # msgspec does not check the UTF-8 of `Raw` fields
        fields = _read_fields(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_json(error) from None
    kind, lane = _field(fields, "type", str), _field(fields, "stream_id", str | None)
    if lane is not None and not 0 < len(lane) <= MAX_LANE_CHARS:
        raise _wrong("stream_id", f"must have 1 to {MAX_LANE_CHARS} characters")
    if kind == CREATE:
        return Create(lane=lane, body=_body(fields))
    if kind == CANCEL:
        return Cancel(lane=lane, response_id=_field(fields, "response_id", str | None))
    if kind == RESUME:
        return _resume(fields, lane)
    raise _wrong("type", f"must be {CREATE}, {CANCEL} or {RESUME}")


def _resume(fields: dict[str, Raw], lane: str | None) -> Resume:
    response_id = _field(fields, "response_id", str)
    if _RESPONSE_ID.fullmatch(response_id) is None:
        raise _wrong("response_id", "is not the id of a response")
    return Resume(
        lane=lane,
        response_id=response_id,
        starting_after=_field(fields, "starting_after", int),
        cache_salt=_field(fields, "cache_salt", str | None),
    )


def _body(fields: dict[str, Raw]) -> bytes:
    """Return the body of the HTTP request. ``generate: false`` only caches the prompt."""
    generates = _field(fields, "generate", bool | None)
    body = {name: value for name, value in fields.items() if name not in _ENVELOPE}
    if generates is False:
        options = _field(fields, "prompt_cache_options", dict[str, Raw] | None) or {}
        body["prompt_cache_options"] = Raw(_encode({**options, "prewarm": True}))
    body["stream"] = Raw(b"true")
    return _encode(body)


_ENVELOPE = frozenset({"type", "stream_id", "generate"})


def _field(fields: Mapping[str, Raw], name: str, kind: Any) -> Any:  # noqa: ANN401 - any type
    try:
        return msgspec.json.decode(fields.get(name, Raw(b"null")), type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(name, str(error)) from None


def _wrong(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{name}: {problem}", param=name)


def error_frame(
    status: int, body: bytes, lane: str | None, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return the event for an HTTP error, whose ``body`` is OpenAI's error object."""
    error = msgspec.json.decode(body, type=_ErrorBody).error
    error.headers = headers or UNSET
    return _encode(ErrorFrame(status=status, error=error, stream_id=_named(lane)))


class _ErrorBody(Struct):
    error: WireError


def refused(error: ApiError, lane: str | None = None) -> bytes:
    """Return the event for an error."""
    return error_frame(error.status, _encode(error.body), lane, error.headers)


def cancelled(response: Mapping[str, Any], sequence_number: int, lane: str | None) -> bytes:
    """Return the event that ends a cancelled response."""
    ended = {**response, "status": "cancelled"}
    return _encode(
        CancelledFrame(sequence_number=sequence_number, response=ended, stream_id=_named(lane))
    )


def event_data(chunk: bytes) -> Iterator[bytes]:
    """Yield the JSON of each event in a part of a stream of server-sent events.

    The part must not begin or end inside an event. Comments, which keep connections alive, are
    skipped.
    """
    for line in chunk.split(b"\n"):
        if line.startswith(DATA):
            yield line[len(DATA) :]


def in_lane(data: bytes, lane: str | None) -> bytes:
    """Return the JSON of an event with the ``stream_id`` added, if there is one."""
    return data if lane is None else data[:-1] + b',"stream_id":' + _encode(lane) + b"}"


def _named(lane: str | None) -> str | UnsetType:
    return UNSET if lane is None else lane
