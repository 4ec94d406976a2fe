"""Read an uploaded file from a form, through a temporary file."""

from __future__ import annotations

import errno
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import IO, NamedTuple

import msgspec
import python_multipart  # noqa: F401 - starlette would report it missing only at the first upload
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ....core.errors import InvalidRequest
from ...serving.bodies import chunks, content_coding
from ...serving.content_coding import refuse_coding
from ...serving.limits import Limits
from .bodies import ExpiresAfter
from .database import DiskFull
from .store import BatchStore

MAX_FIELDS = 16
MAX_FIELD_BYTES = 2**12  # maximum size of a field that is not a file
MEMORY_BYTES = 2**16  # larger files are spooled to disk
FULL = (errno.ENOSPC, errno.EDQUOT)
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class Upload(NamedTuple):
    """An uploaded file and the other fields of its form."""

    content: IO[bytes]
    num_bytes: int
    filename: str
    purpose: str
    expires_after: ExpiresAfter | None


class _Form(MultiPartParser):
    """A form parser that detects truncated forms."""

    spool_max_size = MEMORY_BYTES
    is_complete = False

    def on_end(self) -> None:
        self.is_complete = True


@asynccontextmanager
async def reading(request: Request, limits: Limits, store: BatchStore) -> AsyncIterator[Upload]:
    """Yield the file of a form. It is deleted at the end of the block.

    Raises `ClientGone`, `InvalidRequest` for other content, and `ApiError`: 413 for a file that is
    too large, 415 for a compressed body, 507 if the disk for temporary files is full.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise InvalidRequest("the body must be multipart/form-data with a file", param="file")
    if coding := content_coding(request):
        refuse_coding(coding)
    room = await store.check_room()
    with store.arriving() as arrival:

        async def arriving() -> AsyncGenerator[bytes]:
            async with aclosing(chunks(request, limits, "max_file_bytes")) as parts:
                async for part in parts:
                    arrival.count(len(part), room)
                    yield part
            if not parser.is_complete:
                raise MultiPartException("the final boundary is missing")

        parser = _Form(
            request.headers,
            arriving(),
            max_files=1,
            max_fields=MAX_FIELDS,
            max_part_size=MAX_FIELD_BYTES,
        )
        form = await _parsed(parser)
        try:
            yield _upload_in(form)
        finally:
            await form.close()


async def _parsed(parser: _Form) -> FormData:
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form is invalid: {error.message}", param="file") from None
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull from error
        raise


def _upload_in(form: FormData) -> Upload:
    """Return the upload of a form. Raises `InvalidRequest`, which names the wrong field."""
    file, purpose = form.get("file"), form.get("purpose")
    if purpose != "batch":
        raise InvalidRequest("purpose must be batch", param="purpose")
    if not isinstance(file, UploadFile) or not file.size:
        raise InvalidRequest(
            "file is required, must have a name and must not be empty", param="file"
        )
    return Upload(
        content=file.file,
        num_bytes=file.size,
        filename=(file.filename or "upload.jsonl")[:256],
        purpose=purpose,
        expires_after=_expiry_in(form),
    )


def _expiry_in(form: FormData) -> ExpiresAfter | None:
    """Return ``expires_after``, given as separate form fields or as one JSON object."""
    given = {"anchor": form.get(ANCHOR), "seconds": form.get(SECONDS)}
    whole = form.get("expires_after")
    try:
        if isinstance(whole, str):
            return msgspec.json.decode(whole, type=ExpiresAfter)
        if given == {"anchor": None, "seconds": None}:
            return None
        return msgspec.convert(given, ExpiresAfter, strict=False)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"expires_after: {error}", param="expires_after") from None
