"""Read an uploaded file out of a multipart/form-data body (RFC 7578)."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from typing import NamedTuple

from ....core.errors import InvalidRequest

MAX_PARTS = 16


class Part(NamedTuple):
    """A field of a form."""

    data: bytes
    filename: str | None = None


def read_form(content_type: str, body: bytes) -> dict[str, Part]:
    """The fields by name. Raises `InvalidRequest` for another type, and for a broken body."""
    header = _message(f"content-type: {content_type}\n\n")
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise InvalidRequest("the body must be multipart/form-data with a boundary", param="file")
    mark = b"--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(b"\r\n" + mark)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise InvalidRequest("the form ends without its last boundary", param="file")
    if len(pieces) > MAX_PARTS:
        raise InvalidRequest(f"the form has more than {MAX_PARTS} fields", param="file")
    return dict(_part(piece) for piece in pieces[1:-1])


def _part(piece: bytes) -> tuple[str, Part]:
    head, found, data = piece.partition(b"\r\n\r\n")
    header = _message(head.lstrip(b"\r\n ").decode("utf-8", "replace") + "\n\n")
    name = header.get_param("name", header="content-disposition")
    if not found or not isinstance(name, str):
        raise InvalidRequest("a field of the form has no name", param="file")
    filename = header.get_param("filename", header="content-disposition")
    return name, Part(data, filename if isinstance(filename, str) else None)


def _message(text: str) -> Message:
    return HeaderParser().parsestr(text)
