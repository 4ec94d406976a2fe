"""The server of a load, started here if none is given, and the figures that it reports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from .corpus import Encode
from .http import Failure, Http

START_SECONDS = 300.0
STOP_SECONDS = 30.0
SAMPLE_SECONDS = 0.5
_URL = re.compile(r"http://[^\s/]+:\d+(?=\s|$)")
_PAGE = re.compile(rb'^\w+:cache_config_info\{[^}]*\bblock_size="(\d+)"', re.MULTILINE)
_USAGE = re.compile(rb"^(\w+):kv_cache_usage_perc(?:\{[^}]*\})? ([0-9.eE+-]+)", re.MULTILINE)


def environment() -> dict[str, str]:
    """Return the environment of a server whose start is timed.

    It allows bytecode caches, as a user's environment does: `PYTHONDONTWRITEBYTECODE` would add
    half a second.
    """
    given = os.environ | {"PYTHONUNBUFFERED": "1"}
    return {name: value for name, value in given.items() if name != "PYTHONDONTWRITEBYTECODE"}


@contextlib.contextmanager
def own_server(args: Sequence[str]) -> Iterator[str]:
    """Start ``foretoken serve`` on a free port of the loopback interface; yield its address."""
    command = [sys.executable, "-m", "foretoken.api.cli.commands", "serve", *args, "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    output = _Output(process)
    try:
        yield output.url()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.close()


class _Output:
    """Reads the output of a server all the time, so that the server never blocks on it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=20)
        self._url: str | None = None
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if self._url is None and (found := _URL.search(line)):
                self._url = found[0]
                self._known.set()
        self._known.set()  # The output has ended, so no address will come.

    def url(self) -> str:
        """Return the address once the server is ready.

        Raises SystemExit with its output if it fails.
        """
        self._known.wait(START_SECONDS)
        if self._url is None:
            raise SystemExit(f"the server did not start:\n{''.join(self._lines)}")
        return self._url

    def close(self) -> None:
        self._thread.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


# -- what a server tells ------------------------------------------------------------------------


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def wait_healthy(http: Http, seconds: float) -> None:
    """Wait until /health returns 200. A server without that route counts as healthy."""
    try:
        async with asyncio.timeout(seconds):
            while (await _health(http)) >= 500:  # noqa: ASYNC110 - readiness can only be polled
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise SystemExit(
            f"the server at {http.host}:{http.port} did not become healthy in time"
        ) from None


async def _health(http: Http) -> int:
    try:
        return (await http.get("/health"))[0]
    except Failure as failure:
        raise SystemExit(f"{http.host}:{http.port}: {failure}") from None


async def first_model(http: Http, wanted: str | None) -> tuple[str, int | None]:
    """Return a model's name and longest context, if reported; by default the first model's."""
    status, body = await http.get("/v1/models")
    found: list[_Model] = []
    if status == 200:
        with contextlib.suppress(msgspec.DecodeError):
            found = msgspec.json.decode(body, type=_Models).data
    named = [model for model in found if wanted in (None, model.id)]
    if named:
        return named[0].id, named[0].max_model_len
    if wanted is not None:
        return wanted, None
    raise SystemExit(f"/v1/models lists no model (status {status}); name one with --model")


async def page_size(http: Http) -> int:
    """Return the page size of the prefix cache as foretoken and vLLM report it, else 1."""
    found = _PAGE.search((await http.get("/metrics"))[1])
    return int(found[1]) if found is not None else 1


async def server_encode(http: Http, model: str) -> Encode | None:
    """Return a function that tokenises by POST /tokenize (foretoken, vLLM, SGLang); else None."""

    async def encode(text: str) -> list[int]:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        status, answer = await http.post_whole("/tokenize", msgspec.json.encode(body))
        if status != 200:
            raise Failure(f"HTTP {status} of /tokenize", answer[:200].decode("utf-8", "replace"))
        return msgspec.json.decode(answer, type=_Tokens).tokens

    try:
        found = await encode("def main():\n")
    except (Failure, msgspec.DecodeError):
        return None
    return encode if found else None


@dataclass(slots=True)
class KvUsage:
    """Sampled shares of the KV pool in use, from 0 to 1."""

    shares: list[float] = field(default_factory=list)
    source: str = ""

    def read(self, metrics: bytes) -> bool:
        """Take a sample from Prometheus text; return whether it has one."""
        found = _USAGE.search(metrics)
        if found is not None:
            self.source = f"{found[1].decode()}:kv_cache_usage_perc"
            self.shares.append(float(found[2]))
        return found is not None

    def figures(self) -> dict[str, float] | None:
        """Return mean and maximum; None if nothing was reported."""
        if not self.shares:
            return None
        return {"mean": sum(self.shares) / len(self.shares), "max": max(self.shares)}


@contextlib.asynccontextmanager
async def sampled(http: Http) -> AsyncIterator[KvUsage]:
    """Sample /metrics twice a second; stop if it does not report the KV pool."""
    usage = KvUsage()

    async def sample() -> None:
        while usage.read((await http.get("/metrics"))[1]):  # noqa: ASYNC110 - polled by design
            await asyncio.sleep(SAMPLE_SECONDS)

    task = asyncio.create_task(sample())
    try:
        yield usage
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Failure):
            await task
