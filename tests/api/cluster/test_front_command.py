"""``foretoken serve --front``: its flags, its client, and what it does not load."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.cli import commands
from foretoken.api.cluster.front.front_client import FrontClient, Launcher
from foretoken.api.runtime.chat import ChatClient
from foretoken.api.server.prewarm import Warm, prewarm
from foretoken.api.serving.settings import FrontOptions
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.request import FinishReason
from support.scripted_replica import ScriptedReplica, run, until

LOOPBACK = "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--replicas", "2"], "--replicas needs --front"),
        (["--route", "even"], "--route needs --front"),
        (["--failover-seconds", "3"], "--failover-seconds needs --front"),
        (["--front", LOOPBACK, "--replicas", "0"], "must be at least 1"),
        (["--front", LOOPBACK, "--route", "random"], "kv, session, even"),
        (["--front", LOOPBACK, "--failover-seconds", "-1"], "must be at least 0"),
        (["--front", LOOPBACK, "--kv-tokens", "64"], "--kv-tokens is a flag of the replicas"),
        (
            ["--front", LOOPBACK, "--max-lora-rank", "4"],
            "--max-lora-rank is a flag of the replicas",
        ),
        (["--front", "127.0.0.1:80"], "must be tcp://HOST:PORT"),
        (["--front", "tcp://0.0.0.0:80"], "set FORETOKEN_CLUSTER_KEY on both sides"),
        (["--front", "tcp://192.0.2.1:80"], "set FORETOKEN_CLUSTER_KEY on both sides"),
    ],
    ids=" ".join,
)
def test_flags_that_mean_nothing_are_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = commands.main(["serve", "builtin", *args])
    except SystemExit as left:
        code = left.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_replica_has_no_adapters_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["replica", "builtin", "--front", "tcp://127.0.0.1:5570", "--lora", "sql=/adapters/sql"]
    assert commands.main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--lora is a flag of the front" in line


def test_an_address_that_is_taken_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert commands.main(["serve", "builtin", "--port", "0", "--front", address]) == 2
    assert f"cannot listen on {address}" in capsys.readouterr().err


def test_without_pyzmq_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [each for each in sys.modules if each.startswith("foretoken.api.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert commands.main(["serve", "builtin", "--front", LOOPBACK]) == 2
    assert "foretoken[events]" in capsys.readouterr().err


@asynccontextmanager
async def client_of(
    folder: Path, *, wanted: int = 1, launcher: Launcher | None = None, **changes: Any
) -> AsyncIterator[tuple[FrontClient, ScriptedReplica]]:
    """A client of a front whose one replica has the folder's tokenizer."""
    tokenizer = Tokenizer.load(folder, max_model_len=256)
    facts = {
        "tokenizer": tokenizer.fingerprint(),
        "vocab_size": len(tokenizer.vocab),
        "eos_token_ids": [tokenizer.vocab["<|im_end|>"]],
    }
    tokenizer.close()
    llm = FrontClient(folder, FrontOptions(front=LOOPBACK, replicas=wanted), launcher)
    starting = asyncio.create_task(llm.start())
    try:
        await until(lambda: llm._replicas is not None and llm._replicas.alive)
        assert llm._replicas is not None
        replica = ScriptedReplica(llm._replicas, **(facts | changes))
        replica.send(replica.hello)
        await starting
        yield llm, replica
    finally:
        await llm.close()
        replica.die()


