"""Decompress bodies that have a Content-Encoding, within a limit on their size."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, Protocol

from .errors import ApiError

MAX_CODINGS = 2  # maximum number of nested codings of one body
MAX_STREAMS = 16  # maximum number of concatenated streams in one body
ZSTD_MODULES = ("compression.zstd", "backports.zstd")  # compression.zstd is part of Python 3.14
IDENTITY = "identity"


class TooLarge(Exception):  # noqa: N818 - callers translate it to an `ApiError`
    """Raised if a decompressed body would exceed the limit."""


class Inflater(Protocol):
    """A decompressor of one stream, with the interface of `zlib.decompressobj`."""

    @property
    def eof(self) -> bool:
        """Whether the stream has ended."""

    @property
    def unused_data(self) -> bytes:
        """Data after the end of the stream."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Return the next decompressed bytes, at most ``max_length``."""


def decode_body(data: bytes, coding: str, most: int) -> bytes:
    """Return the body of a request with this Content-Encoding.

    Raises `ApiError` 415 for an unknown coding and 400 for invalid data, and `TooLarge` if the body
    would exceed ``most`` bytes. At most ``most`` + 1 bytes are decompressed.
    """
    names = _names(coding)
    known = _codings()
    if len(names) > MAX_CODINGS or any(name not in known for name in names):
        raise _unknown(coding)
    for name in reversed(names):
        try:
            data = known[name](data, most)
        except (zlib.error, EOFError, ValueError) as error:
            message = f"Content-Encoding is {name}, but the body is not valid {name}: {error}"
            raise ApiError(400, message, param="Content-Encoding") from None
    return data


def refuse_coding(coding: str) -> None:
    """Raise `ApiError` 415 if there is a coding, for routes that do not decompress bodies."""
    if _names(coding):
        raise ApiError(
            415,
            f"Content-Encoding: {coding} is not supported by this route",
            param="Content-Encoding",
        )


def _names(coding: str) -> list[str]:
    names = [each.strip().lower() for each in coding.split(",")]
    return [name for name in names if name not in ("", IDENTITY)]


def _unknown(coding: str) -> ApiError:
    accepted = ", ".join(name for name in _codings() if not name.startswith("x-"))
    message = f"Content-Encoding: {coding} is not supported; send {accepted}, or no coding"
    return ApiError(415, message, param="Content-Encoding", headers={"accept-encoding": accepted})


Decode = Callable[[bytes, int], bytes]


@cache
def _codings() -> Mapping[str, Decode]:
    """Return the decoders that are available, by the name of their coding."""
    found: dict[str, Decode] = {"gzip": _gunzip, "x-gzip": _gunzip, "deflate": _inflate}
    for name in ZSTD_MODULES:
        with suppress(ImportError):
            found["zstd"] = partial(_unzstd, importlib.import_module(name))
            break
    return found


def _gunzip(data: bytes, most: int) -> bytes:
    return _read_streams(data, most, lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS))


def _inflate(data: bytes, most: int) -> bytes:
    """Decompress the zlib format, which HTTP calls deflate, or the raw deflate of some clients."""
    has_header = (
        len(data) >= 2 and data[0] & 0xF == zlib.DEFLATED and not ((data[0] << 8 | data[1]) % 31)
    )
    wbits = zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
    return _read_streams(data, most, lambda: zlib.decompressobj(wbits=wbits))


def _unzstd(zstd: Any, data: bytes, most: int) -> bytes:  # noqa: ANN401 - one of two modules
    try:
        return _read_streams(data, most, zstd.ZstdDecompressor)
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from None


def _read_streams(data: bytes, most: int, make: Callable[[], Inflater]) -> bytes:
    """Decompress all concatenated streams.

    Raises EOFError for a truncated stream and ValueError for more than `MAX_STREAMS`: each stream
    copies the data after it, so many tiny streams would take quadratic time.
    """
    parts: list[bytes] = []
    size = 0
    while data or not parts:
        if len(parts) == MAX_STREAMS:
            raise ValueError(f"it consists of more than {MAX_STREAMS} streams")
        inflater = make()
        part = inflater.decompress(data, most - size + 1)
        size += len(part)
        if size > most:
            raise TooLarge
        if not inflater.eof:
            raise EOFError("the data ends too early")
        parts.append(part)
        data = inflater.unused_data
    return b"".join(parts)
