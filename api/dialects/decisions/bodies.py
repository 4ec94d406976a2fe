"""Body of /v1/decisions. Decoding validates it."""

from __future__ import annotations

from ...runtime.decisions.questions import Questions
from ...serving.caching.fields import PromptCacheOptions
from ...serving.sampling import Label
from ..pooled.bodies import PooledRequest
from ..responses.bodies import Item


class DecisionsRequest(PooledRequest, kw_only=True):
    """Body of /v1/decisions: an input, and the questions about it."""

    input: str | list[Item]
    questions: Questions
    prompt_cache_key: Label | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    safety_identifier: str | None = None  # ignored
