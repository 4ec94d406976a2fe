"""GET /v1/models: one object that clients of OpenAI and Anthropic can both read."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from ...runtime.adapters import ServedAdapter
from ...serving.dialect import Endpoints, get
from ...serving.errors import JsonResponse
from ...serving.serving_context import Service
from . import protocol


class ModelRoutes(Endpoints):
    """Lists and describes the served model and its adapters."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._created = datetime.now(UTC)

    @get("/v1/models", protocol.ModelList)
    async def index(self, request: Request) -> Response:
        """Return the model under each of its names, and its adapters."""
        entries = [self._entry(name) for name in self.service.names]
        entries += map(self._adapter, self.service.llm.adapters.served)
        return JsonResponse(protocol.model_page(entries, request.query_params))

    @get("/v1/models/{name:path}", protocol.Model, errors=(404,))
    async def retrieve(self, request: Request) -> Response:
        """Return the model or an adapter by any of its names, which may contain slashes."""
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
            default_sampling_params=default_sampling(self.service),
            default_sampling_origin=self.service.llm.built.sampling_defaults.origin,
        )


def default_sampling(service: Service) -> protocol.SamplingValues:
    """Return the sampling values for fields that a request leaves out."""
    return protocol.SamplingValues(**service.llm.built.sampling_defaults.in_force)
