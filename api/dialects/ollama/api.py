"""OLLAMA: the routes of Ollama's API.

Some clients assume that a server with these routes is Ollama.
"""

from __future__ import annotations

from ...serving.dialect import Api
from .models import OllamaModels
from .routes import OllamaChat, OllamaEmbed, OllamaEmbeddings, OllamaGenerate

OLLAMA = Api(
    prefix="/api",
    dialects=(OllamaChat, OllamaGenerate, OllamaEmbed, OllamaEmbeddings),
    endpoints=(OllamaModels,),
    is_served=lambda settings: settings.ollama,
)
