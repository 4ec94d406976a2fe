"""foretoken: an async LLM inference engine with speculative decoding at its centre."""

from ._version import __version__
from .api.results import Choice, Completion, TextDelta
from .api.sdk import AsyncLLM
from .api.sync import LLM
from .core.errors import (
    EngineDead,
    ForetokenError,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
)
from .core.params import SamplingParams
from .core.request import Usage

__all__ = [
    "LLM",
    "AsyncLLM",
    "Choice",
    "Completion",
    "EngineDead",
    "ForetokenError",
    "InvalidRequest",
    "ModelLoadError",
    "PromptTooLong",
    "QueueFull",
    "SamplingParams",
    "TextDelta",
    "Usage",
    "__version__",
]
