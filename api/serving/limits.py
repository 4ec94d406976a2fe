"""Limits on connections and requests. Each is a flag of ``serve``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ...core.errors import InvalidRequest
from ...core.interface.sampling import MAX_BIASED_TOKENS, MAX_LOGPROBS
from ...core.options.settings import SIZE, check_settings, setting
from ..parsing.output_format import MAX_TOOLS
from ..types.sampling_params import MAX_N, MAX_STOP_BYTES, num_stop_bytes

MAX_COUNT = 2**31 - 1
MAX_SECONDS = 1e6
MAX_FILE_SECONDS = 1e9
LISTED = {  # body field -> limit on its number of entries
    "messages": "max_messages",
    "input": "max_messages",
    "tools": "max_tools",
    "logit_bias": "max_logit_bias",
    "prompt": "max_prompts",  # a list of token ids is one prompt
}
NUMBERS = {"n": "max_n", "logprobs": "max_top_logprobs", "top_logprobs": "max_top_logprobs"}
STOPS = ("stop", "stop_sequences")


def _count(
    default: int, help: str, *, least: int = 1, most: int = MAX_COUNT, group: str = ""
) -> int:
    return setting(default, help, least=least, most=most, group=group)


def _seconds(default: float, help: str, *, least: float = 0.001) -> float:
    return setting(default, help, "S", least=least, most=MAX_SECONDS)


def _bytes(default: int, help: str, *, least: int = 1, most: int = MAX_COUNT) -> int:
    return setting(default, help, SIZE, least=least, most=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits by unit: ``*_seconds`` are timeouts, ``*_bytes`` sizes, the others counts.

    A limit can be stricter but not looser than the engine's own. A value out of range raises
    `InvalidRequest`, which names the limit.
    """

    # limits of connections
    max_connections: int = _count(
        1024,
        "maximum number of open connections; further ones get 503, except for /health",
        group="limits",
    )
    max_header_bytes: int = _bytes(
        64 * 2**10, "maximum size of a request line and its headers", least=1024
    )
    max_header_fields: int = _count(100, "maximum number of header fields of a request", least=8)
    header_seconds: float = _seconds(10.0, "time limit for the headers to arrive")
    body_seconds: float = _seconds(30.0, "time limit for the body to arrive")
    idle_seconds: float = _seconds(75.0, "time after which an idle connection is closed")
    write_seconds: float = _seconds(30.0, "time limit for a client that does not read its answer")
    ping_seconds: float = _seconds(10.0, "interval between keep-alive comments in a stream")
    max_request_seconds: float = _seconds(
        600.0, "time limit for a request, from its arrival to its end"
    )
    resume_seconds: float = _seconds(
        0.0, "time during which a broken stream can be resumed with Last-Event-ID; 0: off", least=0
    )
    store_seconds: float = _seconds(3600.0, "time to keep a stored response after its last use")
    # limits of bodies
    max_body_bytes: int = _bytes(4 * 2**20, "maximum size of a body")
    max_bodies_bytes: int = _bytes(
        2**28, "maximum total size of bodies in transit, except for uploads"
    )
    max_file_bytes: int = _bytes(64 * 2**20, "maximum size of an uploaded file")
    max_files_bytes: int = _bytes(
        2**30, "maximum total size of batch files, including uploads in progress"
    )
    max_files: int = _count(10_000, "maximum number of batch files")
    max_batches: int = _count(
        1_000, "maximum number of batches; a new one replaces the oldest that has ended"
    )
    file_seconds: float = setting(
        30.0 * 24 * 3600,
        "time to keep files and ended batches",
        "S",
        least=1,
        most=MAX_FILE_SECONDS,
    )
    max_json_depth: int = _count(64, "maximum nesting depth of a JSON body", least=8, most=500)
    max_json_containers: int = _count(2**16, "maximum number of arrays and objects in a body")
    max_json_values: int = _count(
        2**19, "maximum number of values in a body; each token id of a prompt counts"
    )
    max_messages: int = _count(10_000, "maximum number of messages in a conversation")
    max_tools: int = _count(512, "maximum number of tools", most=MAX_TOOLS)
    max_prompts: int = _count(64, "maximum number of prompts in a request")
    max_n: int = _count(MAX_N, "maximum number of answers to one prompt", most=MAX_N)
    max_stop_bytes: int = _bytes(
        16 * 2**10, "maximum total size of a request's stop strings", most=MAX_STOP_BYTES
    )
    max_logit_bias: int = _count(
        MAX_BIASED_TOKENS, "maximum number of logit_bias entries", least=0, most=MAX_BIASED_TOKENS
    )
    max_top_logprobs: int = _count(
        MAX_LOGPROBS,
        "maximum number of log-probabilities reported for a token",
        least=0,
        most=MAX_LOGPROBS,
    )

    def __post_init__(self) -> None:
        """Check each limit against its range."""
        check_settings(self)

    def named(self, name: str) -> str:
        """Return the value and the flag of a limit, for an error message."""
        return f"{getattr(self, name):.12g} (--{name.replace('_', '-')})"

    def check(self, param: str, found: int, name: str) -> None:
        """Raise `InvalidRequest` if the count of a field exceeds the limit ``name``."""
        if found > getattr(self, name):
            message = f"{param}: {found} exceeds this server's limit of {self.named(name)}"
            raise InvalidRequest(message, param=param)

    def check_body(self, body: object) -> None:
        """Raise `InvalidRequest` if a decoded body of any route exceeds a limit."""
        for param in limited(type(body)):  # type: ignore[arg-type]  # types are hashable
            value = getattr(body, param)
            if value is None or value is False:
                continue
            if param in LISTED:
                is_ids = type(value) is list and value and type(value[0]) is int
                if not is_ids and isinstance(value, (list, dict)):
                    self.check(param, len(value), LISTED[param])
            elif param in STOPS:
                texts = [value] if isinstance(value, str) else value
                self.check(param, num_stop_bytes(texts), "max_stop_bytes")
            elif type(value) is int:  # ``logprobs`` of a chat request is a bool
                self.check(param, value, NUMBERS[param])


@cache
def limited(kind: type) -> tuple[str, ...]:
    """Return the fields of a kind of body that have limits, in the order of the checks."""
    return tuple(each for each in (*LISTED, *NUMBERS, *STOPS) if hasattr(kind, each))
