"""POST /v1/embeddings: vectors of texts or token ids."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from ...core.errors import InvalidRequest
from ..runtime.pooled.embedder import Embedder, unit_vector
from ..runtime.pooled.pooled_prompts import Pooled, entry_names
from ..runtime.preprocess import Prompt
from ..serving.dialect import Dialect
from ..serving.pooled import PooledReply
from ..serving.serving_context import Service
from ..serving.sse import Reply
from .completions import read_prompts
from .pooled import cache_of, params_of, usage_body
from .protocol import EmbeddingBody, EmbeddingsBody
from .schema import MAX_INPUTS, EmbeddingsRequest


class EmbeddingsRoute(Dialect[EmbeddingsRequest]):
    """Return a vector of each text, or of each list of token ids."""

    path = "/v1/embeddings"
    body = EmbeddingsRequest
    answer = EmbeddingsBody
    in_batches = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._embedder = Embedder(service.llm)

    async def open(self, body: EmbeddingsRequest) -> Reply:
        """Open all inputs; they are tokenised and computed when the answer is read."""
        inputs = read_inputs(body)
        prompts = self._embedder.open(
            inputs,
            params_of(body),
            body.dimensions,
            name=entry_names("input", len(inputs)),
            cache=cache_of(body),
        )
        return PooledReply(
            prompts, lambda pooled: embeddings_body(pooled, body, self.service.model)
        )


def read_inputs(body: EmbeddingsRequest) -> list[Prompt]:
    """The inputs of a body. Raises `InvalidRequest` for none, too many, and other lists."""
    if not body.input:
        raise InvalidRequest("input must not be empty", param="input")
    inputs = read_prompts(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        message = f"input must have at most {MAX_INPUTS} texts, not {len(inputs)}"
        raise InvalidRequest(message, param="input")
    return inputs


def embeddings_body(
    pooled: Sequence[Pooled], body: EmbeddingsRequest, model: str
) -> dict[str, object]:
    """`protocol.EmbeddingsBody`, whose vectors are JSON already: they may be millions of numbers.

    One after the other, so that other threads have a turn between two of them.
    """
    data = [Raw(_vector_json(index, each, body)) for index, each in enumerate(pooled)]
    whole = EmbeddingsBody(data=[], model=model, usage=usage_body(pooled))
    return {**msgspec.structs.asdict(whole), "data": data}


def _vector_json(index: int, pooled: Pooled, body: EmbeddingsRequest) -> bytes:
    vector = unit_vector(pooled.numbers, body.dimensions)
    if body.encoding_format == "base64":
        text = base64.b64encode(_vector_bytes(vector, body)).decode()
        return msgspec.json.encode(EmbeddingBody(index=index, embedding=text))
    return msgspec.json.encode(EmbeddingBody(index=index, embedding=vector.tolist()))


def _vector_bytes(vector: NDArray[np.float32], body: EmbeddingsRequest) -> bytes:
    """The numbers in the type and the byte order that a body asks for."""
    endianness = body.endianness or "little"
    order = {"little": "<", "big": ">"}[sys.byteorder if endianness == "native" else endianness]
    if body.embed_dtype == "bfloat16":  # the upper half of a float32, rounded to even
        bits = vector.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return rounded.astype(f"{order}u2").tobytes()
    size = 2 if body.embed_dtype == "float16" else 4
    return vector.astype(f"{order}f{size}").tobytes()
