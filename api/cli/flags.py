"""The flags of the command ``foretoken``: names, help texts and parsing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from ...core.config import EngineConfig, parse_size
from ...core.errors import InvalidRequest
from ...draft.training.traffic import DEFAULT_BYTES, TrafficRecorder
from ..parsing.output_format import REASONING_PARSERS, TOOL_PARSERS
from ..server.observability import Observing, make_telemetry
from ..serving.limits import Limits
from ..types.request_context import caller_of
from ..types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..server.tracing import Telemetry  # needs the extra otel
    from ..serving.serving_context import Settings

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
MAX_PORT = 65535
SAMPLING_FLAGS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


LOG_FORMATS = ("text", "json")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def add_observing_flags(parser: Parser) -> None:
    """Add the flags of `Observing`: logs, traces and recorded traffic."""
    add = parser.add_argument_group("observing").add_argument
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="format of log lines; json writes one object a line",
    )
    add(
        "--access-log",
        action="store_true",
        help="log one line for each request, with tokens and times",
    )
    add(
        "--tracing",
        action="store_true",
        help=f"export traces with OpenTelemetry to the collector in {ENDPOINTS[1]}",
    )
    add(
        "--otlp-endpoint",
        type=_url,
        metavar="URL",
        help="address of the OTLP/HTTP collector that receives traces",
    )
    add(
        "--trace-steps",
        type=_share,
        default=0.0,
        metavar="RATE",
        help="share of the engine's steps to trace, from 0 to 1 (0)",
    )
    add(
        "--record-traffic",
        metavar="DIR",
        help="folder for the token ids of finished requests, to train a draft on (default: none "
        "are recorded); its files contain the conversations",
    )
    add(
        "--record-key",
        action="append",
        metavar="KEY",
        help="API key whose requests are recorded; needed where --api-key is given; repeatable",
    )
    add(
        "--record-bytes",
        type=size,
        metavar="SIZE",
        help="largest size of all records in the folder (1GiB)",
    )


def observing(parsed: argparse.Namespace) -> Observing:
    """The `Observing` of the flags. Raises `InvalidRequest` if the extra for traces is missing."""
    from ..server.observability import Observing

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
    from ...draft.training.traffic import TrafficRecorder

    has_keys = bool(keys or given_keys(parsed, "api_key"))
    return TrafficRecorder(
        Path(parsed.record_traffic),
        max_bytes=parsed.record_bytes or DEFAULT_BYTES,
        callers={caller_of(key) for key in keys} if has_keys else None,
    )


def _telemetry(parsed: argparse.Namespace) -> Telemetry | None:
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


def number_up_to(most: float, what: str) -> Callable[[str], float]:
    """How argparse reads a number from 0 to ``most``; ``what`` names it in the error."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number <= most:  # also false for nan
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}")
        return number

    return read


_share = number_up_to(1.0, "a share from 0 to 1")
_seconds = number_up_to(1e6, "a number of seconds")


class Parser(argparse.ArgumentParser):
    """An argument parser with errors of one line and without abbreviated flags."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_model(parser: Parser) -> None:
    """Add the argument MODEL."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder in Hugging Face layout, GGUF file, hub id, smollm2 or builtin; default: "
        "smollm2 where it is installed, else builtin",
    )


def add_show_drafts(parser: Parser) -> None:
    """Add --show-drafts."""
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="colour each token by its drafter and print a legend; colours need a terminal or "
        "FORCE_COLOR, and NO_COLOR disables them",
    )


