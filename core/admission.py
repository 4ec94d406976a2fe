"""What a scheduler lets in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .errors import InvalidRequest, PromptTooLong
from .request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step and of the queue, in tokens and requests.

    ``depth_cap``: draft tokens that one request may have in a step, at most.
    """

    max_batch_tokens: int
    max_running: int
    max_queued: int
    max_model_len: int
    vocab_size: int
    depth_cap: int = 64


def check_fits(request: Request, capacity: int) -> None:
    """Raises `PromptTooLong` unless the prompt and one more token fit ``capacity`` tokens."""
    if not request.tokens:
        raise InvalidRequest("prompt must have at least one token", param="prompt")
    if request.prompt_len >= capacity:
        raise PromptTooLong(request.prompt_len, capacity - 1)


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Raises `InvalidRequest` for ids outside the vocabulary: a negative one would wrap round."""
    params = request.sampling.params
    fields: dict[str, Collection[int]] = {
        "prompt": request.tokens,
        "prediction": request.prediction or (),
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for param, ids in fields.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            message = f"{param} holds a token id outside 0..{vocab_size - 1}"
            raise InvalidRequest(message, param=param)
