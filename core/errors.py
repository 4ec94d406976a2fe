"""Errors that foretoken raises on purpose.

ForetokenError
├── InvalidRequest (also a ValueError)   a field of the request is wrong; ``param`` names it
│   └── PromptTooLong                    the prompt does not fit the context or the KV pool
├── QueueFull                            the waiting queue is full; ``retry_after`` seconds
├── DeadlineExceeded                     the deadline passed in the queue; ``retry_after`` seconds
├── Unavailable                          nothing can compute now; ``retry_after`` seconds
├── EngineDead                           steps failed; the engine no longer takes requests
├── RankLost                             a process of a tensor parallel model is gone
└── ModelLoadError                       a checkpoint is missing something or is unsupported
"""

from __future__ import annotations

import re
from typing import ClassVar

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "out of memory",
    "ALLOC_FAILED",
)


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether a computation failed for lack of memory; torch reports it in several ways."""
    if isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(failure) for words in _OUT_OF_MEMORY)


def shown(value: object) -> str:
    """Return a value for an error message: a number or a short text itself, else its type."""
    match value:
        case None | bool() | float():
            return repr(value)
        case int() if value.bit_length() <= 64:
            return repr(value)
        case str() if len(value) <= 64:
            return repr(value)
    return f"a value of type {type(value).__name__}"


class ForetokenError(Exception):
    """Base of every error that foretoken raises on purpose.

    ``wire_fields`` names the attributes that reach another process in addition to the message.
    """

    wire_fields: ClassVar[tuple[str, ...]] = ()


class InvalidRequest(ForetokenError, ValueError):  # noqa: N818 - the public contract fixes the name
    """Raised for a request that cannot be served as written; ``param`` names the wrong field."""

    wire_fields: ClassVar[tuple[str, ...]] = ("param",)

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def rename(self, name: str) -> None:
        """Rename the field to the caller's name, also where it is the first word of the message."""
        message, old, self.param = str(self), self.param or "", name
        text = message.removeprefix(old)
        if text != message and not re.match(r"\w", text):
            self.args = (f"{name}{text}",)


class PromptTooLong(InvalidRequest):
    """Raised if the prompt does not fit the model's context or the KV pool."""

    wire_fields = ("param", "num_tokens", "limit", "context")

    def __init__(
        self, num_tokens: int, limit: int, *, param: str = "prompt", context: int | None = None
    ) -> None:
        self.num_tokens, self.limit = num_tokens, limit
        # tokens of the prompt and the answer together
        self.context = limit if context is None else context
        # Agent frameworks recognise a context overflow by exactly these words.
        super().__init__(
            f"prompt is too long: {num_tokens} tokens > {limit} maximum. "
            f"This model's maximum context length is {self.context} tokens. "
            f"The prompt is {num_tokens - limit} tokens too long.",
            param=param,
        )

    def rename(self, name: str) -> None:
        """Rename the field; the message stays."""
        self.param = name


class QueueFull(ForetokenError):  # noqa: N818
    """Raised if the queue has no room; try again after ``retry_after`` seconds."""

    wire_fields = ("retry_after",)

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(ForetokenError):  # noqa: N818
    """Raised if nothing was served before the deadline; try again after ``retry_after`` seconds."""

    wire_fields = ("retry_after",)

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(ForetokenError):  # noqa: N818
    """Raised if nothing can compute the request now; try again after ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(ForetokenError):  # noqa: N818
    """Raised if the engine stopped after failed steps or was shut down, and serves no more."""


class RankLost(ForetokenError):  # noqa: N818
    """Raised if a rank of the model ended, or the ranks no longer compute the same pass.

    No step can succeed any more.
    """


class ModelLoadError(ForetokenError):
    """Raised for a checkpoint that is incomplete, damaged or not supported by foretoken.

    ``may_pass``: a later attempt may succeed, for example if a hub was unreachable.
    """

    wire_fields = ("may_pass",)

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass
