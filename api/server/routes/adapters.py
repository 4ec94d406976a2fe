"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: change adapters at runtime."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from ....core.errors import InvalidRequest, ModelLoadError
from ....core.model.adapters.files import leads_over_link
from ...build.adapter_loader import AdapterFolder
from ...runtime.adapters import UnknownAdapter
from ...serving.decoding import decoder
from ...serving.dialect import Endpoints, post
from ...serving.errors import ApiError, JsonResponse, unknown_model
from ...serving.settings import Settings
from ..guards.auth import needs_admin_key

AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapter(Struct, kw_only=True):
    """Body of /v1/load_lora_adapter. ``lora_path``: a folder below ``--lora-dir``.

    ``load_inplace``: replace a loaded adapter with the same name, instead of refusing the name.
    Running requests keep the replaced adapter; later ones find none of its cached pages.
    """

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = True


class UnloadAdapter(Struct, kw_only=True):
    """Body of /v1/unload_lora_adapter."""

    lora_name: AdapterName


class AdapterLoaded(Struct, kw_only=True):
    """Answer of /v1/load_lora_adapter: the adapter's largest rank and its size in bytes."""

    lora_name: str
    rank: int
    num_bytes: int


class AdapterUnloaded(Struct, kw_only=True):
    """Answer of /v1/unload_lora_adapter."""

    lora_name: str


decode_load, decode_unload = decoder(LoadAdapter), decoder(UnloadAdapter)


class AdapterRoutes(Endpoints):
    """Routes that load and unload adapters. They exist only if admin keys are configured."""

    @classmethod
    def is_served(cls, settings: Settings) -> bool:
        """Whether admin keys are configured."""
        return bool(settings.admin_keys)

    @post("/v1/load_lora_adapter", AdapterLoaded, body=LoadAdapter, errors=(403, 408, 413, 503))
    async def load(self, request: Request) -> Response:
        """Load a LoRA adapter. It replaces an adapter with the same name."""
        body = decode_load(await self._read(request, "loading an adapter"))
        if body.lora_name in self.service.names:
            message = f"{body.lora_name} is a name of the model itself: choose another"
            raise InvalidRequest(message, param="lora_name")
        if not body.load_inplace and body.lora_name in self.service.llm.adapters:
            message = f"{body.lora_name} is loaded already: load_inplace true replaces it"
            raise InvalidRequest(message, param="lora_name")
        folder = await asyncio.to_thread(
            adapter_folder, self.service.settings.lora_dir, body.lora_path
        )
        try:
            adapter = await self.service.llm.adapters.load(body.lora_name, *folder)
        except ModelLoadError as error:
            raise InvalidRequest(str(error), param="lora_path") from error
        loaded = adapter.loaded
        return JsonResponse(
            AdapterLoaded(lora_name=adapter.name, rank=loaded.rank, num_bytes=loaded.num_bytes)
        )

    @post(
        "/v1/unload_lora_adapter",
        AdapterUnloaded,
        body=UnloadAdapter,
        errors=(403, 404, 408, 413, 503),
    )
    async def unload(self, request: Request) -> Response:
        """Unload a LoRA adapter after its running requests end. New requests for it get 404."""
        body = decode_unload(await self._read(request, "unloading an adapter"))
        try:
            async with self.service.wanted(request.receive):
                await self.service.llm.adapters.unload(body.lora_name)
        except UnknownAdapter as error:
            unknown = unknown_model(error.name, self.service.names[0])
            unknown.param = "lora_name"
            raise unknown from None
        return JsonResponse(AdapterUnloaded(lora_name=body.lora_name))

    async def _read(self, request: Request, what: str) -> bytes:
        if not request.state.is_admin:
            raise needs_admin_key(what)
        self.service.check_ready()
        return await self.service.read_bytes(request)


def adapter_folder(root: str | None, given: str) -> AdapterFolder:
    """Return the folder of an adapter below ``root``, relative to it or absolute. Blocking.

    Raises `ApiError` 403 for a path outside ``root`` or with ``..`` or a symbolic link, which could
    lead outside.
    """
    if root is None:
        raise _forbidden("adapters can only be loaded from --lora-dir, which is not set")
    if "\0" in given or ".." in Path(given).parts:
        raise _forbidden("lora_path must not contain .. or a NUL")
    base = Path(os.path.abspath(Path(root).expanduser()))
    path = base / given
    if not path.is_relative_to(base) or path == base:
        raise _forbidden("lora_path must be below the folder of --lora-dir")
    try:
        if leads_over_link(path, base):
            raise _forbidden("lora_path must not contain a symbolic link")
    except (OSError, ValueError) as error:  # for example a path component that is too long
        raise _forbidden("lora_path cannot be read") from error
    return AdapterFolder(path, base)


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", param="lora_path", code="path_forbidden")
