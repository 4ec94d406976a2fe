"""The server's log: text or JSON lines, each with the id of its request.

Lines have token counts and times of requests, never prompts, keys or salts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from ....core.interface.request import Usage
from ...types.request_context import CONTEXT, EngineAnswer, RequestContext

LogFormat = Literal["text", "json"]
_FIELDS = "fields"  # attribute of a log record that holds additional fields
logger = logging.getLogger("foretoken.access")


def configure(level: str, log_format: LogFormat) -> None:
    """Log to stderr, unless the program has already configured logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def announcement(text: str, log_format: LogFormat) -> str:
    """Return a line that is printed at every log level."""
    record = logging.makeLogRecord({"name": "foretoken", "levelname": "INFO", "msg": text})
    return JsonFormatter().format(record) if log_format == "json" else text


class TextFormatter(logging.Formatter):
    """``date time LEVEL logger message``, followed by additional fields as ``name=value``."""

    def __init__(self) -> None:
        line = "%(asctime)s %(levelname)s %(name)s %(message)s"
        super().__init__(line, datefmt="%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without a traceback."""
        fields = " ".join(f"{name}={value}" for name, value in _fields(record))
        line = super().formatMessage(record)
        return f"{line} {fields}" if fields else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the time in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the whole line."""
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_fields(record)),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """Yield the additional fields of a log line.

    Records are formatted where they are logged, so the context variable holds the line's request.
    """
    request = CONTEXT.get()
    if request is not None and request.request_id:
        yield "request_id", request.request_id
    if request is not None and request.trace_id:
        yield "trace_id", request.trace_id
    fields: Mapping[str, object] = vars(record).get(_FIELDS, {})
    yield from fields.items()


def log_request(request: RequestContext, seconds: float) -> None:
    """Log a finished request in one line. Health checks and scrapes are logged at level debug."""
    level = logging.DEBUG if request.is_probe else logging.INFO
    if logger.isEnabledFor(level):
        fields = {
            "method": request.method,
            "route": request.route,
            "status": request.status,
            "duration_ms": _milliseconds(seconds),
            **_cost(request.answers),
        }
        if request.error is not None:
            fields["error"] = request.error.code or request.error.kind
        logger.log(level, "request", extra={_FIELDS: fields})


def _cost(answers: Sequence[EngineAnswer]) -> dict[str, object]:
    """Return the token counts and times of a request's generations; empty if there are none."""
    started = [answer for answer in answers if answer.finish_reasons]
    if not started:
        return {}
    usages = [answer.usage for answer in started]
    ends = {each or "abort" for answer in started for each in answer.finish_reasons}
    return {
        "answer_id": started[0].request_id,
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "completion_tokens": sum(usage.completion_tokens for usage in usages),
        "proposed_tokens": sum(usage.proposed_tokens for usage in usages),
        "accepted_tokens": sum(usage.accepted_tokens for usage in usages),
        **_times(usages),
        "finish_reason": ",".join(sorted(ends)),
    }


def _times(usages: Sequence[Usage]) -> dict[str, object]:
    """Return the known times. After a disconnect, the request may not have ended in the engine."""
    seconds = {
        "queue_ms": max(usage.queue_time for usage in usages),
        "ttft_ms": min(usage.time_to_first_token for usage in usages),
        "total_ms": max(usage.total_time for usage in usages),
    }
    return {name: _milliseconds(value) for name, value in seconds.items() if value}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)
