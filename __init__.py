"""foretoken: an async LLM inference engine with speculative decoding at its centre."""

from ._version import __version__
from .api.sdk.async_llm import AsyncLLM
from .api.sdk.llm import LLM
from .api.types.results import (
    Choice,
    Completion,
    Embedding,
    RankedDocument,
    TextDelta,
    ToolCall,
)
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

__all__ = [
    "LLM",
    "AsyncLLM",
    "Choice",
    "Completion",
    "DeadlineExceeded",
    "Embedding",
    "EngineDead",
    "ForetokenError",
    "InvalidRequest",
    "ModelLoadError",
    "PromptTooLong",
    "QueueFull",
    "RankedDocument",
    "SamplingParams",
    "TextDelta",
    "ToolCall",
    "Usage",
    "__version__",
]