ENGINE_FLAGS: Mapping[str, Mapping[str, tuple[str | None, str]]] = {
    "speculation": {
        "draft": (
            "SPEC",
            "drafters: auto, none, or a comma list of auto, radix, suffix, ngram, oracle:P and the "
            "PATH of one draft model or trained head",
        ),
        "draft_temperature": (
            None,
            "temperature of a draft model: the request's (same), or a multiple of it tuned by "
            "acceptance rates (tuned)",
        ),
        "speculation": (
            "auto|off|K",
            "draft tokens in each step: chosen by cost and acceptance (auto), none (off), or "
            "always K",
        ),
        "verify": (
            None,
            "verification of drafts: coupled keeps the tokens of plain decoding, rejection only "
            "their distribution and needs --speculation K",
        ),
    },
    "model": {
        "exact": (
            None,
            "bitwise equality of logits: with and without drafts (spec), in any batch too "
            "(batch), or not guaranteed (off)",
        ),
        "backend": (
            None,
            "kernels to use; auto: native on the CPU, triton on cuda, torch where neither runs",
        ),
        "device": (None, "device of the model; auto: cuda where there is one"),
        "dtype": (None, "data type of weights and activations"),
        "quantize": (None, "quantization of the weights; int4 on the CPU only"),
        "load_format": (
            None,
            "weights to use: those of the checkpoint (auto), or seeded random ones (random)",
        ),
        "model_impl": (
            None,
            "implementation of the layers: foretoken's decoder (own) or transformers' modules "
            "on its KV pages and kernels; auto: own where it supports the model",
        ),
        "threads": (
            "N",
            "number of CPU threads for the model (all; with the torch backend all but one)",
        ),
        "generation_config": (
            None,
            "sampling values of requests that leave them out: those that the model recommends "
            "(model), or OpenAI's (none)",
        ),
        "override_generation_config": (
            "JSON",
            "sampling values in place of the model's, as a JSON object of temperature, top_p, "
            "top_k, min_p and repetition_penalty; values of a request go first",
        ),
    },
    "KV cache": {
        "kv_cache_dtype": (
            None,
            "data type of the KV pool; int8, or fp8 (e4m3) on a GPU, holds twice the tokens",
        ),
        "kv_memory": (
            "SIZE",
            "size of the KV pool, e.g. 4GiB (a quarter of free memory, 2GiB at most; on cuda 9/10)",
        ),
        "kv_tokens": ("N", "size of the KV pool in tokens"),
        "page_size": ("N", "tokens of one KV page (16, on cuda 32)"),
        "pin_quota": ("SHARE", "largest share of the KV pool that one cache_salt may pin (0.25)"),
        "cache_quota": (
            "SHARE",
            "share of the KV pool beyond which a cache_salt's pages are evicted first (0.5; 1: "
            "never)",
        ),
    },
    "scheduling": {
        "max_model_len": ("N", "limit on prompt and answer together, in tokens (the model's)"),
        "max_batch_tokens": ("N", "limit on the tokens of one step (256, on cuda 2048)"),
        "max_running": ("N", "limit on the requests in one step (64, on cuda 256)"),
        "max_queued": ("N", "limit on waiting requests (256); more get 429"),
        "max_slowdown": (
            "X",
            "largest factor by which chunks of prompts may lengthen the steps of running "
            "answers (2)",
        ),
        "overlap": (
            None,
            "launch of a step before the tokens of the step before it are read; auto: on for a GPU",
        ),
        "aging_seconds": (
            "S",
            "raise the priority of a waiting request by one every S seconds (10)",
        ),
        "max_priority": (
            "N",
            "largest priority of a request, from -N to N (10; 0: none allowed)",
        ),
    },
    "supervision": {
        "step_timeout": ("S", "exit if one step takes longer than S seconds (120; 0: no limit)"),
        "ready_step_seconds": (
            "S",
            "return 503 from /ready while a step takes longer than S seconds (10)",
        ),
        "dump_dir": ("DIR", "folder for crash dumps (the system's temporary folder)"),
    },
}
"""Metavar and help of each option of `EngineConfig`; type and choices are those of the field."""


def add_engine_flags(parser: Parser) -> None:
    """Add a flag for each option of `EngineConfig`."""
    hints = get_type_hints(EngineConfig)
    for title, flags in ENGINE_FLAGS.items():
        group = parser.add_argument_group(title)
        is_pool = POOL_SIZES[0] in flags
        sizes = group.add_mutually_exclusive_group() if is_pool else group
        for name, (metavar, help) in flags.items():
            place = sizes if name in POOL_SIZES else group
            flag = f"--{name.replace('_', '-')}"
            place.add_argument(flag, metavar=metavar, help=help, **_reading(name, hints[name]))


def _reading(name: str, hint: object) -> dict[str, Any]:
    """Keyword arguments for argparse, by the type of the option's field."""
    if name in READERS:
        return {"type": READERS[name]}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    kinds = {hint, *get_args(hint)}
    return {"type": next((kind for kind in (int, float) if kind in kinds), str)}


def add_server_flags(parser: Parser) -> None:
    """Add the flags of the HTTP server."""
    add = parser.add_argument_group("server").add_argument
    _add_access_flags(add)
    add("--served-model-name", metavar="NAME", help="name of the model in requests and answers")
    add(
        "--tool-parser",
        default="auto",
        choices=TOOL_PARSERS,
        help="format of the model's tool calls; auto: by its chat template",
    )
    add(
        "--reasoning-parser",
        default="auto",
        choices=REASONING_PARSERS,
        help="format of the model's reasoning; auto: by its chat template",
    )
    add(
        "--no-ui",
        action="store_true",
        help="disable the live page at / and the API viewer at /docs",
    )
    add(
        "--strict",
        action="store_true",
        help="refuse temperatures over 2 (OpenAI routes) or 1 (Anthropic routes), as those APIs do",
    )
    add(
        "--normalize",
        action="store_true",
        help="remove times and request ids from system prompts, so that they hit the cache",
    )
    add(
        "--prewarm",
        metavar="FILE",
        help="JSON Lines file of prompts to put into the cache before listening",
    )
    add(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="origin of web pages that may call the API (*: any); repeatable",
    )
    add(
        "--allowed-host",
        action="append",
        metavar="HOST",
        help="name that requests may have in Host, beside this machine's own, where the server has "
        "no keys (*: any); repeatable",
    )
    add("--log-level", choices=LOG_LEVELS, default="info", help="lowest level of log lines (info)")
    add(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="time for running requests to finish after SIGTERM (30)",
    )
    _add_limits(parser)


