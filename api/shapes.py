"""Parts of OpenAI's bodies that several routes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from uuid import uuid4

from .._version import __version__
from ..core.interface.request import Usage
from ..core.interface.step import TokenLogprob
from .tokenizer import Tokenizer

Body = dict[str, object]
FINGERPRINT = f"foretoken-{__version__}"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all chunks of one answer have in common."""

    prefix: str
    model: str
    created: int = field(default_factory=lambda: int(time()))
    key: str = field(default_factory=lambda: uuid4().hex)

    @property
    def id(self) -> str:
        """Id of the answer, and of the request inside the engine."""
        return f"{self.prefix}-{self.key}"

    def body(self, kind: str, choices: Sequence[Body]) -> Body:
        """An answer, or a chunk of it."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


def usage_body(usage: Usage) -> Body:
    """``usage``, with what the cache, a prediction and speculation saved."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
        "closed_early": usage.closed_early,
        "speculation": speculation_body(usage),
    }


def speculation_body(usage: Usage) -> Body:
    """What was drafted, by whom, and how much of it was right."""
    steps = sorted(usage.steps_by_accepted.items())
    return {
        "proposed_tokens": usage.proposed_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "verify_steps": usage.verify_steps,
        "accepted_by_source": usage.accepted_by_source,
        "proposed_by_source": usage.proposed_by_source,
        "steps_by_accepted": {str(accepted): count for accepted, count in steps},
    }


def reason_body(reason: str) -> str:
    """OpenAI knows no "abort": an answer that its deadline cut short is one of limited length.

    Its ``stop_reason`` says "deadline". Clients check ``finish_reason`` against a closed list.
    """
    return "length" if reason == "abort" else reason


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> Body:
    """``logprobs`` of a chat choice: one entry per token, with its bytes."""
    content = [
        {
            **_entry(tokenizer, each.token_id, each.logprob),
            "top_logprobs": [_entry(tokenizer, *top) for top in each.top],
        }
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> Body:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(data),
    }


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a JSON key: pieces of a character are written as bytes, so that keys differ."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in data)


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    # Not max(): it gives a NaN back.
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
