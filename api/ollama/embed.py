"""POST /api/embed and /api/embeddings: vectors of texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from ..runtime.pooled.embedder import Embedder, unit_vector
from ..runtime.pooled.pooled_prompts import Pooled, PooledPrompts, entry_names, pool_params
from ..serving.dialect import Dialect
from ..serving.pooled import PooledReply
from ..serving.serving_context import Service
from ..serving.sse import ReadyReply, Reply
from ..types.results import batch_usage
from .errors import ERRORS
from .models import own_name
from .protocol import Embedded, EmbeddedOne
from .schema import OllamaEmbedBody, OllamaEmbeddingsBody, OllamaPooledBody
from .writer import NANO

B = TypeVar("B", bound=OllamaPooledBody)


class OllamaPooled(Dialect[B]):
    """Checks and the form of errors, shared by both routes."""

    error_form = ERRORS

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._embedder = Embedder(service.llm)

    def check(self, body: B) -> None:
        """Check the model, which may have the tag "latest"."""
        self.service.check_model(own_name(self.service, body.model))

    def prompts(
        self, texts: Sequence[str], body: B, *, name: str, is_cut: bool, dimensions: int | None
    ) -> PooledPrompts:
        """Open texts; ``name``: the field that has them. Raises `InvalidRequest`."""
        params = pool_params(
            cache_salt=None if body.options is None else body.options.cache_salt,
            deadline=None if body.deadline_ms is None else body.deadline_ms / 1000,
        )
        names = entry_names(name, len(texts))
        return self._embedder.open(texts, params, dimensions, name=names, is_cut=is_cut)


class OllamaEmbed(OllamaPooled[OllamaEmbedBody]):
    """Return a vector of each text."""

    path = "/api/embed"
    body = OllamaEmbedBody
    answer = Embedded

    async def open(self, body: OllamaEmbedBody) -> Reply:
        """Open all texts; they are tokenised and computed when the answer is read."""
        texts = [body.input] if isinstance(body.input, str) else body.input or []
        began, model = time.monotonic(), self.service.model

        def embedded(pooled: Sequence[Pooled]) -> Embedded:
            return Embedded(
                model=model,
                embeddings=[unit_vector(p.numbers, body.dimensions).tolist() for p in pooled],
                total_duration=int((time.monotonic() - began) * NANO),
                prompt_eval_count=batch_usage([p.usage for p in pooled]).prompt_tokens,
            )

        if texts in ([], [""]):
            return ReadyReply(embedded([]))
        is_cut = body.truncate is not False
        prompts = self.prompts(texts, body, name="input", is_cut=is_cut, dimensions=body.dimensions)
        return PooledReply(prompts, embedded)


class OllamaEmbeddings(OllamaPooled[OllamaEmbeddingsBody]):
    """Return a vector of one text."""

    path = "/api/embeddings"
    body = OllamaEmbeddingsBody
    answer = EmbeddedOne

    async def open(self, body: OllamaEmbeddingsBody) -> Reply:
        """Open the text; it is tokenised and computed when the answer is read."""
        if not body.prompt:
            return ReadyReply(EmbeddedOne(embedding=[]))
        prompts = self.prompts([body.prompt], body, name="prompt", is_cut=True, dimensions=None)
        return PooledReply(
            prompts, lambda pooled: EmbeddedOne(embedding=unit_vector(pooled[0].numbers).tolist())
        )
