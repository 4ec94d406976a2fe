"""Answers of the routes for vectors and scores."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PooledPromptDetails(Struct, kw_only=True):
    """``usage.prompt_tokens_details`` of prompts without an answer."""

    cached_tokens: int


class PooledUsage(Struct, kw_only=True):
    """``usage`` of prompts without an answer."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PooledPromptDetails


class EmbeddingBody(Struct, kw_only=True):
    """The vector of one input, of length 1; as base64 its numbers are little-endian float32."""

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
    """A document's place in the request, and its score from 0 to 1."""

    index: int
    relevance_score: float
    document: DocumentBody | UnsetType = UNSET  # unless return_documents is false


class RerankBody(Struct, kw_only=True):
    """Answer of /v1/rerank, /v2/rerank and /rerank: the best document first."""

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
