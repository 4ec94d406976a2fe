"""Compaction in all APIs: the server's seal, and errors for long prompts and broken seals."""

from __future__ import annotations

from ...core.errors import InvalidRequest, PromptTooLong
from ..runtime.compaction.seal import BrokenSeal, Seal
from ..runtime.compaction.summarizer import Summarizer
from .serving_context import Service


def seal_of(service: Service) -> Seal:
    """Return the seal that all routes of a server share."""
    found: Seal = service.shared.setdefault(Seal, Seal(service.settings.seal_key or ""))
    return found


def summarizer_of(service: Service) -> Summarizer:
    """Return a summarizer of the server's model."""
    return Summarizer(service.llm, service.chat)


def opened(seal: Seal, owner: bytes, text: str, path: str) -> bytes:
    """Return the data in a sealed text, the field ``path`` of a body.

    Raises `InvalidRequest`, which names the field, for a broken seal.
    """
    try:
        return seal.open(owner, text)
    except BrokenSeal:
        message = (
            f"{path} was altered, or was sealed for another API key or cache_salt, or by a server "
            "with another --seal-key"
        )
        raise InvalidRequest(message, param=path) from None


def explain_compaction(
    error: PromptTooLong, num_left: int | None, summarizer: Summarizer, *, how: str
) -> None:
    """Add to the error's message how many prompt tokens a compaction would leave.

    ``num_left``: tokens of the prompt without the part that a summary would replace; None if there
    is no such part. ``how``: names of the fields or the route that compact a conversation.
    """
    if num_left is None:
        text = "Compaction cannot shorten it: it has no earlier turns."
    else:
        text = (
            f"Compaction ({how}) would leave {num_left} tokens and a summary of at most "
            f"{summarizer.max_tokens}."
        )
    error.args = (f"{error} {text}",)
