"""RequestRecorder: records a server's requests for `foretoken replay`."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..._version import __version__
from ...core.errors import InvalidRequest
from ...core.interface.request import Delta, Request
from ...draft.training.traffic import Recorder
from ..serving.content_coding import decode_body
from ..types.request_context import CONTEXT, header, random_id, session_id
from .identity import model_mark
from .records import Asked, RecordedRequest, engine_facts, kernels_of, record_of

Redact = Callable[[str], str]
SENT = "sent_body"
"""Key in a scope's state: the `SentBody` of the request."""
MAX_BODY_BYTES = 2**28


class SentBody:
    """The body of one HTTP request, as it arrives."""

    def __init__(self, scope: Scope) -> None:
        self.path: str = scope["path"]
        self.coding = header(scope, b"content-encoding")
        self.http, self.at = random_id(), time.time()
        self.parts: list[bytes] = []
        self.num_begun = 0  # number of answers that began
        self.is_written = False  # set by the recorder's thread

    def decoded(self) -> dict[str, Any] | None:
        """Return the body as a JSON object; None if it has another form."""
        data = b"".join(self.parts)
        if self.coding:
            data = decode_body(data, self.coding, MAX_BODY_BYTES)
        try:
            found = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


class BodyKeeper:
    """Keeps the bodies of requests until their answers are recorded. Uploads are not kept."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and keep its body in the scope's state."""
        kind = header(scope, b"content-type") if scope["type"] == "http" else ""
        if scope["type"] != "http" or kind.startswith("multipart/"):
            await self.app(scope, receive, send)
            return
        sent = scope["state"][SENT] = SentBody(scope)

        async def kept() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                sent.parts.append(message.get("body", b""))
            return message

        await self.app(scope, kept, send)


class _Begun(Struct):
    """The HTTP request of an answer, and the answer's number in it."""

    sent: SentBody
    part: int
    session: str


class _Ended(Struct):
    record: RecordedRequest
    begun: _Begun | None


class RequestRecorder(Recorder[_Ended]):
    """Records everything that determines the tokens of each answer, including the prompt.

    ``redact``: a function that gets each text and returns the text to record.
    """

    option = "record_requests"
    redact: Redact | None = None

    def __init__(self, folder: Path, **options: Any) -> None:  # noqa: ANN401 - Recorder's
        super().__init__(folder, **options)
        self._begun: dict[str, _Begun] = {}  # by id of the running request
        self._decode: Callable[[Sequence[int]], str] = lambda _ids: ""

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the application; its bodies are kept for the records."""
        return BodyKeeper(app)

    def name(
        self,
        model: Path,
        settings: Mapping[str, Any],
        *,
        exact: bool,
        serving: Mapping[str, Any],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Set the facts of all records: the model's path, the settings, and whether it is exact.

        ``decode`` returns the text of token ids, for redaction. Reads samples of the weights.
        """
        try:
            mark = model_mark(model)
        except OSError:  # a front has no files
            mark = ""
        self._decode = decode
        self._facts = {
            "model": str(model),
            "options": engine_facts(settings),
            "kernels": kernels_of(settings),
            "exact": exact,
            "foretoken": __version__,
            "mark": mark,
            "serving": dict(serving),
        }

    def expect(self, request: Request, caller: bytes) -> None:
        """Register a submitted request with the HTTP request that it belongs to."""
        super().expect(request, caller)
        context = CONTEXT.get()
        if context is None or (sent := context.scope.get("state", {}).get(SENT)) is None:
            return
        if self.expects(request.request_id):
            session = session_id() or ""
            self._begun[request.request_id] = _Begun(sent, sent.num_begun, session)
        sent.num_begun += 1

    def finish(self, request: Request, delta: Delta) -> None:
        """Queue an ended request for writing."""
        super().finish(request, delta)
        self._begun.pop(request.request_id, None)

    def kept(self, request: Request, delta: Delta) -> _Ended:
        """Return the record of a request that has ended."""
        record = record_of(
            request,
            finish_reason=str(delta.finish_reason),
            stop_reason=delta.stop_reason,
            **self._facts,
        )
        return _Ended(record, self._begun.get(request.request_id))

    def line(self, kept: _Ended, namespace: str) -> bytes:  # noqa: ARG002 - names the file
        """Return a record as one line of JSON."""
        record, begun = kept.record, kept.begun
        if begun is not None:
            record.asked = self._asked(begun)
        if self.redact is not None:
            record = redacted(record, self.redact, self._decode)
        return msgspec.json.encode(record) + b"\n"

    def _asked(self, begun: _Begun) -> Asked:
        sent = begun.sent
        body = sent.decoded()
        named = (body or {}).get("prompt_cache_key")
        session = begun.session or (named if isinstance(named, str) else "")
        asked = Asked(http=sent.http, part=begun.part, at=sent.at, session=session, path=sent.path)
        if not sent.is_written:
            sent.is_written, asked.body = True, body
        return asked


def redacted(
    record: RecordedRequest, redact: Redact, decode: Callable[[Sequence[int]], str]
) -> RecordedRequest:
    """Return a record with the texts that ``redact`` returns.

    If it changes a text, the token ids are removed, because they are the text. So is a body in
    which it finds nothing, although it changes the prompt: there the text has another form.
    """
    texts = [decode([each for each in record.prompt if each >= 0]), decode(record.tokens)]
    hidden = [redact(text) for text in texts]
    asked = None if record.asked is None else _asked_redacted(record.asked, redact)
    stop = redact(record.stop_reason) if isinstance(record.stop_reason, str) else record.stop_reason
    others = asked, _redacted(record.params, redact), stop
    if hidden == texts and others == (record.asked, record.params, record.stop_reason):
        return record
    if asked is not None and asked == record.asked and hidden[0] != texts[0]:
        asked = msgspec.structs.replace(asked, body=None)
    params = {name: each for name, each in record.params.items() if isinstance(each, int | float)}
    return msgspec.structs.replace(
        record,
        asked=asked,
        prompt=[],
        tokens=[],
        params=params,
        stop_reason=stop,
        redacted=hidden[1],
    )


def _asked_redacted(asked: Asked, redact: Redact) -> Asked:
    session = redact(asked.session) if asked.session else ""
    return msgspec.structs.replace(asked, body=_redacted(asked.body, redact), session=session)


def _redacted(value: Any, redact: Redact) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_redacted(each, redact) for each in value]
    if isinstance(value, Mapping):  # names are the caller's texts, too, in arguments of a call
        return {_redacted(name, redact): _redacted(each, redact) for name, each in value.items()}
    return value


def load_redact(name: str) -> Redact:
    """Return the function that MODULE:FUNCTION names. Raises `InvalidRequest`."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"--record-redact {name}: {error}; it must be MODULE:FUNCTION"
        raise InvalidRequest(message, param="record_redact") from None
    if not callable(found):
        message = f"--record-redact {name} is not a function"
        raise InvalidRequest(message, param="record_redact")
    redact: Redact = found
    return redact
