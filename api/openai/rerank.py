"""POST /rerank and /score, also below /v1: how well documents answer a query."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from time import time
from typing import NamedTuple

from msgspec import UNSET

from ...core.errors import InvalidRequest
from ..runtime.pooled.pooled_prompts import Pooled, entry_names
from ..runtime.pooled.reranker import Reranker, ranked, score_of
from ..serving.dialect import Dialect
from ..serving.pooled import PooledReply
from ..serving.serving_context import Service
from ..serving.sse import Reply
from ..types.request_context import random_id
from .pooled import cache_of, params_of, usage_body
from .protocol import DocumentBody, RankBody, RerankBody, ScoreBody, ScoresBody
from .schema import MAX_INPUTS, RerankRequest, ScoreRequest


class RerankRoute(Dialect[RerankRequest]):
    """Return documents with their scores for a query, the best first."""

    path = "/v1/rerank"
    aliases = ("/rerank", "/v2/rerank")
    body = RerankRequest
    answer = RerankBody
    in_batches = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._reranker = Reranker(service.chat, service.llm)

    async def open(self, body: RerankRequest) -> Reply:
        """Open all documents; their prompts are written and computed when it is read.

        Raises `InvalidRequest` for two instructions.
        """
        if None not in (body.instruct, body.instruction):
            message = "the body must not have both instruct and instruction"
            raise InvalidRequest(message, param="instruction")
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        prompts = self._reranker.open(
            [(body.query, text) for text in texts],
            params_of(body),
            body.instruction if body.instruct is None else body.instruct,
            name=entry_names("documents", len(texts)),
            query_name=entry_names("query", 1),
            cache=cache_of(body),
        )
        return PooledReply(prompts, lambda pooled: self._answer(body, texts, pooled))

    def _answer(
        self, body: RerankRequest, texts: Sequence[str], pooled: Sequence[Pooled]
    ) -> RerankBody:
        shows = body.return_documents is not False
        results = [
            RankBody(
                index=index,
                relevance_score=score,
                document=DocumentBody(text=texts[index]) if shows else UNSET,
            )
            for index, score in ranked(pooled, body.top_n)
        ]
        return RerankBody(
            id=f"rerank-{random_id()}",
            model=self.service.model,
            results=results,
            usage=usage_body(pooled),
        )


class ScoreRoute(Dialect[ScoreRequest]):
    """Return the scores of pairs of a query and a document, in their order."""

    path = "/v1/score"
    aliases = ("/score",)
    body = ScoreRequest
    answer = ScoresBody
    in_batches = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._reranker = Reranker(service.chat, service.llm)

    async def open(self, body: ScoreRequest) -> Reply:
        """Open all pairs; their prompts are written and computed when it is read."""
        queries, documents = read_pairs(body)
        count = len(documents.texts)
        prompts = self._reranker.open(
            [*zip(cycle(queries.texts), documents.texts, strict=False)],
            params_of(body),
            body.instruct,
            name=entry_names(documents.param, count),
            query_name=entry_names(queries.param, len(queries.texts)),
            cache=cache_of(body),
        )
        return PooledReply(prompts, self._answer)

    def _answer(self, pooled: Sequence[Pooled]) -> ScoresBody:
        return ScoresBody(
            id=f"score-{random_id()}",
            created=int(time()),
            model=self.service.model,
            data=[
                ScoreBody(index=index, score=score_of(each.numbers))
                for index, each in enumerate(pooled)
            ],
            usage=usage_body(pooled),
        )


class Texts(NamedTuple):
    """Texts of a body, and the field that has them."""

    texts: list[str]
    param: str


def read_pairs(body: ScoreRequest) -> tuple[Texts, Texts]:
    """Queries, one or as many as documents, and documents.

    Raises `InvalidRequest` for fields that are missing, doubled, empty, or of unequal lengths.
    """
    queries, query_param = first = _one_of(body, "query", "text_1")
    documents, param = second = _one_of(body, "documents", "text_2")
    if len(documents) > MAX_INPUTS:
        message = f"{param} must have at most {MAX_INPUTS} texts, not {len(documents)}"
        raise InvalidRequest(message, param=param)
    if not all(queries):
        raise InvalidRequest(f"{query_param} must not be empty", param=query_param)
    if len(queries) not in (1, len(documents)):
        message = (
            f"{query_param} must be one text or {len(documents)}, one for each of {param}, "
            f"not {len(queries)}"
        )
        raise InvalidRequest(message, param=query_param)
    return first, second


def _one_of(body: ScoreRequest, name: str, other: str) -> Texts:
    """The texts of the field that a body has of these two, and its name."""
    given = [each for each in (name, other) if getattr(body, each) is not None]
    if not given:
        raise InvalidRequest(f"the body needs {name} or {other}", param=name)
    if len(given) == 2:
        raise InvalidRequest(f"the body must not have both {name} and {other}", param=name)
    value = getattr(body, given[0])
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise InvalidRequest(f"{given[0]} must not be empty", param=given[0])
    return Texts(texts, given[0])
