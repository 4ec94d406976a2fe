"""Read texts and parameters from bodies of the routes for vectors and scores."""

from __future__ import annotations

from typing import NamedTuple

from ....core.errors import InvalidRequest
from ....core.interface.request import CacheOptions
from ...runtime.pooled.pooled_prompts import pool_params
from ...runtime.preprocess import Prompt
from ...serving.caching.fields import read_cache
from ...types.sampling_params import SamplingParams
from ..openai.reading import read_prompts
from .bodies import MAX_INPUTS, EmbeddingsRequest, PooledRequest, ScoreRequest


def params_of(body: PooledRequest) -> SamplingParams:
    """Return the parameters of each prompt of a body. Raises `InvalidRequest`."""
    seconds = None if body.deadline_ms is None else body.deadline_ms / 1000
    return pool_params(cache_salt=body.cache_salt, priority=body.priority, deadline=seconds)


def cache_of(body: PooledRequest) -> CacheOptions:
    """Return how the body asks to use the prefix cache."""
    return read_cache(body.cache, None, None)


def read_inputs(body: EmbeddingsRequest) -> list[Prompt]:
    """Return the inputs of a body. Raises `InvalidRequest` for an empty or too long list."""
    if not body.input:
        raise InvalidRequest("input must not be empty", param="input")
    inputs = read_prompts(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        message = f"input must have at most {MAX_INPUTS} texts, not {len(inputs)}"
        raise InvalidRequest(message, param="input")
    return inputs


class Texts(NamedTuple):
    """Texts of a body, and the name of the field that holds them."""

    texts: list[str]
    param: str


def read_pairs(body: ScoreRequest) -> tuple[Texts, Texts]:
    """Return the queries (one, or one per document) and the documents.

    Raises `InvalidRequest` for fields that are missing, given twice, empty, or of unequal lengths.
    """
    queries, query_param = first = _one_of(body, "query", "text_1")
    documents, param = second = _one_of(body, "documents", "text_2")
    if len(documents) > MAX_INPUTS:
        message = f"{param} must have at most {MAX_INPUTS} texts, not {len(documents)}"
        raise InvalidRequest(message, param=param)
    if not all(queries):
        raise InvalidRequest(f"{query_param} must not be empty", param=query_param)
    if len(queries) not in (1, len(documents)):
        message = (
            f"{query_param} must be one text or {len(documents)}, one for each of {param}, "
            f"not {len(queries)}"
        )
        raise InvalidRequest(message, param=query_param)
    return first, second


def _one_of(body: ScoreRequest, name: str, other: str) -> Texts:
    """Return the texts of the field ``name`` or of its alias ``other``, and which of them is given.

    Raises `InvalidRequest` if neither or both are given, or if the given field is empty.
    """
    given = [each for each in (name, other) if getattr(body, each) is not None]
    if not given:
        raise InvalidRequest(f"the body needs {name} or {other}", param=name)
    if len(given) == 2:
        raise InvalidRequest(f"the body must not have both {name} and {other}", param=name)
    value = getattr(body, given[0])
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise InvalidRequest(f"{given[0]} must not be empty", param=given[0])
    return Texts(texts, given[0])
