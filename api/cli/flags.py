"""The flags of the command ``foretoken``: what they are called, and how they are read."""

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
    """The options of `Observing`."""
    add = parser.add_argument_group("observing").add_argument
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="format of log lines; json writes one object a line",
    )
    add("--access-log", action="store_true", help="log one line per request, with its cost")
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
        help="limit on the size of all records, over all runs (1GiB)",
    )


def observing(parsed: argparse.Namespace) -> Observing:
    """What was asked for. Raises `InvalidRequest` where the extra for traces is missing."""
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


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:  # also false for nan
        raise argparse.ArgumentTypeError(f"'{text}' is not a share from 0 to 1")
    return share


class Parser(argparse.ArgumentParser):
    """Errors are one line; flags are not guessed from their beginnings."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_model(parser: Parser) -> None:
    """Which model."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder in Hugging Face layout, GGUF file, hub id, smollm2 or builtin; default: "
        "smollm2 where it is installed, else builtin",
    )


def add_show_drafts(parser: Parser) -> None:
    """Colours by source."""
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="colour each token by the source that drafted it, the target's own plain, and end "
        "with a legend; in colour on a terminal or with FORCE_COLOR, never with NO_COLOR",
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
            "temperature of a draft model: the request's own, or a multiple tuned by acceptances",
        ),
        "speculation": (
            "auto|off|K",
            "draft tokens a step: chosen by their cost (auto), none (off), or always K",
        ),
        "verify": (
            None,
            "verification of drafts: the tokens of an answer without drafts (coupled), or only "
            "their distribution (rejection)",
        ),
    },
    "model": {
        "exact": (
            None,
            "batches that give equal bits: with and without drafts (spec), all (batch), none (off)",
        ),
        "backend": (
            None,
            "kernels to use; auto: native on the CPU, Triton's on cuda, else torch",
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
            "implementation of the layers: this engine's decoder, or transformers' modules on its "
            "pages and kernels; auto: the first where there is one for the model",
        ),
        "threads": ("N", "threads of the model on the CPU"),
    },
    "KV cache": {
        "kv_cache_dtype": (
            None,
            "data type of the KV pool; int8, or fp8 (e4m3) on a GPU, holds twice the tokens",
        ),
        "kv_memory": ("SIZE", "size of the KV pool, e.g. 4GiB"),
        "kv_tokens": ("N", "size of the KV pool in tokens"),
        "page_size": ("N", "tokens of one KV page (16, on cuda 32)"),
        "pin_quota": ("SHARE", "largest share of the KV pool that one cache_salt may pin"),
        "cache_quota": (
            "SHARE",
            "share of the KV pool beyond which a cache_salt's pages are evicted first (1: never)",
        ),
    },
    "scheduling": {
        "max_model_len": ("N", "limit on prompt and answer together, in tokens"),
        "max_batch_tokens": ("N", "limit on the tokens of one step (256, on cuda 2048)"),
        "max_running": ("N", "limit on the requests in one step (64, on cuda 256)"),
        "max_queued": ("N", "limit on waiting requests; more get 429"),
        "max_slowdown": (
            "X",
            "factor by which prompts may lengthen the steps of running answers",
        ),
        "overlap": (
            None,
            "start of a step before the result of the one before it is read; auto: on a GPU",
        ),
        "aging_seconds": ("S", "raise the priority of a waiting request by one every S seconds"),
        "max_priority": (
            "N",
            "limit on a request's priority, which may be from -N to N (0: none)",
        ),
    },
    "supervision": {
        "step_timeout": ("S", "exit if one step takes longer than S seconds (0: no limit)"),
        "ready_step_seconds": (
            "S",
            "return 503 from /ready while a step takes longer than S seconds",
        ),
        "dump_dir": ("DIR", "folder for crash dumps; default: the temporary folder"),
    },
}
"""Metavar and help of each option of `EngineConfig`; type and choices are those of the field."""


