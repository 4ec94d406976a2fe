"""POST /generative_scoring: vLLM's scores of items by the next token."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import partial
from time import time
from typing import Annotated

from msgspec import Meta

from ....core.errors import InvalidRequest
from ....core.interface.sampling import MAX_LISTED, Pooling, beyond_vocabulary
from ...runtime.pooled.pooled_prompts import Pooled, PooledPrompts, entry_names
from ...serving.dialect import Dialect
from ...serving.pooled import PooledReply
from ...serving.sampling import Count
from ...serving.sse import Reply
from ...types.request_context import random_id
from .answers import ScoreBody, ScoresBody
from .bodies import MAX_INPUTS, PooledRequest
from .reading import cache_of, params_of
from .writing import usage_body

LabelIds = Annotated[list[Count], Meta(min_length=1, max_length=MAX_LISTED)]
Ids = list[Count]


class GenerativeScoringRequest(PooledRequest, kw_only=True):
    """Body of /generative_scoring: texts, or token ids in both fields."""

    query: str | Ids
    items: list[str | Ids]
    label_token_ids: LabelIds
    apply_softmax: bool | None = None  # true by default
    item_first: bool | None = None


def score_of_first(numbers: array[float], *, among_labels: bool) -> float:
    """Return the probability of the first label.

    ``among_labels``: normalise over the labels, not over the vocabulary. ``numbers``: the
    log-probabilities of the labels.
    """
    first = math.exp(numbers[0])
    if not among_labels:
        return first
    highest = max(numbers)
    return math.exp(numbers[0] - highest) / math.fsum(math.exp(each - highest) for each in numbers)


class GenerativeScoringRoute(Dialect[GenerativeScoringRequest]):
    """Return the probability that the first label is the next token after a query and an item."""

    path = "/generative_scoring"
    body = GenerativeScoringRequest
    answer = ScoresBody

    async def open(self, body: GenerativeScoringRequest) -> Reply:
        """Check the labels and items. Prompts are computed when the reply is read.

        Raises `InvalidRequest`, which names the field.
        """
        llm, params, labels = self.service.llm, params_of(body), body.label_token_ids
        if problem := beyond_vocabulary("label_token_ids", labels, llm.built.vocab_size):
            raise InvalidRequest(problem, param="label_token_ids")
        if not 0 < len(body.items) <= MAX_INPUTS:
            raise InvalidRequest(f"items must have 1 to {MAX_INPUTS} entries", param="items")
        prompts = [_joined(body, index) for index in range(len(body.items))]
        name, pooling = entry_names("items", len(prompts)), Pooling((*labels,), is_normalized=True)

        async def prompt_of(index: int) -> Sequence[int]:
            return await llm.check(prompts[index], params, pooling=pooling, param=name(index))

        pooled = PooledPrompts(
            llm, len(prompts), prompt_of, params, lambda _: pooling, cache=cache_of(body)
        )
        return PooledReply(pooled, partial(self._answer, body.apply_softmax is not False))

    def _answer(self, among_labels: bool, pooled: Sequence[Pooled]) -> ScoresBody:
        return ScoresBody(
            id=f"score-{random_id()}",
            created=int(time()),
            model=self.service.model,
            data=[
                ScoreBody(
                    index=index, score=score_of_first(each.numbers, among_labels=among_labels)
                )
                for index, each in enumerate(pooled)
            ],
            usage=usage_body(self.service, pooled),
        )


def _joined(body: GenerativeScoringRequest, index: int) -> str | list[int]:
    """Return the prompt of an item. Raises `InvalidRequest` if query and item differ in type."""
    query, item = body.query, body.items[index]
    if isinstance(query, str) and isinstance(item, str):
        return item + query if body.item_first else query + item
    if isinstance(query, list) and isinstance(item, list):
        return [*item, *query] if body.item_first else [*query, *item]
    param = f"items[{index}]"
    raise InvalidRequest(f"{param} must have the type of query: text or token ids", param=param)
