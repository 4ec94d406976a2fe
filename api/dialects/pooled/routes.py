"""POST /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from time import time

from msgspec import UNSET

from ....core.errors import InvalidRequest
from ...runtime.pooled.embedder import Embedder
from ...runtime.pooled.pooled_prompts import Pooled, entry_names
from ...runtime.pooled.reranker import Reranker, ranked, score_of
from ...serving.dialect import Dialect
from ...serving.pooled import PooledReply
from ...serving.serving_context import Service
from ...serving.sse import Reply
from ...types.request_context import random_id
from .answers import (
    DocumentBody,
    EmbeddingsBody,
    RankBody,
    RerankBody,
    ScoreBody,
    ScoresBody,
)
from .bodies import EmbeddingsRequest, RerankRequest, ScoreRequest
from .reading import cache_of, params_of, read_inputs, read_pairs
from .writing import embeddings_body, usage_body


class EmbeddingsRoute(Dialect[EmbeddingsRequest]):
    """Return the embedding of each text or each list of token ids."""

    path = "/v1/embeddings"
    body = EmbeddingsRequest
    answer = EmbeddingsBody
    in_batches = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._embedder = Embedder(service.llm)

    async def open(self, body: EmbeddingsRequest) -> Reply:
        """Check all inputs. They are tokenized and computed when the reply is read."""
        inputs = read_inputs(body)
        prompts = self._embedder.open(
            inputs,
            params_of(body),
            body.dimensions,
            name=entry_names("input", len(inputs)),
            cache=cache_of(body),
        )
        return PooledReply(prompts, lambda pooled: embeddings_body(self.service, pooled, body))


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
        """Check all documents. Their prompts are written and computed when the reply is read.

        Raises `InvalidRequest` if both names of the instruction are given.
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
            usage=usage_body(self.service, pooled),
        )


class ScoreRoute(Dialect[ScoreRequest]):
    """Return the scores of pairs of a query and a document, in the order of the request."""

    path = "/v1/score"
    aliases = ("/score",)
    body = ScoreRequest
    answer = ScoresBody
    in_batches = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._reranker = Reranker(service.chat, service.llm)

    async def open(self, body: ScoreRequest) -> Reply:
        """Check all pairs. Their prompts are written and computed when the reply is read."""
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
            usage=usage_body(self.service, pooled),
        )