def add_engine_flags(parser: Parser) -> None:
    """The options of `EngineConfig`."""
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
    """How argparse reads the value of an option, by the type of its field."""
    if name in READERS:
        return {"type": READERS[name]}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    kinds = {hint, *get_args(hint)}
    return {"type": next((kind for kind in (int, float) if kind in kinds), str)}


def add_server_flags(parser: Parser) -> None:
    """The options of the HTTP side."""
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_port, default=8000, help="port to listen on (0: any free one)")
    add("--uds", metavar="PATH", help="listen on a Unix socket instead")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="key that callers must send; or FORETOKEN_API_KEY; repeatable",
    )
    add(
        "--admin-key",
        action="append",
        metavar="KEY",
        help="key for /debug, /cache and flushing everything; or FORETOKEN_ADMIN_KEY; repeatable",
    )
    add("--served-model-name", metavar="NAME", help="name of the model in answers")
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
    add("--no-ui", action="store_true", help="disable the page at /")
    add(
        "--strict",
        action="store_true",
        help="refuse temperatures that OpenAI (over 2) and Anthropic (over 1) refuse",
    )
    add(
        "--normalize",
        action="store_true",
        help="strip times and request ids that clients put into system prompts",
    )
    add("--prewarm", metavar="FILE", help="compute the prompts of a JSON file before listening")
    add(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="origin of web pages that may call (*: any); repeatable",
    )
    add("--log-level", choices=LOG_LEVELS, default="info", help="level of the lines to log")
    add(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="time for running requests to finish after SIGTERM",
    )
    _add_limits(parser)


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
    """The fields of `SamplingParams`."""
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, metavar="N", help="limit on the answer, in tokens")
    add("--min-tokens", type=int, metavar="N", help="tokens before the answer may end")
    add("--temperature", type=float, metavar="T", help="temperature of sampling (0: greedy)")
    add("--top-p", type=float, metavar="P", help="probability mass to sample from")
    add("--top-k", type=int, metavar="K", help="most likely tokens to sample from (0: all)")
    add("--min-p", type=float, metavar="P", help="probability, relative to the most likely token's")
    add("--seed", type=int, metavar="N", help="seed of sampling; same seed, same answer")
    add("--stop", action="append", metavar="TEXT", help="text that ends the answer; repeatable")
    add("--ignore-eos", action="store_true", default=None, help="go on behind an end token")
    add(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="penalty on tokens that the answer has, -2 to 2",
    )
    add(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="penalty on tokens for each time that the answer has them, -2 to 2",
    )
    add(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="factor against tokens of prompt and answer (1: none)",
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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e6:  # also false for nan
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return seconds


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """The engine's options that were given."""
    given = {name: getattr(parsed, name) for name in EngineConfig.names()}
    return {name: value for name, value in given.items() if value is not None}


def sampling_params(parsed: argparse.Namespace) -> SamplingParams:
    """The sampling flags that were given."""
    given = {name: getattr(parsed, name) for name in SAMPLING_FLAGS}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def server_settings(parsed: argparse.Namespace) -> Settings:
    """The options of the HTTP side."""
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
        limits=_limits(parsed),
    )


def _limits(parsed: argparse.Namespace) -> Limits:
    given = {each.name: getattr(parsed, each.name) for each in fields(Limits)}
    return Limits(**{name: value for name, value in given.items() if value is not None})


def given_keys(parsed: argparse.Namespace, name: str) -> tuple[str, ...]:
    """Those of a flag, else the one of its environment variable."""
    keys = list(getattr(parsed, name) or ())
    variable = f"FORETOKEN_{name.upper()}"
    if variable in os.environ and not keys:
        keys = [os.environ[variable]]
    # No header could bring any other: its value is cut at both ends.
    if not all(key.isprintable() and key.strip() == key != "" for key in keys):
        parsed.parser.error(f"{name} must not be empty, nor begin or end with a space")
    return tuple(keys)


POOL_SIZES = ("kv_memory", "kv_tokens")  # one of them at most
READERS: Mapping[str, Callable[[str], object]] = {"speculation": _depth, "kv_memory": size}
