"""Bodies and answers of /v1/files and /v1/batches, and the lines of a batch's files."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from ...serving.sampling import Label

Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip


class ExpiresAfter(Struct, kw_only=True):
    """The lifetime of a file: from an hour to thirty days after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class UploadForm(Struct, kw_only=True):
    """Form of POST /v1/files."""

    file: bytes
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileBody(Struct, kw_only=True):
    """A file. Times are Unix times in seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int


class FileList(Struct, kw_only=True):
    """Files of the caller, newest first."""

    object: Literal["list"] = "list"
    data: list[FileBody]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(Struct, kw_only=True):
    """Whether a file was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class CreateBatch(Struct, kw_only=True):
    """Body of POST /v1/batches."""

    input_file_id: Label
    endpoint: Label
    completion_window: Literal["24h"] = "24h"
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class LineError(Struct, kw_only=True):
    """An error in a batch. ``line``: line number in the input, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(Struct, kw_only=True):
    """The errors of an input file."""

    object: Literal["list"] = "list"
    data: list[LineError]


class Counts(Struct, kw_only=True):
    """Number of requests in a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchBody(Struct, kw_only=True):
    """A batch. Times are Unix times in seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    status: Status = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: LineErrors | None = None
    request_counts: Counts
    metadata: dict[str, str] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the batch has reached a final status."""
        return self.status in ("failed", "completed", "expired", "cancelled")


class BatchList(Struct, kw_only=True):
    """Batches of the caller, newest first."""

    object: Literal["list"] = "list"
    data: list[BatchBody]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class InputLine(Struct, kw_only=True):
    """One request of an input file."""

    custom_id: Label
    url: str
    body: Raw
    method: Literal["POST"] = "POST"


class LineResponse(Struct, kw_only=True):
    """The answer to one request: its HTTP status, its id and its body."""

    status_code: int
    request_id: str
    body: Any


class OutputLine(Struct, kw_only=True):
    """One line of an output or an error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the request was answered without an error."""
        return self.response is not None and self.response.status_code == HTTPStatus.OK
