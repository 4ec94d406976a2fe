"""``--tp N``: processes that compute one model, what they answer, and how they end together."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.api.build import target
from foretoken.api.cli.commands import main
from foretoken.core.errors import EngineDead
from foretoken.core.execution.ranks import ranks as ranks_module
from foretoken.core.execution.ranks import worker
from foretoken.core.execution.ranks.ranks import Ranks, TpDecoder
from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.model.loader import load_decoder
from support.checkpoints import make_checkpoint
from support.forked import Descriptor, Forked
from support.rank_threads import ThreadRanks, logits_of
from support.server_process import FRONT, Server, running

TEXT = Path(random.__file__).read_text()
PROMPTS = [TEXT[900 * i : 900 * i + 300 + 150 * i] for i in range(6)]
PARAMS = [
    SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=24, logprobs=0)
    for i in range(6)
]
OPTIONS = {"kv_tokens": 8192, "dtype": "float32", "threads": 1}
SERVED = ("--tp", "2", "--dtype", "float32", "--kv-tokens", "16384", "--threads", "1")

pytestmark = [
    pytest.mark.skipif(
        os.environ.get(FRONT) == "1", reason="ranks are children of the process that computes"
    ),
    pytest.mark.slow,
]


def workers(pid: int) -> list[int]:
    """The other ranks that a process started and that run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, stat = (folder / "cmdline").read_text(), (folder / "stat").read_text()
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        if worker.__name__ in words and parent == pid:
            found.append(int(folder.name))
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def answers(llm: LLM) -> tuple[list[list[int]], list[list[float]]]:
    found = llm.generate(PROMPTS, PARAMS)
    logprobs = [[each.logprob for each in one.logprobs or ()] for one in found]
    return [list(one.token_ids) for one in found], logprobs


def test_two_processes_say_what_one_does_and_a_killed_one_ends_every_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with LLM("builtin", **OPTIONS, speculation="off") as llm:
        alone, alone_logprobs = answers(llm)
    with monkeypatch.context() as threads:
        threads.setattr(target, "Ranks", ThreadRanks)
        with LLM("builtin", **OPTIONS, speculation="off", tp=2) as llm:
            plain, logprobs = answers(llm)
    with LLM("builtin", **OPTIONS, tp=2, dump_dir=str(tmp_path)) as llm:
        drafted, _ = answers(llm)
        (worker,) = workers(os.getpid())
        stream = llm.stream("def f(", SamplingParams(max_tokens=4000, ignore_eos=True))
        next(iter(stream))
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EngineDead, match="steps failed"):
            for _ in stream:
                pass
    assert drafted == plain, "drafts changed a token"
    pairs = list(zip(plain, alone, strict=True))
    assert sum(ranks != one for ranks, one in pairs) <= 1
    difference = max(
        abs(x - y)
        for ranks, one, (tokens, expected) in zip(logprobs, alone_logprobs, pairs, strict=True)
        if tokens == expected
        for x, y in zip(ranks, one, strict=True)
    )
    print(f"largest difference of a log-probability to one process: {difference:.1e}")
    assert difference < 1e-4
    assert not is_running(worker)
    (dump,) = tmp_path.glob("*.json")
    assert "RankLost" in dump.read_text()


class ForkedRank(Forked):
    """A rank that need not import torch: three of these would take a busy machine long."""

    def __init__(
        self, words: Sequence[str], *, pass_fds: Sequence[int], stdin: int, env: dict[str, str]
    ) -> None:
        assert words[1:3] == ["-m", worker.__name__]
        assert stdin == subprocess.DEVNULL
        with open(os.devnull) as nothing:
            super().__init__(
                serve_as_rank, Descriptor(pass_fds[0]), stdin=nothing, stdout=1, stderr=2, env=env
            )


def serve_as_rank(channel: int) -> None:
    sys.argv = ["worker", str(channel)]
    worker.main()


def test_four_processes_say_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module.subprocess, "Popen", ForkedRank)
    sizes = {"num_key_value_heads": 4, "num_hidden_layers": 2}
    folder = make_checkpoint(tmp_path, "qwen3", **sizes)
    chunks = [list(range(4, 44)), [7], [8, 9, 10]]
    ranks = Ranks(folder, 4, {"backend": "torch"}, threads=1)
    try:
        part = load_decoder(folder, comm=ranks.comm)
        assert isinstance(part, OwnDecoder)
        ranks.wait_until_loaded()
        found = logits_of([TpDecoder(part, ranks)], chunks)
    finally:
        ranks.end()
    assert not any(map(is_running, ranks.pids))
    torch.testing.assert_close(found, logits_of([load_decoder(folder)], chunks), atol=3e-5, rtol=0)


def read_stream(server: Server, prompt: str, lines: list[str]) -> None:
    body = {"model": "builtin", "prompt": prompt, "max_tokens": 3000, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60
    ) as response:
        for line in response.iter_lines():
            lines.append(line)


def end_of_streams(server: Server, harm: str) -> tuple[int, list[list[str]], int]:
    """Harm the second rank under three streams: exit code, lines of each, and its process."""
    (worker,) = workers(server.process.pid)
    found: list[list[str]] = [[] for _ in range(3)]
    prompts = ["def f(", "class A", "import "]
    if harm == "memory":  # what it has stays; a larger step than any before needs more
        resource.prlimit(worker, resource.RLIMIT_AS, (1 << 20, 1 << 20))
        prompts = [TEXT[1000 * i : 1000 * i + 4000] for i in range(3)]
    readers = [
        threading.Thread(target=read_stream, args=(server, prompt, lines))
        for prompt, lines in zip(prompts, found, strict=True)
    ]
    for reader in readers:
        reader.start()
    if harm == "hang":
        while not all(len(lines) > 4 for lines in found):
            readers[0].join(0.01)
        os.kill(worker, signal.SIGSTOP)
    for reader in readers:
        reader.join(60)
    return server.process.wait(30), found, worker


@pytest.mark.parametrize(("harm", "code"), [("memory", 1), ("hang", 70)])
def test_a_rank_without_memory_or_that_hangs_ends_streams_and_server(
    tmp_path: Path, harm: str, code: int
) -> None:
    flags = (*SERVED, "--max-batch-tokens", "4096", "--step-timeout", "4")
    with running((*flags, "--dump-dir", str(tmp_path))) as server:
        info = httpx.get(f"{server.url}/server_info").json()
        assert info["settings"]["tp"] == 2
        exit_code, found, worker = end_of_streams(server, harm)
        assert exit_code == code
        for lines in found:
            assert "the engine stopped" in "".join(lines[-4:])
        assert not is_running(worker)
    assert len(list(tmp_path.glob("*.json"))) == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tp", "0"], "tp"),
        (["--tp", "3"], "which 3 ranks cannot share evenly"),
        (["--tp", "2", "--device", "cuda"], "runs on the CPU only"),
        (["--tp", "2", "--backend", "triton"], "runs on the CPU only"),
        (["--tp", "2", "--model-impl", "transformers"], "cannot be combined with model_impl"),
        (["--tp", "2", "--kv-evict", "window:512"], "cannot be combined with kv_evict"),
        (["--tp", "2", "--lora", "a=b"], "cannot be combined with lora"),
    ],
)
def test_what_ranks_do_not_serve_is_told_before_they_start(
    capfd: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    assert main(["serve", "builtin", "--port", "0", *flags]) == 2
    assert reason in capfd.readouterr().err
    assert not workers(os.getpid())
