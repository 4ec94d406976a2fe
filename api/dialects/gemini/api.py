"""GEMINI: the routes of Google's Gemini API."""

from __future__ import annotations

from ...serving.dialect import Api
from .routes import CountTokens, GeminiModelRoutes, GenerateContent, StreamGenerateContent

KEY = b"x-goog-api-key"
GEMINI = Api(
    prefix="/v1beta",
    dialects=(GenerateContent, StreamGenerateContent, CountTokens),
    endpoints=(GeminiModelRoutes,),
    header=KEY,
    moved=("/v1/models", "/v1beta/models"),  # newer clients use version v1
    key_headers=(KEY,),
    key_parameter="key",
)
