"""The routes of /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ....core.errors import InvalidRequest
from ...protocol.sampling import decoder
from ...serving.errors import JsonResponse
from ...serving.serving_context import Service
from ...types.request_context import caller
from .form import read_form
from .protocol import BatchBody, BatchList, CreateBatch, FileBody, FileDeleted, FileList
from .store import BatchStore

PAGE, MAX_PAGE = 20, 100
T = TypeVar("T", FileBody, BatchBody)
decode_batch = decoder(CreateBatch)


class FileRoutes:
    """Upload, list, read and delete files."""

    def __init__(self, service: Service, store: BatchStore) -> None:
        self._service, self._store = service, store

    async def upload(self, request: Request) -> Response:
        """Upload a file of requests, with the purpose batch."""
        self._service.check_ready()
        data = await self._service.read_file(request)
        form = read_form(request.headers.get("content-type", ""), data)
        purpose = form["purpose"].data.decode("utf-8", "replace") if "purpose" in form else ""
        if purpose != "batch":
            raise InvalidRequest("purpose must be batch", param="purpose")
        file = form.get("file")
        if file is None or not file.data:
            raise InvalidRequest("file must be there, and not empty", param="file")
        filename, owner = file.filename or "upload.jsonl", caller()
        return JsonResponse(
            await asyncio.to_thread(self._store.add_file, file.data, filename, purpose, owner)
        )

    async def index(self, request: Request) -> Response:
        """Files of the caller, the newest first; those of a ``purpose`` where one is named."""
        purpose, found = request.query_params.get("purpose"), self._store.files()
        if purpose is not None:
            found = [file for file in found if file.purpose == purpose]
        data, has_more = _page(found, request)
        return JsonResponse(
            FileList(data=data, has_more=has_more, first_id=_first(data), last_id=_last(data))
        )

    async def retrieve(self, request: Request) -> Response:
        """A file, without its content."""
        return JsonResponse(self._store.file(request.path_params["id"]))

    async def content(self, request: Request) -> Response:
        """The content of a file."""
        path = self._store.path(request.path_params["id"])
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """Delete a file."""
        file_id = request.path_params["id"]
        self._store.delete_file(file_id)
        return JsonResponse(FileDeleted(id=file_id))


class BatchRoutes:
    """Begin, list, read and cancel batches."""

    def __init__(self, service: Service, store: BatchStore) -> None:
        self._service, self._store = service, store

    async def create(self, request: Request) -> Response:
        """Answer the requests of a file in the background."""
        return JsonResponse(self._store.create(await self._service.read(request, decode_batch)))

    async def index(self, request: Request) -> Response:
        """Batches of the caller, the newest first."""
        data, has_more = _page(self._store.batches(), request)
        return JsonResponse(
            BatchList(data=data, has_more=has_more, first_id=_first(data), last_id=_last(data))
        )

    async def retrieve(self, request: Request) -> Response:
        """A batch: its state and how many of its requests are answered."""
        return JsonResponse(self._store.batch(request.path_params["id"]))

    async def cancel(self, request: Request) -> Response:
        """Stop a batch; what is answered is kept."""
        return JsonResponse(self._store.cancel(request.path_params["id"]))


def _page(found: list[T], request: Request) -> tuple[list[T], bool]:
    """The part of a list that ``limit`` and ``after`` name; raises `InvalidRequest`."""
    given, after = request.query_params.get("limit", str(PAGE)), request.query_params.get("after")
    is_number = given.isascii() and given.isdigit() and len(given) < 10
    if not is_number or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be from 1 to {MAX_PAGE}", param="limit")
    ids = [each.id for each in found]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after: there is no {after}", param="after")
    start = 0 if after is None else ids.index(after) + 1
    end = start + int(given)
    return found[start:end], end < len(found)


def _first(page: list[T]) -> str | None:
    return page[0].id if page else None


def _last(page: list[T]) -> str | None:
    return page[-1].id if page else None
