"""Bodies of the routes for vectors and scores. Decoding validates them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ...runtime.conversation.tools import (
    CacheSpec,
)
from ...serving.peers import Absent, Empty, Off, On
from ...serving.sampling import (
    Milliseconds,
    Positive,
    Salt,
)
from ...types.fields import Refused, SameAs

MAX_INPUTS = 2048  # maximum number of inputs, as in OpenAI's API, and of documents


class PooledRequest(Struct, kw_only=True):
    """Body fields shared by the routes for vectors and scores."""

    model: str | None = None
    stream: bool | None = None  # ignored: the answer is sent in one piece
    # extensions of OpenAI's API
    cache_salt: Salt | None = None
    priority: int | None = None
    deadline_ms: Milliseconds | None = None
    cache: CacheSpec | None = None
    # fields that other servers accept
    extra_key: Annotated[Salt | None, SameAs("cache_salt")] = None
    truncate_prompt_tokens: Absent = None
    max_tokens_per_doc: Absent = None
    messages: Absent = None
    normalize: On = None
    use_activation: On = None
    add_special_tokens: On = None
    padding: Annotated[Any, Refused("do_not_pad")] = None
    mm_processor_kwargs: Empty = None
    lora_path: Empty = None
    truncate: Annotated[Any, Refused("NONE", False)] = None
    input_type: Absent = None
    task: Absent = None
    prompt_name: Absent = None
    late_chunking: Off = None
    embed_overrides: Empty = None
    rank_fields: Empty = None
    max_chunks_per_doc: Absent = None
    apply_softmax: Off = None
    raw_scores: Off = None


EmbedDtype = Literal["float32", "float16", "bfloat16"]


class EmbeddingsRequest(PooledRequest, kw_only=True):
    """Body of /v1/embeddings: a text, token ids, or a list of either."""

    input: str | list[str | int | list[int]]
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: EmbedDtype | None = None  # number type in base64, as in vLLM
    endianness: Literal["native", "big", "little"] | None = None  # byte order in base64, as in vLLM


class TextDocument(Struct):
    """A document as an object."""

    text: str


Query = Annotated[str, Meta(min_length=1)]


Documents = Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)]


class RerankRequest(PooledRequest, kw_only=True):
    """Body of /v1/rerank, /v2/rerank and /rerank. ``instruction`` is vLLM's name for
    ``instruct``.
    """

    query: Query
    documents: Documents
    top_n: Positive | None = None
    return_documents: bool | None = None
    instruct: str | None = None
    instruction: str | None = None


OneOrMore = str | list[str]


class ScoreRequest(PooledRequest, kw_only=True):
    """Body of /v1/score and /score: a query and a document, or several of either.

    ``text_1`` and ``text_2`` are aliases of ``query`` and ``documents``, as are ``queries``,
    ``items``, ``data_1`` and ``data_2``.
    """

    query: OneOrMore | None = None
    documents: OneOrMore | None = None
    text_1: OneOrMore | None = None
    text_2: OneOrMore | None = None
    instruct: str | None = None
    # aliases of other fields
    queries: Annotated[OneOrMore | None, SameAs("query")] = None
    items: Annotated[OneOrMore | None, SameAs("documents")] = None
    data_1: Annotated[OneOrMore | None, SameAs("text_1")] = None
    data_2: Annotated[OneOrMore | None, SameAs("text_2")] = None
