"""Routes for operators, health probes and routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...._version import __version__
from ....core.errors import ForetokenError, InvalidRequest
from ....core.telemetry.vllm_names import render_vllm
from ...serving.decoding import decoder
from ...serving.dialect import Endpoints, get, post
from ...serving.errors import JsonResponse, unavailable
from ...serving.serving_context import Service
from ..guards.auth import needs_admin_key
from . import protocol
from .models import default_sampling
from .vllm_config import vllm_config

PATHS = (
    "dump_dir",
    "chat_template",
    "kv_disk",
    "lora",
)  # options that are paths on the server
decode_change = decoder(protocol.ReplicaChange)


class OperatorRoutes(Endpoints):
    """Health, metrics and audits."""

    @get("/health", protocol.Status, errors=(503,), outage=protocol.Status)
    async def health(self, _request: Request) -> Response:
        """Return 200 while the engine runs, however long a step takes."""
        alive = self.service.llm.engine.alive
        return JsonResponse(
            protocol.Status(status="ok" if alive else "dead"), 200 if alive else 503
        )

    @get("/ready", protocol.Status, errors=(503,))
    async def ready(self, _request: Request) -> Response:
        """Return 200 while the server should receive new requests, else 503."""
        reason = self.service.unready
        if reason is not None:
            raise unavailable(reason)
        return JsonResponse(protocol.Status(status="ready"))

    @post("/debug/audit", protocol.Audit, errors=(403, 503), is_operators=True)
    async def audit(self, _request: Request) -> Response:
        """Return the owners of all KV pages, and the first violated invariant, if any."""
        return JsonResponse(await self.service.llm.engine.audit())

    @get("/replicas", protocol.ReplicaList, errors=(403,), is_operators=True)
    async def replicas(self, _request: Request) -> Response:
        """Return the replicas with their load; empty if the model runs in this process."""
        return JsonResponse(self.service.llm.replicas())

    @post(
        "/replicas",
        protocol.ReplicaList,
        body=protocol.ReplicaChange,
        errors=(403, 408, 413, 503),
        is_operators=True,
    )
    async def change_replicas(self, request: Request) -> Response:
        """Change the number of replicas."""
        if not request.state.is_admin:
            raise needs_admin_key("changing replicas")
        body = decode_change(await self.service.read_bytes(request))
        try:
            await self.service.llm.change_replicas(*body.bounds)
        except InvalidRequest as error:
            if error.param == "replicas" and body.max is not None:
                error.rename("max")
            raise
        except ForetokenError as error:
            raise unavailable(str(error)) from error
        return await self.replicas(request)

    @get("/version", protocol.Version)
    async def version(self, _request: Request) -> Response:
        """Return the version of foretoken."""
        return JsonResponse(protocol.Version(version=__version__))

    @get("/server_info", protocol.ServerInfo, query=("config_format",))
    async def server_info(self, request: Request) -> Response:
        """Return the model, its default sampling parameters, and the effective settings.

        With ``config_format`` json, the answer also has ``vllm_config``, as vLLM's answer has.
        """
        asked = request.query_params.get("config_format", "text")
        if asked not in ("json", "text"):
            raise InvalidRequest("config_format must be json or text", param="config_format")
        built = self.service.llm.built
        info = protocol.ServerInfo(
            **_model_facts(self.service),
            default_sampling_params=default_sampling(self.service),
            default_sampling_origin=self.service.llm.built.sampling_defaults.origin,
            settings=_without_paths(built.settings),
            limits=asdict(self.service.settings.limits),
        )
        if asked == "json":
            info.vllm_config = vllm_config(self.service)
        return JsonResponse(info)

    @get("/model_info", protocol.ModelInfo)
    async def model_info(self, _request: Request) -> Response:
        """Return the model and its KV pool, for routers."""
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

    @get("/metrics", media="text/plain")
    async def metrics(self, _request: Request) -> Response:
        """Return metrics in the Prometheus text format."""
        ours = self.service.llm.engine.metrics
        await ours.refresh()
        body, content_type = ours.render()
        body += self.service.metrics.render()
        if self.service.settings.metric_names == "vllm":
            body += render_vllm(ours.registry, self.service.model)
        return Response(body, headers={"content-type": content_type})


def _model_facts(service: Service) -> dict[str, Any]:
    """Return the fields of `protocol.ModelFacts`."""
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


def _without_paths(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the engine's options without paths on the server, which are of no use to callers."""
    known = {name: value for name, value in settings.items() if name not in PATHS}
    if isinstance(draft := known.get("draft"), str):
        known["draft"] = ",".join(each.rpartition("/")[2] for each in draft.split(","))
    return known
