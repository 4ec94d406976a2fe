"""The starlette application: routes, keys, request ids, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..._version import __version__
from ...core.errors import ForetokenError, InvalidRequest
from ...core.telemetry.vllm_names import render_vllm
from ..anthropic.route import MessagesCount, MessagesRender, MessagesRoute
from ..ollama.embed import OllamaEmbed, OllamaEmbeddings
from ..ollama.models import OllamaModels
from ..ollama.route import OllamaChat, OllamaGenerate
from ..openai.batches.route import Batches
from ..openai.chat import ChatRender, ChatRoute
from ..openai.completions import CompletionsRender, CompletionsRoute
from ..openai.embeddings import EmbeddingsRoute
from ..openai.rerank import RerankRoute, ScoreRoute
from ..openai.responses.route import (
    KeptResponses,
    ResponsesCount,
    ResponsesRender,
    ResponsesRoute,
)
from ..openai.responses.store import ResponseStore
from ..openai.schema import DetokenizeRequest, TokenizeRequest, tokenized_chat
from ..serving.decoding import decoder
from ..runtime.adapters import ServedAdapter
from ..runtime.engine_client import EngineClient
from ..serving.errors import (
    ApiError,
    ClientGone,
    JsonResponse,
    UpdateUnderWay,
    logged_api_error,
    unavailable,
)
from ..serving.serve import Dialect, Serve
from ..serving.serving_context import Service
from ..serving.settings import Settings
from .error_forms import error_response
from .guards.auth import AuthMiddleware, needs_admin_key
from .guards.under_path import UnderPath
from .observation.observability import Observing
from .observation.request_log import CLIENT_CLOSED
from .routes import protocol
from .routes.adapters import AdapterRoutes
from .routes.cache_routes import CacheRoutes
from .routes.dashboard import Dashboard
from .routes.openapi import OpenApi
from .routes.static_page import ApiViewer

PATHS = (
    "dump_dir",
    "chat_template",
    "kv_disk",
    "lora",
)  # options that are names of files of this machine
decode_tokenize = decoder(TokenizeRequest)
decode_detokenize = decoder(DetokenizeRequest)


class ModelRoutes:
    """GET /v1/models: one object that OpenAI's and Anthropic's clients both read."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._created = datetime.now(UTC)

    async def index(self, request: Request) -> Response:
        """The model, once by each of its names, and its adapters."""
        entries = [self._entry(name) for name in self.service.names]
        entries += map(self._adapter, self.service.llm.adapters.served)
        return JsonResponse(protocol.model_page(entries, request.query_params))

    async def retrieve(self, request: Request) -> Response:
        """The model or an adapter, by any name that requests may use; it may contain slashes."""
        name = request.path_params["name"]
        self.service.check_model(name)
        names = self.service.names
        for adapter in self.service.llm.adapters.served:
            if adapter.name == name and name not in names:
                return JsonResponse(self._adapter(adapter))
        return JsonResponse(self._entry(name if name in names else names[0]))

    def _adapter(self, adapter: ServedAdapter) -> protocol.Model:
        since = datetime.fromtimestamp(adapter.created, UTC)
        return self._entry(adapter.name, since, parent=self.service.names[0])

    def _entry(
        self, name: str, since: datetime | None = None, *, parent: str | None = None
    ) -> protocol.Model:
        built, since = self.service.llm.built, since or self._created
        return protocol.Model(
            id=name,
            created=int(since.timestamp()),
            root=self.service.names[0],
            parent=parent,
            max_model_len=built.max_model_len,
            exact=built.exact,
            model_path=built.model_path,
            drafters=list(built.drafters),
            no_self_draft=built.no_self_draft or None,
            display_name=name,
            created_at=since.strftime("%Y-%m-%dT%H:%M:%SZ"),
            tool_parser=self.service.chat.syntax.tool_parser,
            default_sampling_params=_default_sampling(self.service),
            default_sampling_origin=self.service.llm.built.sampling_defaults.origin,
        )


