"""Servers publish what their caches keep, and vllm-router sends requests where their prefix is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from support.forked import code, command, run_forked
from support.kv_subscriber import SECONDS, KVSubscriber, free_address
from support.plain_http import get, opened, post
from support.server_process import Server, running

SMALL = ["--kv-tokens", "2048", "--max-model-len", "1024", "--threads", "1"]
PAGE_SIZE = 16
MODEL = "foretoken-builtin"
ROUTER = os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")
"""The command of vllm-router 0.1.17, from an environment of its own."""
DYNAMO = os.environ.get("DYNAMO_PYTHON")
"""The Python of an environment of its own that has ai-dynamo-runtime 1.6.1."""
SELECTION = Path(__file__).parents[1] / "support" / "dynamo_selection.py"


class Publishing:
    """A server that publishes, and a reader of its events."""

    def __init__(self, server: Server, address: str, replay_address: str) -> None:
        self.server, self.url = server, server.url
        self.address, self.replay_address = address, replay_address
        self.reader = KVSubscriber(address, replay_address)

    def complete(self, prompt: str, **options: object) -> dict[str, Any]:
        """Usage of a completion, once its pages are published."""
        num_pages = len(self.reader.kept)
        usage = complete(self.url, prompt, **options)
        if "cache_salt" not in options:
            written = usage["prompt_tokens_details"]["cache_write_tokens"]
            self.reader.wait_for_pages(num_pages + written // PAGE_SIZE)
        return usage


@contextlib.contextmanager
def publishing() -> Iterator[Publishing]:
    addresses = free_address(), free_address()
    flags = ["--kv-events", addresses[0], "--kv-events-replay", addresses[1]]
    with running([*SMALL, *flags]) as server:
        made = Publishing(server, *addresses)
        with made.reader:
            yield made


def complete(url: str, prompt: str, **options: object) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, **options}
    usage: dict[str, Any] = post(url, "/v1/completions", body).json["usage"]
    return usage


def text(index: int) -> str:
    """A prompt of some pages that shares no page with another index."""
    return f"file {index}\n" + f"def f{index}(x): return x + {index}\n" * 12


def test_a_server_publishes_the_pages_of_a_completion_and_their_end() -> None:
    with publishing() as one:
        tokens = post(one.url, "/tokenize", {"model": MODEL, "prompt": text(0)}).json["tokens"]
        one.complete("not for others " * 20, cache_salt="a")
        one.complete(text(0))
        whole = len(tokens) // PAGE_SIZE * PAGE_SIZE
        ends = range(PAGE_SIZE, whole + 1, PAGE_SIZE)
        assert one.reader.texts()[: len(ends)] == [tuple(tokens[:end]) for end in ends]
        assert len(one.reader.texts()) * PAGE_SIZE <= len(tokens) + 2
        post(one.url, "/cache/flush", {})
        while one.reader.texts():
            one.reader.receive()
        assert one.server.stop() == 0


def test_events_are_an_option_of_the_sdk() -> None:
    options = {"kv_events": free_address(), "kv_events_replay": free_address()}
    with (
        LLM("builtin", kv_tokens=2048, max_model_len=1024, threads=1, **options) as llm,
        KVSubscriber(*options.values()) as reader,
    ):
        done = llm.generate(text(1), SamplingParams(max_tokens=2))
        reader.wait_for_pages(done.usage.prompt_tokens // PAGE_SIZE)
    with LLM("builtin", kv_tokens=2048, max_model_len=1024, threads=1, **options) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=1)).token_ids


def test_a_taken_address_exits_2_with_one_line_before_the_model_is_loaded() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        done = run_forked(command, "serve", "builtin", "--port", "0", "--kv-events", address)
    assert (done.returncode, done.stdout) == (2, "")
    reason = f"kv_events: cannot listen on {address}: address already in use"
    assert done.stderr == f"foretoken serve: {reason}\n"


def test_without_the_extra_the_command_exits_2_and_names_it() -> None:
    done = run_forked(
        code,
        "import sys; sys.modules['zmq'] = None\n"
        "from foretoken.api.cli.commands import main\n"
        "sys.exit(main(['serve', 'builtin', '--port', '0', '--kv-events', 'tcp://127.0.0.1:0']))",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "kv_events needs the extra events: pip install 'foretoken[events]'" in done.stderr


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    done = run_forked(
        code,
        "import sys\n"
        "from foretoken import LLM\n"
        "with LLM('builtin', kv_tokens=2048, threads=1) as llm: assert llm.generate('x')\n"
        "print([each for each in sys.modules if each == 'zmq' or 'core.tiers' in each])",
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# -- Dynamo ---------------------------------------------------------------------------------------


@pytest.mark.skipif(DYNAMO is None, reason="DYNAMO_PYTHON names no Python with ai-dynamo-runtime")
def test_dynamo_learns_what_a_silent_server_published_before_it_came() -> None:
    assert DYNAMO is not None
    with publishing() as one:
        tokens = post(one.url, "/tokenize", {"model": MODEL, "prompt": text(0)}).json["tokens"]
        one.complete(text(0))
        whole = len(tokens) // PAGE_SIZE * PAGE_SIZE
        asked = [one.address, one.replay_address, json.dumps([*tokens, 9]), str(whole)]
        done = subprocess.run(
            [DYNAMO, str(SELECTION), *asked], capture_output=True, text=True, timeout=60, check=True
        )
    assert json.loads(done.stdout)["longest_matched"] == whole


# -- vllm-router --------------------------------------------------------------------------------


class Router:
    """vllm-router in front of some servers, started late."""

    def __init__(self, output: int, url: str, metrics_url: str) -> None:
        self.url, self._metrics_url, self._output = url, metrics_url, output
        self._seen: dict[str, int] = {}  # the last sequence number by worker
        self._rest = ""

    def wait_for_events_of(self, one: Publishing) -> None:
        """Wait until it says that it has read what our reader has."""
        self._read_until(lambda: self._seen.get(one.url, -1) >= one.reader.last)

    def wait_until_it_listens(self) -> None:
        """Wait for its first good answer."""
        deadline = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError):
                if get(self.url, "/health").status == 200:
                    return
            assert time.monotonic() < deadline, "the router did not start"

    def lookups(self) -> dict[str, int]:
        """Numbers of look-ups that hit and missed."""
        shown = get(self._metrics_url, "/metrics").content.decode()
        found = re.findall(r'kv_placement_lookups_total\{result="(\w+)"\} (\d+)', shown)
        return {result: int(count) for result, count in found}

    def _read_until(self, is_met: Any) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while not is_met():
                assert selector.select(SECONDS), "the router says nothing"
                self._read()

    def _read(self) -> None:
        shown = self._rest + os.read(self._output, 2**16).decode(errors="replace")
        *lines, self._rest = re.sub(r"\x1b\[\d+m", "", shown).split("\n")
        for line in lines:
            if found := re.search(r"sequence advanced source=(\S+) rank=0 seq=(\d+)", line):
                self._seen[found[1]] = int(found[2])


@contextlib.contextmanager
def routing(*servers: Publishing | Server, policy: str = "kv_aware") -> Iterator[Router]:
    assert ROUTER is not None
    port, metrics_port = (free_address().rpartition(":")[2] for _ in range(2))
    flags = ["--host", "127.0.0.1", "--port", port, "--log-level", "debug"]
    flags += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port]
    flags += ["--policy", policy, "--worker-urls", *(one.url for one in servers)]
    for one in servers:
        if isinstance(one, Publishing):
            flags += ["--kv-event-source", f"{one.url}={one.address}"]
            flags += ["--kv-event-replay-source", f"{one.url}={one.replay_address}"]
    if policy == "kv_aware":
        flags += ["--kv-event-model", MODEL, "--kv-event-block-size", str(PAGE_SIZE)]
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [ROUTER, *flags], stdout=writing, stderr=writing, start_new_session=True
    )
    os.close(writing)
    try:
        urls = (f"http://127.0.0.1:{each}" for each in (port, metrics_port))
        router = Router(reading, *urls)
        router.wait_until_it_listens()
        yield router
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reading)


needs_router = pytest.mark.skipif(
    ROUTER is None, reason="vllm-router 0.1.17 is not on the PATH nor in VLLM_ROUTER"
)


@needs_router
def test_vllm_router_sends_a_prefix_to_the_server_that_has_it() -> None:
    with publishing() as first, publishing() as second:
        servers = first, second
        before = [each.complete(text(index)) for index, each in enumerate(servers)]
        with routing(*servers) as router:
            for each in servers:  # it came late to silent servers, and has missed all of it
                router.wait_for_events_of(each)
            for index, usage in enumerate(before):
                assert cached(router, index) == usage["prompt_tokens_details"]["cache_write_tokens"]
            for index in range(2, 6):
                usage = servers[index % 2].complete(text(index))
                router.wait_for_events_of(servers[index % 2])
                assert cached(router, index) == usage["prompt_tokens_details"]["cache_write_tokens"]
            assert router.lookups() == {"hit": 6}


@needs_router
def test_vllm_router_sends_a_prefix_to_where_it_sent_the_same_text_before() -> None:
    """The policy cache_aware compares texts and needs nothing of the servers."""
    with running(SMALL) as first, running(SMALL) as second:
        with routing(first, second, policy="cache_aware") as router:
            long = {"prompt": text(0), "max_tokens": 600, "ignore_eos": True, "stream": True}
            with opened(router.url, "POST", "/v1/completions", long) as answer:
                answer.readline()  # one server is busy, so the other gets a new text
                written = complete(router.url, text(1))["prompt_tokens_details"]
            assert cached(router, 1) == written["cache_write_tokens"]
            assert cached(router, 0) > 0
        for each in (first, second):
            shown = get(each.url, "/metrics").content.decode()
            [hits] = re.findall(r"^foretoken:prefix_cache_hits_total (\S+)$", shown, re.MULTILINE)
            assert float(hits) > 0


def cached(router: Router, index: int) -> int:
    """Tokens that the server that the router chose had in its cache."""
    usage = complete(router.url, text(index) + "x = 1\n")
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found
