"""ANTHROPIC: the routes of Anthropic's API."""

from __future__ import annotations

from ...serving.dialect import Api
from .routes import MessagesCount, MessagesRender, MessagesRoute

ANTHROPIC = Api(
    prefix="/v1/messages",
    dialects=(MessagesRoute, MessagesCount, MessagesRender),
    header=b"anthropic-version",
    id_header=b"request-id",
)