class TokenRoutes:
    """POST /tokenize and /detokenize."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        body = await self.service.read(request, decode_tokenize)
        self.service.check_model(body.model)
        async with self.service.wanted(request.receive):
            token_ids = await self._token_ids(body)
        names = None
        if body.return_token_strs:
            tokenizer = self.service.llm.tokenizer
            names = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in token_ids]
        most = self.service.llm.built.max_model_len
        return JsonResponse(
            protocol.Tokens(
                count=len(token_ids), max_model_len=most, tokens=token_ids, token_strs=names
            )
        )

    async def _token_ids(self, body: TokenizeRequest) -> list[int]:
        llm = self.service.llm
        if body.messages is not None and body.prompt is None:
            chat = await self.service.apart(partial(tokenized_chat, body, body.messages))
            return [*(await self.service.chat.render(chat)).token_ids]
        if body.prompt is None or body.messages is not None:
            raise InvalidRequest(
                "the body needs either prompt or messages, not both", param="prompt"
            )
        return await llm.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await self.service.read(request, decode_detokenize)
        self.service.check_model(body.model)
        llm = self.service.llm
        llm.tokenizer.check_ids(body.tokens, llm.built.vocab_size, "tokens")
        text = llm.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return JsonResponse(protocol.Detokenized(prompt=text))


decode_change = decoder(protocol.ReplicaChange)


class OperatorRoutes:
    """Health, metrics and audits."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def health(self, _request: Request) -> Response:
        """200 while the engine lives, however long a step takes."""
        alive = self.service.llm.engine.alive
        return JsonResponse(
            protocol.Status(status="ok" if alive else "dead"), 200 if alive else 503
        )

    async def ready(self, _request: Request) -> Response:
        """200 while the server should receive new requests, else 503."""
        reason = self.service.unready
        if reason is not None:
            raise unavailable(reason)
        return JsonResponse(protocol.Status(status="ready"))

    async def audit(self, _request: Request) -> Response:
        """Owners of all KV pages, and the violated rule, if any; 200 in either case."""
        return JsonResponse(await self.service.llm.engine.audit())

    async def replicas(self, _request: Request) -> Response:
        """The replicas that serve, each with its load; none where this process computes."""
        return JsonResponse(self.service.llm.replicas())

    async def change_replicas(self, request: Request) -> Response:
        """Change how many replicas there are, or replace them by some with other options."""
        if not request.state.is_admin:
            raise needs_admin_key("changing replicas")
        body = decode_change(await self.service.read_bytes(request))
        try:
            await self.service.llm.change_replicas(body.bounds, body.options)
        except (InvalidRequest, UpdateUnderWay):
            raise
        except ForetokenError as error:
            raise unavailable(str(error)) from error
        return await self.replicas(request)

    async def version(self, _request: Request) -> Response:
        """The version of foretoken."""
        return JsonResponse(protocol.Version(version=__version__))

    async def server_info(self, _request: Request) -> Response:
        """The model, its default sampling parameters, and the settings in force."""
        built = self.service.llm.built
        info = protocol.ServerInfo(
            **_model_facts(self.service),
            default_sampling_params=_default_sampling(self.service),
            default_sampling_origin=self.service.llm.built.sampling_defaults.origin,
            settings=_without_paths(built.settings),
            limits=asdict(self.service.settings.limits),
        )
        return JsonResponse(info)

    async def model_info(self, _request: Request) -> Response:
        """The model and its KV pool, for routers."""
        built, limits = self.service.llm.built, self.service.llm.engine.limits
        info = protocol.ModelInfo(
            **_model_facts(self.service),
            names=list(self.service.names),
            vocab_size=built.vocab_size,
            eos_token_ids=sorted(built.eos_token_ids),
            max_running=limits.max_running,
            max_queued=limits.max_queued,
            drafters=list(built.drafters),
        )
        return JsonResponse(info)

    async def metrics(self, _request: Request) -> Response:
        """Prometheus text."""
        ours = self.service.llm.engine.metrics
        await ours.refresh()
        body, content_type = ours.render()
        body += self.service.metrics.render()
        if self.service.settings.metric_names == "vllm":
            body += render_vllm(ours.registry, self.service.model)
        return Response(body, headers={"content-type": content_type})


def _model_facts(service: Service) -> dict[str, Any]:
    """Fields of `protocol.ModelFacts`."""
    llm = service.llm
    fingerprint = llm.built.fingerprint
    return {
        "version": __version__,
        "model": service.model,
        "model_path": llm.built.model_path,
        "max_model_len": llm.built.max_model_len,
        "exact": llm.built.exact,
        "page_size": llm.page_size,
        "total_pages": llm.num_pages,
        "fingerprint": None if fingerprint is None else fingerprint.hex(),
    }


def _default_sampling(service: Service) -> protocol.SamplingValues:
    return protocol.SamplingValues(**service.llm.built.sampling_defaults.in_force)


def _without_paths(settings: Mapping[str, object]) -> dict[str, object]:
    """The engine's options for callers, to whom folders of the server's machine are of no use."""
    known = {name: value for name, value in settings.items() if name not in PATHS}
    if isinstance(draft := known.get("draft"), str):
        known["draft"] = ",".join(each.rpartition("/")[2] for each in draft.split(","))
    return known


def create_app(
    llm: EngineClient, settings: Settings | None = None, observing: Observing | None = None
) -> ASGIApp:
    """The application over a started AsyncLLM."""
    settings, observing = settings or Settings(), observing or Observing()
    llm.for_server(settings.limits.max_request_seconds)
    service = Service(llm, settings, observing.metrics)
    _refuse_clash(llm, settings)
    app = Starlette(
        routes=_routes(service),
        lifespan=partial(_lifespan, service),
        exception_handlers={
            ApiError: _refuse,
            ForetokenError: _refuse,
            HTTPException: _refuse,
            ClientGone: _say_nothing,
            Exception: _refuse,
        },
    )
    # A redirect would be built from the Host header.
    app.router.redirect_slashes = False
    guarded = AuthMiddleware(app, settings)
    outermost = _with_cors(guarded, settings.cors_origins) if settings.cors_origins else guarded
    observed = observing.around(outermost, service)
    root_path = settings.root_path
    return UnderPath(observed, root_path) if root_path else observed


