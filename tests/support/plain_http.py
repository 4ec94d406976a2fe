"""HTTP as a client without a library sees it: bytes out, status, headers and JSON back."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

NO_HEADERS: Mapping[str, str] = {}


class Answer:
    """A status, lower-case headers and the bytes of the body."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.content = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> dict[str, Any]:
        """The error of the body; its shape is that of the contract."""
        error = self.json["error"]
        assert set(self.json) == {"error"}
        assert set(error) >= {"message", "type", "param", "code"}
        assert error["message"]
        assert isinstance(error["type"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        return error


@contextlib.contextmanager
def opened(
    url: str,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Iterator[http.client.HTTPResponse]:
    """The response as soon as its headers are there; leaving closes the connection."""
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    with contextlib.closing(connection):
        kind = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, body, {**kind, **headers})
        with connection.getresponse() as response:
            yield response


def get(url: str, path: str, headers: Mapping[str, str] = NO_HEADERS) -> Answer:
    with opened(url, "GET", path, None, headers) as response:
        return Answer(response)


def post(
    url: str, path: str, body: object = None, headers: Mapping[str, str] = NO_HEADERS
) -> Answer:
    with opened(url, "POST", path, body, headers) as response:
        return Answer(response)


def metrics(url: str, headers: Mapping[str, str] = NO_HEADERS) -> str:
    """The text of /metrics as one engine has it: a front adds the label of its only replica."""
    text = get(url, "/metrics", headers).content.decode()
    label = 'replica="1"'
    for labels, rest in ((f"{{{label}}}", ""), (f"{{{label},", "{"), (f",{label}", "")):
        text = text.replace(labels, rest)
    return text


def payloads(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the text behind ``data:`` in each event of a stream."""
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].decode().rstrip("\n")
        else:
            assert line == b"\n" or line.startswith(b":"), line


def chunks(url: str, path: str, body: Mapping[str, object]) -> list[dict[str, Any]]:
    """All chunks of a stream that ends as it should."""
    with opened(url, "POST", path, {**body, "stream": True}) as response:
        assert response.status == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, last = payloads(response)
        assert last == "[DONE]"
        return [json.loads(event) for event in events]
