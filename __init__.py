"""foretoken: an async LLM inference engine with speculative decoding at its centre."""

from typing import TYPE_CHECKING

from ._version import __version__
from .api.sdk.async_llm import AsyncLLM
from .api.sdk.llm import LLM
from .api.types.results import Choice, Completion, TextDelta, ToolCall
from .api.types.sampling_params import SamplingParams
from .core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
)
from .core.interface.request import Usage

if TYPE_CHECKING:
    from .api.client import AsyncClient, Client

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "Choice",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "EngineDead",
    "ForetokenError",
    "InvalidRequest",
    "ModelLoadError",
    "PromptTooLong",
    "QueueFull",
    "SamplingParams",
    "TextDelta",
    "ToolCall",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    """The clients bring httpx, which takes longer to import than all the rest."""
    if name not in ("AsyncClient", "Client"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .api import client

    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