@asynccontextmanager
async def _lifespan(service: Service, _app: Starlette) -> AsyncIterator[None]:
    async with service.background:
        yield


def _adapter_routes(service: Service) -> list[Route]:
    """Routes that change which adapters there are; none without an admin key."""
    if not service.settings.admin_keys:
        return []
    adapters = AdapterRoutes(service)
    return [
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
    ]


def _refuse_clash(llm: EngineClient, settings: Settings) -> None:
    """Raise `InvalidRequest` for an adapter with a name of the model."""
    for name in settings.served_names:
        if name in llm.adapters:
            message = f"lora: {name} is a name of the model (--served-model-name)"
            raise InvalidRequest(message, param="lora")


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let pages of these origins call. Outside of the keys' check: a preflight has no API key."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after"],
    )


BATCH_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score",
    "/v1/responses", "/v1/messages",
)  # fmt: skip
"""Routes whose requests a batch may have."""


def batch_dialects(service: Service, store: ResponseStore) -> dict[str, Dialect[Any]]:
    """The dialects of `BATCH_PATHS`."""
    made = (
        ChatRoute(service),
        CompletionsRoute(service),
        EmbeddingsRoute(service),
        RerankRoute(service),
        ScoreRoute(service),
        ResponsesRoute(service, store),
        MessagesRoute(service),
    )
    return dict(zip(BATCH_PATHS, made, strict=True))


def _routes(service: Service) -> list[Route]:
    models, tokens = ModelRoutes(service), TokenRoutes(service)
    cache = CacheRoutes(service)
    store = ResponseStore(max_seconds=service.settings.limits.store_seconds)
    kept = KeptResponses(store)
    in_batches = batch_dialects(service, store)
    service.background = batches = Batches(service, in_batches)
    dialects: dict[str, Dialect[Any]] = in_batches | {
        "/v1/chat/completions/render": ChatRender(service),
        "/v1/completions/render": CompletionsRender(service),
        "/rerank": RerankRoute(service),
        "/v2/rerank": RerankRoute(service),
        "/score": ScoreRoute(service),
        "/v1/responses/input_tokens": ResponsesCount(service, store),
        "/v1/responses/render": ResponsesRender(service, store),
        "/v1/messages/count_tokens": MessagesCount(service),
        "/v1/messages/render": MessagesRender(service),
    }
    return [
        *[Route(path, Serve(each), methods=["POST"]) for path, each in dialects.items()],
        Route("/v1/responses/{id}", kept.retrieve, methods=["GET"]),
        Route("/v1/responses/{id}", kept.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", kept.input_items, methods=["GET"]),
        *batches.routes,
        Route("/v1/models", models.index, methods=["GET"]),
        Route("/v1/models/{name:path}", models.retrieve, methods=["GET"]),
        *(_ollama_routes(service) if service.settings.ollama else []),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        *_operator_routes(service),
        Route("/cache", cache.show, methods=["GET"]),
        Route("/cache/explain", cache.explain, methods=["GET"]),
        Route("/cache/flush", cache.flush, methods=["POST"]),
        *_adapter_routes(service),
        *Dashboard(service).routes,
        *(ApiViewer().routes if service.settings.ui else []),
        Route("/openapi.json", OpenApi(service.settings.root_path).show, methods=["GET"]),
    ]


def _ollama_routes(service: Service) -> list[Route]:
    """Routes of Ollama's API. Some clients take a server that has them for Ollama itself."""
    models = OllamaModels(service)
    dialects: dict[str, Dialect[Any]] = {
        "/api/chat": OllamaChat(service),
        "/api/generate": OllamaGenerate(service),
        "/api/embed": OllamaEmbed(service),
        "/api/embeddings": OllamaEmbeddings(service),
    }
    return [
        *[Route(path, Serve(each), methods=["POST"]) for path, each in dialects.items()],
        Route("/api/tags", models.tags, methods=["GET"]),
        Route("/api/ps", models.running, methods=["GET"]),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/version", models.version, methods=["GET"]),
    ]


def _operator_routes(service: Service) -> list[Route]:
    """Routes for whoever runs the server, and for the probes and routers around it."""
    operator = OperatorRoutes(service)
    return [
        Route("/health", operator.health, methods=["GET"]),
        Route("/ready", operator.ready, methods=["GET"]),
        Route("/debug/audit", operator.audit, methods=["POST"]),
        Route("/replicas", operator.replicas, methods=["GET"]),
        Route("/replicas", operator.change_replicas, methods=["POST"]),
        Route("/version", operator.version, methods=["GET"]),
        Route("/server_info", operator.server_info, methods=["GET"]),
        Route("/model_info", operator.model_info, methods=["GET"]),
        Route("/metrics", operator.metrics, methods=["GET"]),
    ]


async def _refuse(request: Request, error: Exception) -> Response:
    return error_response(request.scope, logged_api_error(request, error))


async def _say_nothing(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)
