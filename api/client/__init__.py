"""`Client` and `AsyncClient`: the HTTP API from Python, with what foretoken adds to it."""

from ..openai.wire import Model
from ..types.results import CallDelta, ToolCall
from .answers import (
    Branch,
    BranchesAnswer,
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    CompletionDelta,
    TextAnswer,
    TextChoice,
    message_from,
)
from .blocking import Client
from .errors import KeyRefused, ServerFailed, Unreachable
from .nonblocking import AsyncClient
from .options import CacheOptions, ChatOptions, CompleteOptions, PromptCacheOptions

__all__ = [
    "AsyncClient",
    "Branch",
    "BranchesAnswer",
    "CacheOptions",
    "CallDelta",
    "ChatAnswer",
    "ChatChoice",
    "ChatDelta",
    "ChatOptions",
    "Client",
    "CompleteOptions",
    "CompletionDelta",
    "KeyRefused",
    "Model",
    "PromptCacheOptions",
    "ServerFailed",
    "TextAnswer",
    "TextChoice",
    "ToolCall",
    "Unreachable",
    "message_from",
]
