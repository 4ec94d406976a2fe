"""Routes of trainers, with the paths of vLLM's: pause, resume, and updates of the weights."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from msgspec import Meta, Struct, field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from ....core.errors import InvalidRequest
from ...build.updates.new_weights import NewWeights, SharedWeights, WeightFolder
from ...build.updates.refusal import UpdateConflict
from ...serving.decoding import decoder
from ...serving.dialect import Endpoints, get, post
from ...serving.errors import ApiError, JsonResponse
from ..guards.foreign_pages import is_loopback
from ..routes.protocol import Flushed, Status
from .staged_update import StagedUpdate

if TYPE_CHECKING:
    from ....core.engine.rollouts.updatable_engine import PauseMode
    from ...build.updates.rollouts import Rollouts

CHANGES = (403, 408, 413, 503)


class PauseState(Struct, kw_only=True):
    """Answer of /is_paused: whether no steps run, and the version of the weights."""

    is_paused: bool
    weight_version: str


class WorldSize(Struct, kw_only=True):
    """Answer of /get_world_size: number of processes that hold the weights."""

    world_size: int


class StartUpdate(Struct, kw_only=True):
    """Body of /start_weight_update. Only tensors as in a checkpoint are supported.

    ``drop_open``: drop an update that is open, for example of a trainer that has died.
    """

    is_checkpoint_format: bool = True
    drop_open: bool = False


BELONGS = {"path": "sha256", "shared_memory": "size", "data": "offset"}  # fields of the sources


class UpdateInfo(Struct, kw_only=True, forbid_unknown_fields=True):
    """Tensors of an update: a folder on the server, shared memory, or a part of one file.

    ``path``: folder with safetensors. ``sha256``: digests of its files, by file name.
    ``shared_memory``: name of a block of POSIX shared memory with the bytes of a safetensors file.
    ``size``: number of its bytes. ``data``: the next bytes of a safetensors file, in base64.
    ``offset``: number of bytes before them, to detect lost parts.
    """

    path: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    sha256: dict[str, str] = field(default_factory=dict)
    shared_memory: Annotated[str, Meta(min_length=1, max_length=252)] | None = None
    size: Annotated[int, Meta(ge=1)] | None = None
    data: bytes | None = None
    offset: Annotated[int, Meta(ge=0)] | None = None

    def source(self) -> NewWeights | None:
        """Return weights that exist already; None for a part. Raises `InvalidRequest`."""
        given = [name for name in BELONGS if getattr(self, name) is not None]
        if len(given) != 1:
            message = "update_info needs either path, shared_memory or data"
            raise InvalidRequest(message, param="update_info")
        for kind, name in BELONGS.items():
            if kind != given[0] and getattr(self, name):
                message = f"{name} belongs to {kind}, not to {given[0]}"
                raise InvalidRequest(message, param=f"update_info.{name}")
        if self.path is not None:
            return WeightFolder(Path(self.path), self.sha256)
        if self.shared_memory is None:
            return None
        if self.size is None:
            message = "size is required: the number of bytes in the shared memory"
            raise InvalidRequest(message, param="update_info.size")
        return SharedWeights(self.shared_memory, self.size)


class UpdateWeights(Struct, kw_only=True):
    """Body of /update_weights."""

    update_info: UpdateInfo


class PartTaken(Struct, kw_only=True):
    """Answer of /update_weights: number of bytes of all parts so far."""

    num_bytes: int


class FinishUpdate(Struct, kw_only=True):
    """Body of /finish_weight_update.

    ``sha256``: digest of all parts or of the shared memory, required for parts.
    ``weight_version``: name of the new version of the weights, by default the number of updates.
    """

    sha256: str | None = None
    weight_version: str | None = None


class UpdateFinished(Struct, kw_only=True):
    """Answer of /finish_weight_update: the new version of the weights."""

    weight_version: str


decode_start, decode_part = decoder(StartUpdate), decoder(UpdateWeights)
decode_finish = decoder(FinishUpdate)


class RolloutRoutes(Endpoints):
    """Routes of trainers. They exist with ``--allow-weight-updates``, in a server that computes."""

    @property
    def routes(self) -> list[BaseRoute]:
        """The routes; none if weight updates are not allowed."""
        if not self.service.llm.config.allow_weight_updates:
            return []
        if self.service.settings.receipts is not None:
            message = "receipts state the weights of the start: not with allow_weight_updates"
            raise InvalidRequest(message, param="receipts")
        return super().routes

    @post("/pause", Status, query=("mode",), errors=(403, 503), is_operators=True)
    async def pause(self, request: Request) -> Response:
        """Run no steps until /resume. Running requests end (``mode`` abort), all accepted requests
        end first (wait), or running requests stop until then (keep).
        """
        rollouts = self._rollouts(request)
        await rollouts.pause(cast("PauseMode", request.query_params.get("mode", "abort")))
        return JsonResponse(Status(status="paused"))

    @post("/resume", Status, errors=(403, 503), is_operators=True)
    async def resume(self, request: Request) -> Response:
        """End a pause."""
        self._rollouts(request).resume()
        return JsonResponse(Status(status="resumed"))

    @get("/is_paused", PauseState, errors=(403, 503), is_operators=True)
    async def is_paused(self, request: Request) -> Response:
        """Return whether the engine is paused, and the version of the weights."""
        rollouts = self._rollouts(request)
        state = PauseState(is_paused=rollouts.is_paused, weight_version=rollouts.weight_version)
        return JsonResponse(state)

    @post(
        "/start_weight_update",
        Status,
        body=StartUpdate,
        is_body_needed=False,
        errors=CHANGES,
        is_operators=True,
    )
    async def start(self, request: Request) -> Response:
        """Open an update of the weights, which changes nothing yet."""
        self._rollouts(request)
        data = await self.service.read_bytes(request)
        body = decode_start(data) if data.strip() else StartUpdate()
        if not body.is_checkpoint_format:
            message = "is_checkpoint_format must be true: only tensors as in a checkpoint are taken"
            raise InvalidRequest(message, param="is_checkpoint_format")
        try:
            await self._staged.start(drops_open=body.drop_open)
        except UpdateConflict as error:
            raise _conflict(error) from None
        return JsonResponse(Status(status="started"))

    @post("/update_weights", PartTaken, body=UpdateWeights, errors=CHANGES, is_operators=True)
    async def update(self, request: Request) -> Response:
        """Add tensors to the open update: a folder on the server, shared memory, or a part of a
        file.
        """
        self._rollouts(request)
        info = decode_part(await self.service.read_bytes(request)).update_info
        source = info.source()
        try:
            num_bytes = 0
            if source is not None:
                await self._staged.set_source(source)
            elif info.data is not None:
                num_bytes = await self._staged.add(info.data, info.offset)
        except UpdateConflict as error:
            raise _conflict(error) from None
        return JsonResponse(PartTaken(num_bytes=num_bytes))

    @post(
        "/finish_weight_update",
        UpdateFinished,
        body=FinishUpdate,
        is_body_needed=False,
        errors=CHANGES,
        is_operators=True,
    )
    async def finish(self, request: Request) -> Response:
        """Check the tensors of the open update and replace the weights between two steps.

        If they are refused, the update ends and nothing has changed.
        """
        self._rollouts(request)
        data = await self.service.read_bytes(request)
        body = decode_finish(data) if data.strip() else FinishUpdate()
        try:
            version = await self._staged.finish(body.sha256, body.weight_version)
        except UpdateConflict as error:
            raise _conflict(error) from None
        self.service.llm.prompts.flush()
        return JsonResponse(UpdateFinished(weight_version=version))

    @get("/get_world_size", WorldSize, errors=(403,), is_operators=True)
    async def world_size(self, request: Request) -> Response:
        """Return the number of processes that hold the weights."""
        self._rollouts(request)
        return JsonResponse(WorldSize(world_size=1))

    @post("/reset_prefix_cache", Flushed, errors=(403, 503), is_operators=True)
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Drop all cached prefixes that no request uses."""
        self._rollouts(request)
        flushed = await self.service.llm.engine.flush_cache()
        self.service.llm.prompts.flush()
        return JsonResponse(Flushed(flushed_pages=flushed))

    def _rollouts(self, request: Request) -> Rollouts:
        """Return the control of the engine.

        Raises `ApiError` 403 for a caller on another machine if the server has no keys.
        """
        settings, client = self.service.settings, request.client
        has_keys = bool(settings.api_keys or settings.admin_keys)
        if not has_keys and client is not None and not is_loopback(client.host):
            message = "without keys, only this machine may call this route (--admin-key)"
            raise ApiError(403, message, kind="permission_error", code="admin_key_needed")
        return self._control

    @property
    def _control(self) -> Rollouts:
        rollouts = self.service.llm.built.rollouts
        assert rollouts is not None, "the option was checked"
        return rollouts

    @cached_property
    def _staged(self) -> StagedUpdate:
        return StagedUpdate(self._control)


def _conflict(error: UpdateConflict) -> ApiError:
    return ApiError(400, str(error), param=error.param, code="update_conflict")
