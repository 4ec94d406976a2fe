"""Encode vectors, scores and their usage."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from ...runtime.pooled.embedder import unit_vector
from ...runtime.pooled.pooled_prompts import Pooled
from ...serving.serving_context import Service
from ...types.results import batch_usage
from .answers import (
    EmbeddingBody,
    EmbeddingsBody,
    PooledPromptDetails,
    PooledUsage,
)
from .bodies import EmbeddingsRequest


def usage_body(service: Service, pooled: Sequence[Pooled]) -> PooledUsage:
    """Return the ``usage`` of all prompts."""
    usage = batch_usage([each.usage for each in pooled])
    return PooledUsage(
        prompt_tokens=usage.prompt_tokens,
        total_tokens=usage.prompt_tokens,
        prompt_tokens_details=PooledPromptDetails(cached_tokens=usage.cached_tokens),
        cost=service.cost(usage),
    )


def embeddings_body(
    service: Service, pooled: Sequence[Pooled], body: EmbeddingsRequest
) -> dict[str, object]:
    """Return the fields of an `EmbeddingsBody`, with each vector already encoded as JSON.

    Vectors may have millions of numbers. They are encoded one at a time, so that other threads can
    run in between.
    """
    data = [Raw(_vector_json(index, each, body)) for index, each in enumerate(pooled)]
    whole = EmbeddingsBody(data=[], model=service.model, usage=usage_body(service, pooled))
    return {**msgspec.structs.asdict(whole), "data": data}


def _vector_json(index: int, pooled: Pooled, body: EmbeddingsRequest) -> bytes:
    vector = unit_vector(pooled.numbers, body.dimensions)
    if body.encoding_format == "base64":
        text = base64.b64encode(_vector_bytes(vector, body)).decode()
        return msgspec.json.encode(EmbeddingBody(index=index, embedding=text))
    return msgspec.json.encode(EmbeddingBody(index=index, embedding=vector.tolist()))


def _vector_bytes(vector: NDArray[np.float32], body: EmbeddingsRequest) -> bytes:
    """Return the bytes of a vector in the requested number type and byte order."""
    endianness = body.endianness or "little"
    order = {"little": "<", "big": ">"}[sys.byteorder if endianness == "native" else endianness]
    if body.embed_dtype == "bfloat16":  # bfloat16 is the upper half of a float32, rounded to even
        bits = vector.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return rounded.astype(f"{order}u2").tobytes()
    size = 2 if body.embed_dtype == "float16" else 4
    return vector.astype(f"{order}f{size}").tobytes()
