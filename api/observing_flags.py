"""The flags of what a server tells of itself: its log and its traces."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .flags import Parser, given_keys, size

if TYPE_CHECKING:
    from ..draft.training.traffic import TrafficRecorder
    from .observing import Observing
    from .telemetry import Telemetry

LOG_FORMATS = ("text", "json")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def add_observing_flags(parser: Parser) -> None:
    """The options of `Observing`."""
    add = parser.add_argument_group("observing").add_argument
    add("--log-format", choices=LOG_FORMATS, default="text", help="json: an object a line")
    add("--access-log", action="store_true", help="a line for each request, with what it cost")
    add("--tracing", action="store_true", help=f"by OpenTelemetry, to {ENDPOINTS[1]}")
    add("--otlp-endpoint", type=_url, metavar="URL", help="trace, to this collector (OTLP, HTTP)")
    add(
        "--trace-steps",
        type=_share,
        default=0.0,
        metavar="RATE",
        help="share of the engine's steps that are traced as well, 0 to 1",
    )
    add(
        "--record-traffic",
        metavar="DIR",
        help="write the token ids of finished requests to this folder, for train-draft; off by "
        "default: whoever reads the folder reads the conversations",
    )
    add(
        "--record-key",
        action="append",
        metavar="KEY",
        help="record requests with this API key; with --api-key no others are; repeatable",
    )
    add(
        "--record-bytes",
        type=size,
        metavar="SIZE",
        help="that all records may take, in all runs together (1GiB)",
    )


def observing(parsed: argparse.Namespace) -> Observing:
    """What was asked for. Raises `InvalidRequest` where the extra for traces is missing."""
    from .observing import Observing

    return Observing(
        access_log=parsed.access_log or parsed.log_level == "debug",
        telemetry=_telemetry(parsed),
        recorder=_recorder(parsed),
    )


def _recorder(parsed: argparse.Namespace) -> TrafficRecorder | None:
    """Callers with API keys opt in, each by its key."""
    keys: Sequence[str] = parsed.record_key or ()
    if parsed.record_traffic is None:
        if keys or parsed.record_bytes is not None:
            parsed.parser.error("--record-key and --record-bytes need --record-traffic")
        return None
    from ..draft.training.traffic import DEFAULT_BYTES, TrafficRecorder
    from .owners import caller_of

    has_keys = bool(keys or given_keys(parsed, "api_key"))
    return TrafficRecorder(
        Path(parsed.record_traffic),
        max_bytes=parsed.record_bytes or DEFAULT_BYTES,
        callers={caller_of(key) for key in keys} if has_keys else None,
    )


def _telemetry(parsed: argparse.Namespace) -> Telemetry | None:
    from .observing import make_telemetry

    if parsed.otlp_endpoint is None and not parsed.tracing:
        if parsed.trace_steps:
            parsed.parser.error("--trace-steps needs --tracing or --otlp-endpoint")
        return None
    if parsed.otlp_endpoint is None and not any(name in os.environ for name in ENDPOINTS):
        parsed.parser.error(f"--tracing needs {ENDPOINTS[1]}, or else --otlp-endpoint")
    return make_telemetry(parsed.otlp_endpoint, step_rate=parsed.trace_steps)


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"'{text}' is not a URL such as http://127.0.0.1:4318")
    return text


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:  # also false for nan
        raise argparse.ArgumentTypeError(f"'{text}' is not a share from 0 to 1")
    return share
