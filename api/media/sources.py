"""Images that requests name by a data URL or by a file in the server's media folder.

In the text of a message, each image is replaced by a mark. The mark contains a hash of the image's
URL and detail, so a message has the same text in every turn and can be compared as text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from ...core.errors import InvalidRequest

Detail = Literal["low", "high", "auto"]
MAX_FILE_BYTES = 64 * 2**20
_MARK = re.compile("\ue000image:([0-9a-f]{64})\ue001")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[\w.+-]+)*)(;base64)?,")
UNHEARD = ("input_audio", "audio_url", "input_video", "video_url")
"""Types of parts that no model here accepts; an answer that ignored them would mislead the user."""

UNREAD = "[a file that this model cannot read]"
TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")
_NAMED = 40  # number of characters of a URL that an error message quotes


@dataclass(frozen=True)
class ImageSource:
    """An image in a request. ``param`` is the field of the body that contains its URL."""

    url: str
    param: str
    detail: Detail = "auto"

    @cached_property
    def digest(self) -> str:
        """The identifier in the image's mark: 64 hexadecimal digits."""
        return hashlib.sha256(f"{self.detail} {self.url}".encode()).hexdigest()

    @property
    def mark(self) -> str:
        """The text that stands for the image in a message."""
        return f"\ue000image:{self.digest}\ue001"

    def refusal(self, why: str) -> InvalidRequest:
        """Return an error that names the field and the reason ``why``."""
        return InvalidRequest(f"{self.param}: {why}", param=self.param)

    def read(self, media_dir: Path | None) -> bytes:
        """Return the bytes of the image.

        ``media_dir`` is the folder from which ``file://`` URLs may be read. Raises `InvalidRequest`
        for another kind of URL, for malformed base64, and for a file that is missing, too large or
        outside the folder.
        """
        if self.url.startswith("data:"):
            return self._decoded()
        if self.url.startswith("file:"):
            return self._file(media_dir)
        if self.url.startswith(("http:", "https:")):
            raise self.refusal("the server does not fetch images; send a data URL")
        raise self.refusal("an image must be a data URL: data:image/png;base64,...")

    def _decoded(self) -> bytes:
        found = _DATA_URL.match(self.url, 0, 256)
        if found is None or not found[3]:
            raise self.refusal("a data URL must be base64: data:image/png;base64,...")
        if found[1] is not None and not found[1].startswith("image/"):
            raise self.refusal(f"{found[1][:_NAMED]} is not an image")
        try:
            return base64.b64decode(self.url[found.end() :], validate=True)
        except (binascii.Error, ValueError):
            raise self.refusal("the data URL is not valid base64") from None

    def _file(self, media_dir: Path | None) -> bytes:
        if media_dir is None:
            raise self.refusal("files cannot be read: the server runs without --media-dir")
        parts = urlsplit(self.url)
        try:
            root = media_dir.resolve(strict=True)
            path = Path(unquote(parts.path)).resolve(strict=True)  # resolves links and `..`
            is_inside = parts.netloc in ("", "localhost") and path.is_relative_to(root)
            if not is_inside or not path.is_file():
                raise FileNotFoundError
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        # also a path with a null byte, or circular links
        except (OSError, ValueError, RuntimeError):
            raise self.refusal("there is no such file in the media folder") from None
        if len(data) > MAX_FILE_BYTES:
            raise self.refusal(f"the file is larger than {MAX_FILE_BYTES} bytes")
        return data


def file_text(data: str | None, name: str | None) -> str | None:
    """Return the text of a file sent as a data URL; None if ``data`` is None or is not text."""
    found = _DATA_URL.match(data or "", 0, 256)
    if data is None or found is None or not (found[1] or "text/plain").startswith(TEXT_TYPES):
        return None
    rest = data[found.end() :]
    try:
        text = base64.b64decode(rest, validate=True).decode() if found[3] else unquote(rest)
    except (binascii.Error, ValueError):
        return None
    return f"File: {name}\n{text}" if name else text


def unread_file(name: str | None) -> str:
    """Return the note that replaces a file whose contents are not text."""
    return f"[a file that this model cannot read: {name}]" if name else UNREAD


def read_part(part: object, where: str) -> str | ImageSource:
    """Return the text or the image of a content part in OpenAI's form.

    Raises `InvalidRequest`, which names the field ``where``, for any other part.
    """
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": "file", "file": {"file_data": str(data), **more}}:
            name = more.get("filename")
            read = file_text(data, name if isinstance(name, str) else None)
            if read is None:
                raise InvalidRequest(f"{where}: a file must be a data URL of text", param=where)
            return read
        case {"type": "image_url", "image_url": {"url": str(url), **more}}:
            detail = more.get("detail")
            return ImageSource(url, where, detail if detail in ("low", "high") else "auto")
    message = f"{where}: a part must be a text, or an image_url with a url"
    raise InvalidRequest(message, param=where)


class Placed(NamedTuple):
    """The content of a message as text with marks in place of images, and the images in order."""

    text: str
    images: list[ImageSource]


def join_parts(parts: Sequence[str | ImageSource]) -> Placed:
    """Join the parts of a message into one text; neighbouring texts are put on separate lines."""
    pieces: list[str] = []
    for index, part in enumerate(parts):
        if isinstance(part, ImageSource):
            pieces.append(part.mark)
        elif index and isinstance(parts[index - 1], str):
            pieces.append(f"\n{part}")
        else:
            pieces.append(part)
    return Placed("".join(pieces), [part for part in parts if isinstance(part, ImageSource)])


def split_marks(text: str, known: Mapping[str, ImageSource]) -> list[str | ImageSource]:
    """Split a text at the marks of known images; unknown marks remain text."""
    parts: list[str | ImageSource] = []
    begin = at = 0
    while (found := _MARK.search(text, at)) is not None:
        at = found.end()
        if found[1] not in known:
            continue
        if begin < found.start():
            parts.append(text[begin : found.start()])
        parts.append(known[found[1]])
        begin = at
    return [*parts, text[begin:]] if begin < len(text) else parts


def template_parts(parts: Sequence[str | ImageSource]) -> list[dict[str, Any]]:
    """Return the parts as objects in the form that chat templates read."""
    return [
        {"type": "image"} if isinstance(part, ImageSource) else {"type": "text", "text": part}
        for part in parts
    ]
