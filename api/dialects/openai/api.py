"""OPENAI: the routes of OpenAI's API, and other routes with the same error format."""

from __future__ import annotations

from ...serving.dialect import Api
from ..batches.routes import BatchRoutes, FileRoutes
from ..decisions.routes import DecisionsRoute
from ..pooled.generative import GenerativeScoringRoute
from ..pooled.routes import EmbeddingsRoute, RerankRoute, ScoreRoute
from ..responses.routes import (
    CompactRoute,
    KeptResponses,
    ResponsesCount,
    ResponsesRender,
    ResponsesRoute,
)
from ..verifying.routes import ChatVerify, CompletionsVerify
from .routes import ChatRender, ChatRoute, CompletionsRender, CompletionsRoute

OPENAI = Api(
    prefix="/v1",
    dialects=(
        ChatRoute,
        CompletionsRoute,
        EmbeddingsRoute,
        RerankRoute,
        ScoreRoute,
        GenerativeScoringRoute,
        DecisionsRoute,
        ResponsesRoute,
        ChatRender,
        CompletionsRender,
        ResponsesCount,
        ResponsesRender,
        CompactRoute,
        ChatVerify,
        CompletionsVerify,
    ),
    endpoints=(KeptResponses, FileRoutes, BatchRoutes),
)