@pytest.fixture(scope="module")
def folder(byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights: a front needs none."""
    copy = tmp_path_factory.mktemp("model")
    shutil.copytree(byte_level_folder, copy, dirs_exist_ok=True)
    (copy / "config.json").write_text("{}")
    return copy


async def test_texts_and_structured_answers_are_made_here(folder: Path) -> None:
    async with client_of(folder) as (llm, replica):
        assert (llm.built.name, llm.built.path) == ("tiny/model", folder)
        assert [each["number"] for each in llm.replicas()["replicas"]] == [1]
        ids = llm.tokenizer.encode_word("Hello there")
        params = SamplingParams(max_tokens=20, stop=("the",), n=2, regex="H.*")
        asking = asyncio.create_task(llm.open("Hello", params))
        sent = [await replica.submitted(), await replica.submitted()]
        assert sent[0].seed != sent[1].seed
        answer = await asking
        for each in sent:
            for token_id in ids[:-1]:
                replica.say(each.request_id, token_id)
            replica.finish(each.request_id, ids[-1])
        done = await llm.finish(answer)
        assert [each.text for each in done.choices] == ["Hello ", "Hello "]


async def test_a_front_with_another_tokenizer_than_its_replica_does_not_start(
    folder: Path,
) -> None:
    with pytest.raises(InvalidRequest, match="different tokenizers"):
        async with client_of(folder, tokenizer="other"):
            raise AssertionError("it started")


async def test_prompts_that_are_put_into_the_cache_first_wait_for_all_replicas(
    folder: Path,
) -> None:
    async with client_of(folder, wanted=2) as (llm, replica):
        warming = asyncio.create_task(prewarm(llm, ChatClient(llm), [Warm(prompt="Hello")]))
        await asyncio.sleep(0)
        assert not warming.done()
        assert llm._replicas is not None
        other = ScriptedReplica(llm._replicas)
        other.send(replica.hello)
        request_id = (await replica.submitted()).request_id
        replica.finish(request_id, finish_reason=FinishReason.LENGTH)
        await warming
        other.die()


async def test_a_front_that_ends_waits_for_no_replica(folder: Path) -> None:
    async with client_of(folder, wanted=2) as (llm, _replica):
        warming = asyncio.create_task(prewarm(llm, ChatClient(llm), [Warm(prompt="Hello")]))
        await asyncio.sleep(0)
        await llm.close()
        assert await warming == 0


class Scripted:
    """A launcher that fails for a reason that the test sets."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.num_looks, self.is_closed = 0, False

    async def start(self, address: str) -> None:
        pass

    async def failure(self) -> str | None:
        self.num_looks += 1
        return self.reason

    async def change(self, least: int, most: int) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.slow
def test_it_is_logged_once_and_shown_that_nothing_replaces_replicas(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("foretoken.api.cluster.front.front_client.CHECK_SECONDS", 0.001)
    launcher = Scripted()

    async def body() -> None:
        async with client_of(folder, launcher=launcher) as (llm, _):
            assert llm._replicas is not None
            metrics = llm._replicas.metrics
            launcher.reason, num_looks = "it is gone", launcher.num_looks
            await until(lambda: launcher.num_looks > num_looks + 3)
            assert b"replicas_not_replaced 1.0" in metrics.render()[0]
            launcher.reason = None
            await until(lambda: b"replicas_not_replaced 0.0" in metrics.render()[0])
        assert launcher.is_closed

    run(body())
    ours = [each for each in caplog.records if each.name.endswith(".front_client")]
    assert [each.getMessage() for each in ours if each.levelname == "WARNING"] == ["it is gone"]


WITHOUT_TORCH = """
import asyncio, sys
sys.path.insert(0, {tests!r})
import foretoken.api.cli.commands, foretoken.api.server.process
import foretoken.api.server.observation.observability
assert "zmq" not in sys.modules, "the command line imports zmq"
from foretoken.api.cluster.front.front_client import FrontClient
from foretoken.api.serving.settings import FrontOptions
from foretoken.api.types.sampling_params import SamplingParams
from support.scripted_replica import ScriptedReplica, until

async def main():
    llm = FrontClient("builtin", FrontOptions(front="tcp://127.0.0.1:0"))
    starting = asyncio.create_task(llm.start())
    await until(lambda: llm._replicas is not None and llm._replicas.alive)
    tokenizer = llm._replicas._roster._tokenizer
    replica = ScriptedReplica(llm._replicas, tokenizer=tokenizer, vocab_size=4096)
    replica.send(replica.hello)
    await starting
    params = SamplingParams(n=2, json_schema={{"type": "integer"}}, bad_words=("a",))
    answer = await llm.open("x", params)
    for _ in range(2):
        replica.finish((await replica.submitted()).request_id, 17)
    await llm.finish(answer)
    await llm.close()
    replica.die()

asyncio.run(main())
print(sorted(name for name in sys.modules if name == "torch" or name.startswith("torch.")))
"""


def test_a_front_loads_no_torch() -> None:
    tests = str(Path(__file__).parents[2])
    code = WITHOUT_TORCH.format(tests=tests)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
