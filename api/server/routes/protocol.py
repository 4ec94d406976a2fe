"""Answers of the server's own routes: models, tokens, the cache, health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ....core.errors import InvalidRequest
from ...serving.answers import Free

MAX_MODELS = 1000  # models per page


class SamplingValues(Struct, kw_only=True):
    """``default_sampling_params``: values for fields that a request leaves out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(Struct, kw_only=True):
    """A served model.

    - ``max_model_len``: limit on prompt and answer together, in tokens.
    - ``exact``: whether logits have the same bits in any batch.
    - ``model_path``: the implementation of the layers, ``own`` or ``transformers``.
    - ``root``: the first name of the served model.
    - ``parent``: the base model of an adapter.
    - ``drafters``: names of the draft sources, except grammars and predictions.
    - ``no_self_draft``: why ``--draft auto`` does not use the model's own drafts.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "foretoken"
    root: str
    parent: str | None = None
    max_model_len: int
    exact: bool
    model_path: str
    drafters: list[str]
    no_self_draft: str | None = None
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    tool_parser: str  # format of tool calls, a value of `--tool-parser`
    default_sampling_params: SamplingValues
    default_sampling_origin: str  # source of the model's values; "" if it has none


class ModelList(Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: str = "list"
    data: list[Model]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


def model_page(models: Sequence[Model], query: Mapping[str, str]) -> ModelList:
    """Return a page of models for the query parameters of Anthropic's API; by default all models.

    Raises `InvalidRequest` for an invalid limit or an unknown id.
    """
    start, stop = 0, len(models)
    ids = [each.id for each in models]
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in ids:
            raise InvalidRequest(f"{name}: unknown model {query[name]}", param=name)
    if "after_id" in query:
        start = ids.index(query["after_id"]) + 1
    if "before_id" in query:
        stop = ids.index(query["before_id"])
    most = _limit(query.get("limit", str(MAX_MODELS)))
    if "before_id" in query and "after_id" not in query:
        start = max(start, stop - most)
    page = list(models[start:stop][:most])
    return ModelList(
        data=page,
        has_more=start > 0 if "before_id" in query else start + len(page) < len(models),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _limit(given: str) -> int:
    is_number = given.isascii() and given.isdigit() and len(given) <= len(str(MAX_MODELS))
    if not is_number or not 1 <= int(given) <= MAX_MODELS:
        raise InvalidRequest(f"limit must be from 1 to {MAX_MODELS}", param="limit")
    return int(given)


class Tokens(Struct, kw_only=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, kw_only=True):
    """Answer of /detokenize."""

    prompt: str


class Flushed(Struct, kw_only=True):
    """Answer of /cache/flush."""

    flushed_pages: int


class Status(Struct, kw_only=True):
    """Answer of /health and /ready."""

    status: str


class Audit(Struct, kw_only=True, omit_defaults=True):
    """Answer of /debug/audit: owners of all KV pages, and the first violated invariant.

    ``states``: owners of the slots for recurrent states, for models that have them.
    """

    ok: bool
    pages: dict[str, int] = {}
    states: dict[str, int] = {}
    requests: dict[str, int] = {}
    replicas: list[dict[str, Any]] = []  # the audit of each replica, for a front


class Replica(Struct, kw_only=True):
    """A replica. It reports its load; the front counts its requests and tokens.

    ``state``: "ready", or why it accepts no requests. ``seconds``: time since it joined.
    ``served``: finished requests. ``owed_tokens``: tokens still to compute for its ``requests``.
    """

    number: int
    pid: int
    model: str
    release: str
    kernels: str
    state: str
    seconds: float
    requests: int
    served: int
    running: int
    waiting: int
    kv_usage: float
    owed_tokens: int
    max_running: int
    max_queued: int
    total_pages: int


class ReplicaChange(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of POST /replicas: a fixed number, or the bounds of a number that follows the load."""

    replicas: int | None = None
    min: int | None = None
    max: int | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of replicas. Raises `InvalidRequest` for invalid fields."""
        if self.replicas is not None and (self.min is not None or self.max is not None):
            raise InvalidRequest("replicas cannot be combined with min and max", param="replicas")
        if (self.min is None) != (self.max is None):
            missing = "min" if self.min is None else "max"
            raise InvalidRequest("min and max must be given together", param=missing)
        least = self.replicas if self.min is None else self.min
        most = self.replicas if self.max is None else self.max
        if least is None or most is None:
            raise InvalidRequest("replicas, or min and max, is required", param="replicas")
        if not 1 <= least <= most:
            param = "min" if self.replicas is None else "replicas"
            message = f"{param} must be at least 1 and not above max"
            raise InvalidRequest(message, param=param)
        return least, most


class ReplicaList(Struct, kw_only=True):
    """Answer of GET /replicas; empty if the model runs in the server itself."""

    replicas: list[Replica]


class ModelFacts(Struct, kw_only=True):
    """Fields that /server_info and /model_info share.

    ``max_model_len``: limit on prompt and answer together, in tokens. The KV pool has
    ``total_pages`` pages of ``page_size`` tokens. ``fingerprint``: equal for servers whose KV pages
    have the same bits; null if unknown.
    """

    version: str
    model: str
    model_path: str
    max_model_len: int
    exact: bool
    page_size: int
    total_pages: int
    fingerprint: str | None


class ModelInfo(ModelFacts, kw_only=True):
    """Answer of /model_info: the model and its KV pool, for routers.

    ``names``: names that requests may use. At most ``max_running`` requests run at once and
    ``max_queued`` more are queued.
    """

    names: list[str]
    vocab_size: int
    eos_token_ids: list[int]
    max_running: int
    max_queued: int
    drafters: list[str]


class ServerInfo(ModelFacts, kw_only=True):
    """Answer of /server_info: the model, its sampling defaults, and the effective settings.

    ``settings``: the engine's options except paths, with the values chosen for automatic options.
    ``limits``: limits on connections and requests. ``vllm_config``: settings by vLLM's names.
    """

    default_sampling_params: SamplingValues
    default_sampling_origin: str  # source of the model's values; "" if it has none
    settings: Free
    limits: Free
    vllm_config: Free | UnsetType = UNSET  # only with ``config_format=json``


class Version(Struct, kw_only=True):
    """Answer of /version."""

    version: str


class CacheBody(Struct, kw_only=True):
    """Answer of /cache. A page has ``page_size`` tokens.

    ``causes``: number of prompts by cause of their cache miss, since the start.
    """

    page_size: int
    total_pages: int
    free_pages: int
    evictable_pages: int
    pinned_pages: int
    num_pins: int
    num_sessions: int
    causes: dict[str, int]
    pins: list[Free]
    usage: float
    queried_tokens: int
    hit_tokens: int
    evicted_answer_tokens: int = 0  # answer tokens whose KV was evicted (--kv-evict)
