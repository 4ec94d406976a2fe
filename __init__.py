"""foretoken: an async LLM inference engine with speculative decoding at its centre."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__
from .core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    Unavailable,
)

if TYPE_CHECKING:
    from .api.sdk.async_llm import AsyncLLM
    from .api.sdk.llm import LLM
    from .api.types.results import (
        Choice,
        Completion,
        Decision,
        Decisions,
        Embedding,
        RankedDocument,
        TextDelta,
        ToolCall,
    )
    from .api.types.sampling_params import SamplingParams
    from .api.types.verdict import Verdict
    from .core.interface.request import Usage

__all__ = [
    "LLM",
    "AsyncLLM",
    "Choice",
    "Completion",
    "DeadlineExceeded",
    "Decision",
    "Decisions",
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
    "Unavailable",
    "Usage",
    "Verdict",
    "__version__",
]

_HOMES = {
    "LLM": ".api.sdk.llm",
    "AsyncLLM": ".api.sdk.async_llm",
    "SamplingParams": ".api.types.sampling_params",
    "Usage": ".core.interface.request",
    "Verdict": ".api.types.verdict",
}
_RESULTS = ".api.types.results"

if not TYPE_CHECKING:  # a checker must see the names above alone

    def __getattr__(name: str) -> object:
        """Import a public name at its first use: the command line starts without the SDK."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES.get(name, _RESULTS), __name__), name)
        return value

    def __dir__() -> list[str]:
        """Return the names of the module, those that are not imported yet, too."""
        return sorted({*globals(), *__all__})
