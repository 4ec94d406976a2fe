"""GEMINI: the routes of Google's Gemini API."""

from __future__ import annotations

from ...serving.dialect import Api
from .answers import ERRORS
from .routes import CountTokens, GeminiModelRoutes, GenerateContent, StreamGenerateContent

GEMINI = Api(
    prefix="/v1beta",
    dialects=(GenerateContent, StreamGenerateContent, CountTokens),
    endpoints=(GeminiModelRoutes,),
    error_form=ERRORS,
    key_headers=(b"x-goog-api-key",),
    key_parameter="key",
)
