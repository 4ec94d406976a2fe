"""Settings of ``foretoken serve`` in addition to `EngineConfig` and `Limits`. Each is a flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from ...core.errors import InvalidRequest
from ...core.options.checks import MAX_PORT
from ...core.options.settings import SIZE, check_settings, setting
from ..parsing.output_format import REASONING_PARSERS, TOOL_PARSERS
from .limits import Limits
from .prices import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the HTTP server. Without ``api_keys`` it serves every caller.

    With ``admin_keys``, actions that affect all callers require one of them; an admin key also
    gives access to all other routes. Raises `InvalidRequest` for a key that no header can carry.
    """

    api_keys: tuple[str, ...] = setting(
        (),
        "API key that requests must carry; repeatable",
        "KEY",
        flag="api_key",
        group="server",
        is_basic=True,
        is_secret=True,
    )
    admin_keys: tuple[str, ...] = setting(
        (),
        "API key for /debug, /cache and flushing the whole cache; repeatable",
        "KEY",
        flag="admin_key",
        is_secret=True,
    )
    served_names: tuple[str, ...] = setting(
        (),
        "model name in requests and answers; repeatable or comma-separated: answers use the first",
        "NAME",
        flag="served_model_name",
        separator=",",
        is_basic=True,
    )
    tool_parser: str = setting(
        "auto",
        "format of the model's tool calls; auto: by its chat template",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = setting(
        "auto",
        "format of the model's reasoning; auto: by its chat template",
        choices=REASONING_PARSERS,
    )
    metric_names: Literal["foretoken", "vllm"] = setting(
        "foretoken",
        "metric names in /metrics: only foretoken's own (foretoken), or also vLLM's (vllm)",
    )
    ui: bool = setting(True, "disable the live page at / and the API viewer at /docs")
    ollama: bool = setting(True, "disable the routes of Ollama's API, below /api")
    strict: bool = setting(
        False,
        "reject temperatures above 2 (OpenAI routes) or 1 (Anthropic routes), as those APIs do",
    )
    normalize: Literal["off", "safe", "all"] = setting(
        "safe",
        "parts of prompts to remove because they change with each request and so prevent cache "
        "hits: none (off), headers that are not meant for the model (safe), or also times and "
        "request ids in system prompts, while tools are sorted by name (all)",
    )
    token_history: bool = setting(
        True,
        "disable the store of answers' token ids: earlier answers that clients send back as text "
        "are then always tokenised again",
    )
    token_history_bytes: int = setting(
        32 * 2**20, "size of the store of answers' token ids", SIZE, least=1, most=2**40
    )
    idle_prefill: Literal["on", "off"] = setting(
        "on",
        "whether the beginning of a conversation's next turn is computed while no request runs, "
        "where the chat template changes what it has computed before",
    )
    prices: str | Mapping[str, float] | None = setting(
        None,
        "prices per million tokens for usage.cost, as a JSON object with input, output, cached and "
        "write (cached and write default to input); in the file, a table",
        "JSON",
    )
    receipts: str | None = setting(
        None,
        "sign the answers of /v1/chat/completions and /v1/completions with the last Ed25519 key of "
        "this PEM file, which is created if it does not exist (needs the extra receipts)",
        "FILE",
    )
    batch_dir: str | None = setting(
        None,
        "folder for /v1/files and /v1/batches, which are then kept across restarts (default: a "
        "temporary folder); it contains the conversations",
        "DIR",
    )
    batch_running: int | None = setting(
        None,
        "batch requests to run at once while the server is otherwise idle (1/8 of --max-running)",
        least=1,
        most=2**31 - 1,
    )
    root_path: str = setting(
        "",
        "path prefix added by a reverse proxy, such as /llm; requests may include it or not",
        "PATH",
    )
    lora_dir: str | None = setting(
        None,
        "folder from which /v1/load_lora_adapter may load adapters; the route needs --admin-key",
        "DIR",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "origin of web pages that may call the API (*: any); repeatable or comma-separated",
        "ORIGIN",
        flag="cors_origin",
        separator=",",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Host header value to accept when no API key is set, in addition to the names of this "
        "machine (*: any); repeatable or comma-separated",
        "HOST",
        flag="allowed_host",
        separator=",",
    )
    # without API keys, accept only requests addressed to this machine's own names
    loopback_only: bool = False
    seal_key: str | None = setting(
        None,
        "secret that seals compaction items; servers that share conversations need the same one "
        "(default: a random one, so that items are refused after a restart)",
        "KEY",
        is_secret=True,
    )
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Check every option."""
        check_settings(self)
        for name, keys in (("api_key", self.api_keys), ("admin_key", self.admin_keys)):
            # HTTP strips spaces at both ends of a header value.
            if not all(key.isprintable() and key.strip() == key != "" for key in keys):
                message = f"{name} must not be empty and must not begin or end with a space"
                raise InvalidRequest(message, param=name)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            message = "root_path must begin with a slash and not end with one, as in /llm"
            raise InvalidRequest(message, param="root_path")
        if self.prices is not None:
            Prices.read(self.prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Options for the log of a process."""

    log_level: Literal["critical", "error", "warning", "info", "debug"] = setting(
        "info", "lowest level of log lines", group="server", is_basic=True
    )
    log_format: Literal["text", "json"] = setting(
        "text", "format of log lines; json writes one object per line"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining(LogOptions):
    """The front that a replica joins, and the replica's log."""

    front: str = setting("", "address of the front to join", "tcp://HOST:PORT", is_basic=True)
    replicas: int | None = setting(
        None,
        "number of replicas on this machine that share --kv-disk DIR:SIZE: each uses SIZE / N in "
        "the first free folder of DIR/0, DIR/1, ... (default: DIR and SIZE for one replica)",
        least=1,
        most=10_000,
        is_basic=True,
    )

    def __post_init__(self) -> None:
        """Check every option. Raises `InvalidRequest` without a front."""
        check_settings(self)
        if not self.front:
            raise InvalidRequest("a replica needs --front tcp://HOST:PORT", param="front")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen(LogOptions):
    """Options for the address to listen on, for the log, and for startup and shutdown."""

    host: str = setting("127.0.0.1", "address to listen on", "HOST", group="server", is_basic=True)
    port: int = setting(8000, "port to listen on; 0: any free one", most=MAX_PORT, is_basic=True)
    uds: str | None = setting(None, "Unix socket to listen on, instead of a TCP port", "PATH")
    ssl_certfile: str | None = setting(
        None, "PEM file with the certificate chain; enables https", "FILE", is_basic=True
    )
    ssl_keyfile: str | None = setting(
        None,
        "PEM file with the certificate's private key (default: the certificate's file)",
        "FILE",
        is_basic=True,
    )
    prewarm: str | None = setting(
        None, "JSON Lines file of prompts to cache before the server starts to listen", "FILE"
    )
    drain_seconds: float = setting(
        30.0, "time limit for running requests to finish after SIGTERM", "S", most=1e6
    )
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        """Check every option."""
        check_settings(self)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise InvalidRequest("ssl_keyfile needs ssl_certfile", param="ssl_keyfile")


RAY_OPTIONS = (
    "min_replicas", "max_replicas", "scale_down_seconds", "replica_cpus", "replica_gpus",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """Options of replicas: processes that compute for this server (`foretoken replica`).

    Raises `InvalidRequest` for options that need a front.
    """

    front: str | None = setting(
        None,
        "address on which to accept replicas (foretoken replica MODEL --front ADDR), which "
        "compute while this process serves HTTP; addresses beyond loopback need "
        "FORETOKEN_CLUSTER_KEY on both sides (default: this process computes)",
        "tcp://HOST:PORT",
        group="replicas",
        is_basic=True,
    )
    ray: bool = setting(
        False,
        "start and supervise the replicas with Ray Serve, on a Ray of this machine or on the "
        "cluster of RAY_ADDRESS; engine flags then apply to the replicas",
    )
    replicas: int | None = setting(
        None,
        "number of replicas to wait for before serving requests; with --ray, number to start (1)",
        least=1,
        most=10_000,
    )
    min_replicas: int | None = setting(
        None, "minimum number of replicas with --ray and --max-replicas (1)", least=1,
        most=10_000,
    )  # fmt: skip
    max_replicas: int | None = setting(
        None, "maximum number of replicas with --ray; their number then follows the load", least=1,
        most=10_000,
    )  # fmt: skip
    scale_down_seconds: float | None = setting(
        None,
        "time of low load before --ray removes a replica (30 s)", "S",
        most=1e6,
    )  # fmt: skip
    replica_cpus: float | None = setting(
        None,
        "number of CPUs and threads of each replica with --ray (an equal share of this machine's)",
        "X",
        least=0.01,
    )
    replica_gpus: float | None = setting(
        None, "number of GPUs of each replica with --ray (1 on cuda, else 0)", "Y"
    )
    route: Literal["kv", "session", "even"] | None = setting(
        None,
        "routing policy: kv (fewest uncached and queued prompt tokens), session (sticky by "
        "x-session-id, else by cache_salt or API key), even (least loaded) (kv)",
    )
    failover_seconds: float | None = setting(
        None,
        "time limit for requests to wait for a replica after the last one is lost (30 s)", "S",
        most=1e6,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check every option."""
        check_settings(self)
        for name in ("replicas", "route", "failover_seconds"):
            if not self.is_given and getattr(self, name) is not None:
                message = f"--{name.replace('_', '-')} needs --front or --ray"
                raise InvalidRequest(message, param=name)
        for name in RAY_OPTIONS:
            if not self.ray and getattr(self, name) is not None:
                raise InvalidRequest(f"--{name.replace('_', '-')} needs --ray", param=name)
        if self.min_replicas is not None and self.max_replicas is None:
            raise InvalidRequest("--min-replicas needs --max-replicas", param="min_replicas")
        least, most = self.bounds
        if least > most:
            message = f"--min-replicas {least} is above --max-replicas {most}"
            raise InvalidRequest(message, param="min_replicas")
        if self.max_replicas is not None and not least <= (self.replicas or least) <= most:
            message = f"--replicas must be from {least} to {most}"
            raise InvalidRequest(message, param="replicas")

    @property
    def is_given(self) -> bool:
        """Whether the model runs in replicas and not in this process."""
        return self.ray or self.front is not None

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of replicas."""
        if self.max_replicas is None:
            return self.replicas or 1, self.replicas or 1
        return self.min_replicas or 1, self.max_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservingOptions:
    """Access log, traces and recorded traffic."""

    access_log: bool = setting(
        False,
        "log one line per request, with tokens and times",
        group="observing",
        is_basic=True,
    )
    tracing: bool = setting(
        False,
        "export traces with OpenTelemetry to the collector in OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    otlp_endpoint: str | None = setting(
        None, "address of the OTLP/HTTP collector that receives traces", "URL"
    )
    trace_steps: float = setting(
        0.0, "fraction of the engine's steps to trace, from 0 to 1", "RATE", most=1
    )
    record_traffic: str | None = setting(
        None,
        "folder in which to record token ids of finished requests, for training a draft model "
        "(default: not recorded); its files contain the conversations",
        "DIR",
    )
    record_requests: str | None = setting(
        None,
        "folder in which to record finished requests with parameters and seeds, for foretoken "
        "replay (default: not recorded); its files contain the conversations",
        "DIR",
    )
    record_redact: str | None = setting(
        None,
        "function that gets each text of a request and returns the text to record; a record whose "
        "texts it changes has no token ids",
        "MODULE:FUNCTION",
    )
    record_keys: tuple[str, ...] = setting(
        (),
        "API key whose requests are recorded; required with --api-key; repeatable",
        "KEY",
        flag="record_key",
        is_secret=True,
    )
    record_bytes: int | None = setting(
        None, "maximum size of the records in a folder (1GiB)", SIZE, least=1
    )

    def __post_init__(self) -> None:
        """Check every option and the options that it requires."""
        check_settings(self)
        records = self.record_traffic is not None or self.record_requests is not None
        if not records and (self.record_keys or self.record_bytes is not None):
            message = "--record-key and --record-bytes need --record-traffic or --record-requests"
            raise InvalidRequest(message, param="record_traffic")
        if self.record_redact is not None and self.record_requests is None:
            message = "--record-redact needs --record-requests"
            raise InvalidRequest(message, param="record_redact")
        if self.trace_steps and not self.tracing and self.otlp_endpoint is None:
            message = "--trace-steps needs --tracing or --otlp-endpoint"
            raise InvalidRequest(message, param="trace_steps")
        if self.otlp_endpoint is not None and not _is_url(self.otlp_endpoint):
            message = "otlp_endpoint must be a URL such as http://127.0.0.1:4318"
            raise InvalidRequest(message, param="otlp_endpoint")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
