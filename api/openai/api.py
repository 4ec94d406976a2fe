"""OPENAI: the routes of OpenAI's API, and others in its form."""

from __future__ import annotations

from ..serving.dialect import Api
from .batches.route import BatchRoutes, FileRoutes
from .chat import ChatRender, ChatRoute
from .completions import CompletionsRender, CompletionsRoute
from .embeddings import EmbeddingsRoute
from .rerank import RerankRoute, ScoreRoute
from .responses.route import KeptResponses, ResponsesCount, ResponsesRender, ResponsesRoute

OPENAI = Api(
    prefix="/v1",
    dialects=(
        ChatRoute,
        CompletionsRoute,
        EmbeddingsRoute,
        RerankRoute,
        ScoreRoute,
        ResponsesRoute,
        ChatRender,
        CompletionsRender,
        ResponsesCount,
        ResponsesRender,
    ),
    endpoints=(KeptResponses, FileRoutes, BatchRoutes),
)
