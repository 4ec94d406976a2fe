"""The remote tier over a real Mooncake master, where its package and the system's libraries are."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from array import array
from collections.abc import Iterator

import pytest

from foretoken import LLM, AsyncLLM, Completion, SamplingParams
from foretoken.core.errors import InvalidRequest
from foretoken.core.tiers.keys import chain_keys, root_key, tag_of
from foretoken.core.tiers.stores.mooncake_store import MooncakeStore

MASTER = shutil.which("mooncake_master")


def _why_not() -> str:
    """Return why it cannot be tried here; empty if it can."""
    if MASTER is None:
        return "mooncake_master is not installed"
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake cannot be loaded: {error}"
    return ""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "it can be tried")
PAGE_BYTES = 1000


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a master that serves."""
    assert MASTER is not None
    port, admin = free_port(), free_port()
    arguments = [MASTER, "--rpc_port", str(port), "--metrics_port", str(admin)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as master:
        assert master.stderr is not None
        assert any("service_ready=true" in line for line in master.stderr)
        yield port
        master.kill()


def test_pages_are_shared_and_flushed_by_namespace(port: int) -> None:
    store = MooncakeStore("127.0.0.1", port, b"fp", PAGE_BYTES, lent_bytes=64 << 20)
    other = MooncakeStore("127.0.0.1", port, b"fp", PAGE_BYTES)
    stranger = MooncakeStore("127.0.0.1", port, b"another", PAGE_BYTES)
    tokens = array("q", range(4))
    own, salted = (list(chain_keys(root_key(b"fp", name), tokens, 2)) for name in (None, "salt"))
    page, into = memoryview(bytearray(range(250)) * 4), memoryview(bytearray(PAGE_BYTES))
    for key in (*own, *salted):
        assert store.put(key, tag_of(key), page, lambda: True)
    assert not store.put(b"k" * 32, b"k" * 8, page, lambda: False)
    assert other.find([*own, b"k" * 32]) == 2
    assert other.get(own[1], into)
    assert into == page
    assert stranger.find(own) == 0
    assert not stranger.get(own[0], into)
    other.flush(tag_of(own[0]))
    assert (store.find(own), store.find(salted)) == (0, 2)
    for each in (stranger, other, store):
        each.close()


async def _say(llm: AsyncLLM, prompt: str) -> Completion:
    return await llm.generate(prompt, SamplingParams(max_tokens=6, temperature=0.8, seed=1))


async def _two_servers(remote: str, prompt: str) -> list[Completion]:
    """The same prompt, asked of one server and then, when its pages are saved, of another."""
    async with (
        AsyncLLM("builtin", kv_tokens=2048, kv_remote=f"{remote}?lend=64MiB") as one,
        AsyncLLM("builtin", kv_tokens=2048, kv_remote=remote) as two,
    ):
        first, loads = await _say(one, prompt), one.engine.scheduler.page_loads
        while loads is not None and loads.tiers.has_saves:
            await _say(one, "x")
        await _say(one, "x")  # behind the last save
        return [first, await _say(two, prompt)]


def test_two_servers_share_a_prefix(port: int) -> None:
    prompt = "one beginning that both of them are asked for, " * 12
    first, second = asyncio.run(_two_servers(f"mooncake://127.0.0.1:{port}", prompt))
    assert second.token_ids == first.token_ids
    assert second.usage.loaded_tokens > 0.8 * second.usage.prompt_tokens


def test_a_master_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="the master cannot be reached") as refused:
        LLM("builtin", kv_remote=f"mooncake://127.0.0.1:{free_port()}")
    assert refused.value.param == "kv_remote"