def _add_access_flags(add: Callable[..., object]) -> None:
    """Where the server listens, and which keys requests must carry."""
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=_port, default=8000, help="port to listen on (8000; 0: any free one)")
    add("--uds", metavar="PATH", help="Unix socket to listen on, in place of an address")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="API key that requests must carry (FORETOKEN_API_KEY); repeatable",
    )
    add(
        "--admin-key",
        action="append",
        metavar="KEY",
        help="API key for /debug, /cache and flushing the whole cache (FORETOKEN_ADMIN_KEY); "
        "repeatable",
    )


def _add_limits(parser: Parser) -> None:
    """One flag for each of `Limits`."""
    group = parser.add_argument_group("limits")
    for each in fields(Limits):
        flag = f"--{each.name.replace('_', '-')}"
        help = f"{each.metadata['help']} ({each.default:.12g})"
        if each.name.endswith("_bytes"):
            group.add_argument(flag, type=size, metavar="SIZE", help=help)
        elif each.name.endswith("_seconds"):
            group.add_argument(flag, type=_seconds, metavar="S", help=help)
        else:
            group.add_argument(flag, type=int, metavar="N", help=help)


def add_sampling_flags(parser: Parser) -> None:
    """Add a flag for each sampling parameter."""
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, metavar="N", help="longest answer, in tokens")
    add("--min-tokens", type=int, metavar="N", help="shortest answer, in tokens (0)")
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature (the model's, else 1; 0: greedy)",
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="probability mass of the most likely tokens to sample from (the model's, else 1)",
    )
    add(
        "--top-k",
        type=int,
        metavar="K",
        help="number of most likely tokens to sample from (the model's, else 0: all)",
    )
    add(
        "--min-p",
        type=float,
        metavar="P",
        help="smallest probability to sample, relative to the most likely token's (the model's, "
        "else 0)",
    )
    add("--seed", type=int, metavar="N", help="sampling seed; same seed, same answer")
    add("--stop", action="append", metavar="TEXT", help="text that ends the answer; repeatable")
    add(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="continue after an end-of-sequence token",
    )
    add(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="penalty on tokens that occur in the answer, from -2 to 2 (0)",
    )
    add(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="penalty on tokens for each time they occur in the answer, from -2 to 2 (0)",
    )
    add(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="factor that makes tokens of prompt and answer less likely (the model's, else 1: "
        "none)",
    )


def _depth(text: str) -> str | int:
    if text in ("auto", "off"):
        return text
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not auto, off or a number")
    return int(text)


def size(text: str) -> int:
    try:
        return parse_size(text)
    except InvalidRequest:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 4GiB") from None


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port from 0 to {MAX_PORT}")
    return int(text)


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """The engine options that the command line sets."""
    given = {name: getattr(parsed, name) for name in EngineConfig.names()}
    return {name: value for name, value in given.items() if value is not None}


def sampling_params(parsed: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that the command line sets."""
    given = {name: getattr(parsed, name) for name in SAMPLING_FLAGS}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def server_settings(parsed: argparse.Namespace) -> Settings:
    """The options of the HTTP side."""
    from ..server.foreign_pages import is_loopback
    from ..serving.serving_context import Settings

    return Settings(
        api_keys=given_keys(parsed, "api_key"),
        admin_keys=given_keys(parsed, "admin_key"),
        served_name=parsed.served_model_name,
        tool_parser=parsed.tool_parser,
        reasoning_parser=parsed.reasoning_parser,
        ui=not parsed.no_ui,
        strict=parsed.strict,
        normalize=parsed.normalize,
        cors_origins=tuple(parsed.cors_origin or ()),
        loopback_only=parsed.uds is None and is_loopback(parsed.host),
        allowed_hosts=tuple(parsed.allowed_host or ()),
        limits=_limits(parsed),
    )


def _limits(parsed: argparse.Namespace) -> Limits:
    given = {each.name: getattr(parsed, each.name) for each in fields(Limits)}
    return Limits(**{name: value for name, value in given.items() if value is not None})


def given_keys(parsed: argparse.Namespace, name: str) -> tuple[str, ...]:
    """API keys of a flag, or else of its environment variable."""
    keys = list(getattr(parsed, name) or ())
    variable = f"FORETOKEN_{name.upper()}"
    if variable in os.environ and not keys:
        keys = [os.environ[variable]]
    # No header could bring any other: its value is cut at both ends.
    if not all(key.isprintable() and key.strip() == key != "" for key in keys):
        parsed.parser.error(f"{name} must not be empty, and must not begin or end with a space")
    return tuple(keys)


POOL_SIZES = ("kv_memory", "kv_tokens")  # one of them at most
READERS: Mapping[str, Callable[[str], object]] = {"speculation": _depth, "kv_memory": size}
