"""Bodies with a Content-Encoding or a byte-order mark, and targets that name the server."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from foretoken.api.serving import content_coding
from foretoken.api.serving.content_coding import MAX_STREAMS, TooLarge, decode_body
from foretoken.api.serving.errors import ApiError
from support.raw_http import RawClient, head

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
gzipped = partial(gzip.compress, mtime=0)  # the same bytes in every worker
GZIP = gzipped(BODY)
BARE = zlib.compress(BODY)[2:-4]  # deflate as some clients understand it


def post(server: Any, content: bytes, coding: str, path: str = "/v1/chat/completions") -> Any:
    headers = {"content-type": "application/json", "content-encoding": coding}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=20)


@pytest.mark.parametrize(
    ("coding", "content"),
    [
        ("gzip", GZIP), ("GZIP", GZIP), ("x-gzip", GZIP), ("gzip, identity", GZIP),
        ("gzip", gzipped(BODY[:9]) + gzipped(BODY[9:])),
        ("deflate", zlib.compress(BODY)), ("deflate", BARE), ("identity", BODY), ("", BODY),
        ("deflate, gzip", gzipped(zlib.compress(BODY))),
    ],
)  # fmt: skip
def test_bodies_are_decoded(server: Any, coding: str, content: bytes) -> None:
    assert post(server, content, coding).status_code == 200


@pytest.mark.parametrize("coding", ["br", "zstd2", "gzip, br", "gzip, gzip, gzip", "utf-8"])
def test_other_codings_are_415_and_name_those_that_are_known(server: Any, coding: str) -> None:
    answer = post(server, gzip.compress(BODY), coding)
    assert answer.status_code == 415
    assert "Content-Encoding" in answer.json()["error"]["message"]
    assert "gzip" in answer.headers["accept-encoding"]


@pytest.mark.parametrize(
    "content", [BODY, gzip.compress(BODY)[:-1], b"", gzip.compress(BODY) + b"x"], ids=range(4)
)
def test_what_is_not_of_its_coding_is_400(server: Any, content: bytes) -> None:
    answer = post(server, content, "gzip")
    assert answer.status_code == 400
    assert "not valid gzip" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_bomb_is_413_and_is_not_unpacked(serve: Any, path: str) -> None:
    server = serve(max_body_bytes=1000)
    for packed in (gzip.compress(b" " * 10**8), zlib.compress(b" " * 1001)):
        coding = "gzip" if packed.startswith(b"\x1f\x8b") else "deflate"
        answer = post(server, gzip.compress(packed), f"{coding}, gzip", path)
        assert answer.status_code == 413
        assert "--max-body-bytes" in answer.text
    assert post(server, gzip.compress(BODY.ljust(1000)), "gzip").status_code == 200


def test_no_more_is_decoded_than_may_be_there() -> None:
    assert decode_body(gzip.compress(b"x" * 100), "gzip", 100) == b"x" * 100
    with pytest.raises(TooLarge):
        decode_body(gzip.compress(b"x" * 101), "gzip", 100)
    many = gzip.compress(b"x") * MAX_STREAMS
    assert decode_body(many, "gzip", 100) == b"x" * MAX_STREAMS
    with pytest.raises(TooLarge):
        decode_body(many, "gzip", MAX_STREAMS - 1)
    with pytest.raises(ApiError, match="more than"):  # each would copy all that is behind it
        decode_body(many + gzip.compress(b"x"), "gzip", 100)


@pytest.fixture
def zstd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module as those of the standard library, for zlib's format."""

    class Wrong(Exception):
        pass

    class Decompressor:
        def __init__(self) -> None:
            self._inflater = zlib.decompressobj()

        def decompress(self, data: bytes, max_length: int) -> bytes:
            if not data.startswith(b"x"):
                raise Wrong("no frame")
            return self._inflater.decompress(data, max_length)

        eof = property(lambda self: self._inflater.eof)
        unused_data = property(lambda self: self._inflater.unused_data)

    module = SimpleNamespace(ZstdDecompressor=Decompressor, ZstdError=Wrong)
    monkeypatch.setattr(content_coding.importlib, "import_module", lambda _: module)
    content_coding._codings.cache_clear()
    yield
    content_coding._codings.cache_clear()


@pytest.mark.usefixtures("zstd")
def test_zstd_is_decoded_where_python_has_it() -> None:
    assert decode_body(zlib.compress(b"abc"), "zstd", 10) == b"abc"
    with pytest.raises(ApiError, match="not valid zstd") as caught:
        decode_body(b"abc", "zstd", 10)
    assert caught.value.status == 400
    with pytest.raises(ApiError) as caught:
        decode_body(b"abc", "br", 10)
    assert caught.value.headers == {"accept-encoding": "gzip, deflate, zstd"}


def test_a_byte_order_mark_is_ignored(server: Any) -> None:
    mark = b"\xef\xbb\xbf"
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        body = b'{"prompt": "x"}' if path == "/tokenize" else BODY
        answer = post(server, mark + body, "", path)
        assert answer.status_code == 200, answer.text
    assert post(server, gzip.compress(mark + BODY), "gzip").status_code == 200
    assert post(server, mark, "").status_code == 400


# -- targets --------------------------------------------------------------------------------------


def ask(server: Any, target: str, *fields: str) -> Any:
    with RawClient(server.url) as client:
        return client.send(head(target, *fields, key="")).answer()


@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
def test_targets_may_name_the_server(serve: Any, scheme: str) -> None:
    server = serve(root_path="/llm")
    for path in ("/v1/models", "/v1/models?limit=1", "/llm/v1/models", "/v1/models/tiny/model"):
        assert ask(server, f"{scheme}://127.0.0.1:{server.port}{path}").status == 200
    assert ask(server, f"{scheme}://localhost/nowhere").status == 404
    assert ask(server, f"{scheme}://localhost").status == 200, "the page"
    assert ask(server, f"{scheme}://localhost?x=1").status == 200


def test_the_name_in_a_target_goes_before_that_of_the_header(serve: Any) -> None:
    server = serve(loopback_only=True)
    assert ask(server, "http://evil.example/v1/models").status == 403
    assert ask(server, "http://x@evil.example/v1/models").status == 403
    assert ask(server, "http://localhost@evil.example/v1/models").status == 403
    assert ask(server, "http://localhost/v1/models").status == 200


def test_a_target_that_names_the_server_needs_the_key(serve: Any) -> None:
    server = serve(api_keys=("k",))
    for target in ("/v1/models", "/health/../v1/models", "/v1/models?/health", "//health"):
        assert ask(server, f"http://localhost{target}").status == 401
    assert ask(server, "http://localhost/health").status == 200
    assert ask(server, "http://localhost/v1/models", "X-Api-Key: k").status == 200
