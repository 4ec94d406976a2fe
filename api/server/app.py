"""The starlette application: routes, keys, request ids, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import ForetokenError, InvalidRequest
from ..dialects import APIS, BATCH_PATHS, open_dialects, with_route_prefix
from ..dialects.batches.routes import Batches
from ..receipts.routes import ReceiptRoutes
from ..receipts.signer import ReceiptSigner
from ..runtime.engine_client import EngineClient
from ..serving.dialect import Endpoints, Operation
from ..serving.errors import ApiError, ClientGone, logged_api_error
from ..serving.serve import Serve
from ..serving.serving_context import Service
from ..serving.settings import Settings
from .error_forms import error_response
from .guards.auth import AuthMiddleware
from .guards.under_path import UnderPath
from .observation.observability import Observing
from .observation.request_log import CLIENT_CLOSED
from .rollouts.routes import RolloutRoutes
from .rollouts.transfer_routes import TransferRoutes
from .rollouts.versioned_answers import versioned_dialects
from .rollouts.weight_checker import WeightChecker
from .routes.adapters import AdapterRoutes
from .routes.cache_routes import CacheRoutes
from .routes.dashboard import Dashboard
from .routes.models import ModelRoutes
from .routes.openapi import OpenApi
from .routes.operators import OperatorRoutes
from .routes.pages import Pages
from .routes.sessions import SessionRoutes
from .routes.tokens import TokenRoutes
from .sockets.connection import ResponsesSocket

ENDPOINTS: Sequence[type[Endpoints]] = (
    ModelRoutes, TokenRoutes, OperatorRoutes, CacheRoutes, SessionRoutes, AdapterRoutes, Dashboard,
    Pages, OpenApi, ReceiptRoutes, RolloutRoutes, WeightChecker, TransferRoutes,
)  # fmt: skip
"""Routes that belong to no API."""


def operations() -> Iterator[Operation]:
    """Yield all declared operations, including ones that a server's settings may disable."""
    for api in APIS:
        yield from api.operations()
    for kind in ENDPOINTS:
        yield from kind.operations()


OPERATOR_PATHS = frozenset(each.path for each in operations() if each.is_operators)


def create_app(
    llm: EngineClient, settings: Settings | None = None, observing: Observing | None = None
) -> ASGIApp:
    """Return the application for a started engine client.

    Raises `InvalidRequest` if the name of an adapter is also a name of the model.
    """
    settings, observing = settings or Settings(), observing or Observing()
    llm.for_server(settings.limits.max_request_seconds)
    service = Service(llm, settings, observing.metrics)
    _refuse_clash(llm, settings)
    served = routes(service)
    app = Starlette(
        routes=served,
        lifespan=partial(_lifespan, service),
        exception_handlers={
            ApiError: _refuse,
            ForetokenError: _refuse,
            HTTPException: _refuse,
            ClientGone: _say_nothing,
            Exception: _refuse,
        },
    )
    # A redirect would be built from the Host header, which a client can forge.
    app.router.redirect_slashes = False

    # Not a coroutine itself: it would be resumed and suspended with each event of a stream.
    def at_its_path(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return app(with_route_prefix(scope) if scope["type"] == "http" else scope, receive, send)

    guarded = AuthMiddleware(at_its_path, settings, OPERATOR_PATHS)
    outermost = _with_cors(guarded, settings.cors_origins) if settings.cors_origins else guarded
    observed = observing.around(outermost, service)
    served_app = ResponsesSocket(observed, settings.limits, guarded.handshake_refusal)
    root_path = settings.root_path
    return UnderPath(served_app, root_path) if root_path else served_app


@asynccontextmanager
async def _lifespan(service: Service, _app: Starlette) -> AsyncIterator[None]:
    if service.llm.ready:  # A front has no model yet; its first answer waits for the hash.
        with suppress(ForetokenError):  # every answer reports it
            await ReceiptSigner.prepare(service)
    async with service.background:
        yield


def _refuse_clash(llm: EngineClient, settings: Settings) -> None:
    """Raise `InvalidRequest` if the name of an adapter is also a name of the model."""
    for name in settings.served_names:
        if name in llm.adapters:
            message = f"lora: {name} is a name of the model (--served-model-name)"
            raise InvalidRequest(message, param="lora")


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow requests of web pages from ``origins``.

    This layer precedes the API key check, since preflight requests have no API key.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after"],
    )


def routes(service: Service) -> list[BaseRoute]:
    """Return the routes of all APIs and of the server itself."""
    settings = service.settings
    apis = [api for api in APIS if api.is_served(settings)]
    dialects = open_dialects(service, apis)
    if service.llm.config.allow_weight_updates:
        dialects |= versioned_dialects(service)
    in_batches = {path: dialects[path] for path in BATCH_PATHS}
    service.background = service.shared[Batches] = Batches(service, in_batches)
    kinds = [*(kind for api in apis for kind in api.endpoints), *ENDPOINTS]
    return [
        *[
            Route(path, Serve(each), methods=["POST"])
            for each in dialects.values()
            for path in (each.path, *each.aliases)
        ],
        *(route for kind in kinds if kind.is_served(settings) for route in kind(service).routes),
    ]


async def _refuse(request: Request, error: Exception) -> Response:
    return error_response(request.scope, logged_api_error(request, error))


async def _say_nothing(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)
