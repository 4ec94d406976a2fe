"""Limits on connections and requests; each is a flag of ``serve``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...core.errors import InvalidRequest
from ...core.interface.sampling import MAX_BIASED_TOKENS, MAX_LOGPROBS
from ...core.options.settings import SIZE, check_settings, setting
from ..parsing.output_format import MAX_TOOLS
from ..types.sampling_params import MAX_N, MAX_STOP_BYTES, num_stop_bytes

MAX_COUNT = 2**31 - 1
MAX_SECONDS = 1e6
MAX_FILE_SECONDS = 1e9
LISTED = {  # field of a body -> the limit on its entries
    "messages": "max_messages",
    "input": "max_messages",
    "tools": "max_tools",
    "logit_bias": "max_logit_bias",
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
    """One bound each: ``*_seconds`` are deadlines, ``*_bytes`` sizes, the others counts.

    What the core bounds for every caller can only be made stricter here: `InvalidRequest` names a
    limit that is out of its range.
    """

    # a connection
    max_connections: int = _count(
        1024, "open connections; further ones get 503, except for /health", group="limits"
    )
    max_header_bytes: int = _bytes(64 * 2**10, "size of a request line and its header", least=1024)
    max_header_fields: int = _count(100, "header fields of a request", least=8)
    header_seconds: float = _seconds(10.0, "time for a header to arrive")
    body_seconds: float = _seconds(30.0, "time for a body to arrive")
    idle_seconds: float = _seconds(75.0, "time that a connection may be idle")
    write_seconds: float = _seconds(30.0, "time that a client may read nothing of its answer")
    ping_seconds: float = _seconds(10.0, "time between keep-alive comments of a stream")
    max_request_seconds: float = _seconds(600.0, "time for a request, from its arrival to its end")
    resume_seconds: float = _seconds(
        0.0, "time to resume a broken stream with Last-Event-ID; 0: off", least=0
    )
    store_seconds: float = _seconds(3600.0, "time that a response is kept after its last use")
    # a body
    max_body_bytes: int = _bytes(4 * 2**20, "size of a body")
    max_bodies_bytes: int = _bytes(
        2**28, "size of all bodies that arrive at the same time, uploads aside"
    )
    max_file_bytes: int = _bytes(64 * 2**20, "size of an uploaded file")
    max_files_bytes: int = _bytes(
        2**30, "size of all files of batches together, those that arrive included"
    )
    max_files: int = _count(10_000, "files of batches")
    max_batches: int = _count(
        1_000, "batches that are kept; the oldest ended one makes room for a new one"
    )
    file_seconds: float = setting(
        30.0 * 24 * 3600,
        "time that a file and an ended batch are kept",
        "S",
        least=1,
        most=MAX_FILE_SECONDS,
    )
    max_json_depth: int = _count(64, "nesting of arrays and objects in a body", least=8, most=500)
    max_json_containers: int = _count(2**16, "arrays and objects in a body")
    max_json_values: int = _count(2**19, "values in a body; each token id of a prompt is one")
    max_messages: int = _count(10_000, "messages of a conversation")
    max_tools: int = _count(512, "tools of a request", most=MAX_TOOLS)
    max_prompts: int = _count(64, "prompts of a request")
    max_n: int = _count(MAX_N, "answers to one prompt", most=MAX_N)
    max_stop_bytes: int = _bytes(
        16 * 2**10, "size of all stop strings of a request together", most=MAX_STOP_BYTES
    )
    max_logit_bias: int = _count(
        MAX_BIASED_TOKENS, "entries of logit_bias", least=0, most=MAX_BIASED_TOKENS
    )
    max_top_logprobs: int = _count(
        MAX_LOGPROBS, "log-probabilities reported for a token", least=0, most=MAX_LOGPROBS
    )

    def __post_init__(self) -> None:
        """Check each against its range."""
        check_settings(self)

    def named(self, name: str) -> str:
        """Return a limit as an error message names it: value and flag."""
        return f"{getattr(self, name):.12g} (--{name.replace('_', '-')})"

    def check(self, param: str, found: int, name: str) -> None:
        """Raise `InvalidRequest` for a field that has more than the limit of this name."""
        if found > getattr(self, name):
            message = f"{param}: {found} exceeds this server's limit of {self.named(name)}"
            raise InvalidRequest(message, param=param)

    def check_body(self, body: object) -> None:
        """Raise `InvalidRequest` for a decoded body, of any route, that exceeds a limit."""
        for param, name in LISTED.items():
            value = getattr(body, param, None)
            if value and isinstance(value, (list, dict)) and not _is_ids(value):
                self.check(param, len(value), name)
        for param, name in NUMBERS.items():
            value = getattr(body, param, None)
            if type(value) is int:  # ``logprobs`` of a conversation is a bool
                self.check(param, value, name)
        for param in STOPS:
            if value := getattr(body, param, None):
                texts = [value] if isinstance(value, str) else value
                self.check(param, num_stop_bytes(texts), "max_stop_bytes")
        self.check("prompt", _num_prompts(getattr(body, "prompt", None)), "max_prompts")


def _num_prompts(prompt: object) -> int:
    """Number of prompts: a list of token ids is one."""
    return len(prompt) if isinstance(prompt, list) and prompt and not _is_ids(prompt) else 1


def _is_ids(value: Collection[object]) -> bool:
    """Whether this is a list of token ids, which is one prompt."""
    return isinstance(value, list) and isinstance(value[0], int)
