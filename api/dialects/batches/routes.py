"""The routes of /v1/files and /v1/batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ....core.errors import Unavailable
from ...serving.decoding import decoder
from ...serving.dialect import GENERATES, Dialect, Endpoints, delete, get, post
from ...serving.errors import JsonResponse
from ...serving.paging import page_limit
from ...serving.serving_context import Service
from ...types.request_context import caller, random_id
from .bodies import (
    BatchBody,
    BatchList,
    CreateBatch,
    FileBody,
    FileDeleted,
    FileList,
    UploadForm,
)
from .database import Database
from .jobs import BatchJobs
from .lines import LineRunner
from .store import BatchStore, Page, now
from .upload import reading

logger = logging.getLogger(__name__)
BINARY, FORM = "application/octet-stream", "multipart/form-data"
ERRORS = (404, 503)  # 503: another server still uses the batch folder
SHARE_DIVISOR = 8  # by default, batches may use 1/8 of the requests that run at once
decode_batch = decoder(CreateBatch)


class Batches:
    """The batches of a server. They run inside its ``async with`` block."""

    def __init__(self, service: Service, dialects: Mapping[str, Dialect[Any]]) -> None:
        """Open the store. ``dialects``: routes of batch requests, by path.

        Raises `InvalidRequest` for a folder that cannot be used.
        """
        folder = service.settings.batch_dir
        database = Database(None if folder is None else Path(folder))
        self.store = BatchStore(database, service.settings.limits)

        def num_places() -> int:
            most = service.llm.engine.limits.max_running
            return service.settings.batch_running or max(1, most // SHARE_DIVISOR)

        runner = LineRunner(service, dialects, num_places=num_places)
        self.jobs, self._is_kept = BatchJobs(self.store, dialects, runner), folder is not None

    async def __aenter__(self) -> None:
        """Resume unfinished batches.

        If another server still uses the file, a later request resumes them.
        """
        if self._is_kept:
            try:
                await self.jobs.resume()
            except Unavailable as error:
                logger.warning("cannot resume batches yet: %s", error)

    async def __aexit__(self, *_error: object) -> None:
        """Stop the batches; the next server resumes them."""
        await self.jobs.close()


class FileRoutes(Endpoints):
    """Upload, list, read and delete files."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._store = service.shared[Batches].store

    @post("/v1/files", FileBody, body=UploadForm, body_media=FORM, errors=(408, 413, 503, 507))
    async def upload(self, request: Request) -> Response:
        """Upload a file of requests, with the purpose batch."""
        self.service.check_ready()
        async with reading(request, self.service.settings.limits, self._store) as upload:
            created, after = now(), upload.expires_after
            file = FileBody(
                id=f"file-{random_id()}",
                bytes=upload.num_bytes,
                created_at=created,
                filename=upload.filename,
                purpose=upload.purpose,
                expires_at=self._store.expiry(created, None if after is None else after.seconds),
            )
            await self._store.add_file(file, caller(), upload.content)
        return JsonResponse(file)

    @get("/v1/files", FileList, query=("limit", "after", "purpose"), errors=(503,))
    async def index(self, request: Request) -> Response:
        """Return files of the caller, newest first, optionally with a given ``purpose``."""
        purpose = request.query_params.get("purpose")
        data, has_more = await self._store.listed(
            FileBody, caller(), _page(request), purpose=purpose
        )
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return JsonResponse(FileList(data=data, has_more=has_more, first_id=first, last_id=last))

    @get("/v1/files/{id}", FileBody, errors=ERRORS)
    async def retrieve(self, request: Request) -> Response:
        """Return a file, without its content."""
        return JsonResponse(await self._store.find(FileBody, caller(), request.path_params["id"]))

    @get("/v1/files/{id}/content", media=BINARY, errors=ERRORS)
    async def content(self, request: Request) -> Response:
        """Return the content of a file."""
        file = await self._store.find(FileBody, caller(), request.path_params["id"])
        return StreamingResponse(
            self._store.content(file.id),
            headers={"content-length": str(file.bytes)},
            media_type="application/octet-stream",
        )

    @delete("/v1/files/{id}", FileDeleted, errors=(*ERRORS, 507))
    async def delete(self, request: Request) -> Response:
        """Delete a file."""
        file_id = request.path_params["id"]
        await self._store.delete_file(caller(), file_id)
        return JsonResponse(FileDeleted(id=file_id))


class BatchRoutes(Endpoints):
    """Create, list, read and cancel batches."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        batches: Batches = service.shared[Batches]
        self._store, self._jobs = batches.store, batches.jobs

    @post("/v1/batches", BatchBody, body=CreateBatch, errors=(*GENERATES, 507))
    async def create(self, request: Request) -> Response:
        """Answer the requests of a file in the background."""
        body = await self.service.read(request, decode_batch)
        await self._jobs.resume()
        return JsonResponse(await self._jobs.create(body))

    @get("/v1/batches", BatchList, query=("limit", "after"), errors=(503,))
    async def index(self, request: Request) -> Response:
        """Return batches of the caller, newest first."""
        page = _page(request)
        await self._jobs.resume()
        data, has_more = await self._store.listed(BatchBody, caller(), page)
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return JsonResponse(BatchList(data=data, has_more=has_more, first_id=first, last_id=last))

    @get("/v1/batches/{id}", BatchBody, errors=ERRORS)
    async def retrieve(self, request: Request) -> Response:
        """Return a batch: its status and how many of its requests were answered."""
        await self._jobs.resume()
        return JsonResponse(await self._store.find(BatchBody, caller(), request.path_params["id"]))

    @post("/v1/batches/{id}/cancel", BatchBody, errors=ERRORS)
    async def cancel(self, request: Request) -> Response:
        """Cancel a batch. Its answers are kept."""
        await self._jobs.resume()
        return JsonResponse(await self._jobs.cancel(request.path_params["id"]))


def _page(request: Request) -> Page:
    """Return the page given by ``limit`` and ``after``. Raises `InvalidRequest`."""
    return Page(page_limit(request), request.query_params.get("after"))
