"""Answers of the routes for vectors and scores."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PooledPromptDetails(Struct, kw_only=True):
    """``usage.prompt_tokens_details`` of requests that generate nothing."""

    cached_tokens: int


class PooledUsage(Struct, kw_only=True):
    """``usage`` of requests that generate nothing."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PooledPromptDetails
    cost: float | UnsetType = UNSET  # only with --prices


class EmbeddingBody(Struct, kw_only=True):
    """The unit vector of one input. In base64 it is little-endian float32 by default."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsBody(Struct, kw_only=True):
    """Answer of /v1/embeddings."""

    object: str = "list"
    data: list[EmbeddingBody]
    model: str
    usage: PooledUsage


class DocumentBody(Struct, kw_only=True):
    """A document of the request."""

    text: str


class RankBody(Struct, kw_only=True):
    """A document's index in the request, and its score from 0 to 1."""

    index: int
    relevance_score: float
    document: DocumentBody | UnsetType = UNSET  # unless return_documents is false


class RerankBody(Struct, kw_only=True):
    """Answer of /v1/rerank, /v2/rerank and /rerank: best document first."""

    id: str
    model: str
    results: list[RankBody]
    usage: PooledUsage


class ScoreBody(Struct, kw_only=True):
    """The score of one pair, from 0 to 1."""

    object: str = "score"
    index: int
    score: float


class ScoresBody(Struct, kw_only=True):
    """Answer of /v1/score, in the order of the request."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreBody]
    usage: PooledUsage
