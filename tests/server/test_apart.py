"""A server that computes prompts and one that goes on with them say what one server says."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest

from support.forked import code, command, run_forked
from support.plain_http import get, metrics, opened, post
from support.server_process import Server, free_port, front_at, running, start_replica

pytestmark = pytest.mark.slow

SMALL = ["--kv-tokens", "8192", "--max-model-len", "4096", "--threads", "1"]
NIXL = ["--kv-transfer", "nixl"]
SECRET = {"FORETOKEN_CLUSTER_KEY": "a secret of these tests"}
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
MODEL = "foretoken-builtin"
ROUTER = os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")
"""The command of vllm-router 0.1.17, from an environment of its own."""

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
)


class Pair(NamedTuple):
    """A server that computes prompts, and one that goes on with them."""

    p: Server
    d: Server

    def prefill(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """The parameters of P, asked as vllm-router asks."""
        asked = {**body, "max_tokens": 1, "min_tokens": 1, "stream": False}
        answer = post(self.p.url, path, {**asked, "kv_transfer_params": WANTED})
        assert answer.status == 200, answer.content
        params: dict[str, Any] = answer.json["kv_transfer_params"]
        return params

    def decode(
        self, body: dict[str, Any], params: object, path: str = "/v1/completions"
    ) -> dict[str, Any]:
        """The answer of D."""
        answer = post(self.d.url, path, {**body, "kv_transfer_params": params})
        assert answer.status == 200, answer.content
        found: dict[str, Any] = answer.json
        return found

    def check(self) -> None:
        """No page is held, and audits find nothing."""
        for server in self:
            assert post(server.url, "/debug/audit").json["ok"]
        wait_until(lambda: metric(self.p, "kv_transfer_held_pages") == 0)


def metric(server: Server, name: str, labels: str = "") -> float:
    found = re.search(rf"^foretoken:{name}{re.escape(labels)} (\S+)$", metrics(server.url), re.M)
    assert found is not None, name
    return float(found[1])


def refused(server: Server, cause: str) -> float:
    return metric(server, "kv_transfer_refused_total", f'{{cause="{cause}"}}')


def wait_until(holds: Any) -> None:
    for _ in range(600):
        if holds():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it never held")


@contextlib.contextmanager
def apart(*more: str) -> Iterator[Pair]:
    flags = [*SMALL, *NIXL, *more]
    with (
        running([*flags, "--role", "prefill"], variables=SECRET) as p,
        running([*flags, "--role", "decode"], variables=SECRET) as d,
    ):
        yield Pair(p, d)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with apart() as made:
        yield made


def prompt(index: int) -> str:
    return f"file {index}\n" + f"def f{index}(x): return x + {index}\n" * 30


def body_of(index: int, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt(index), "max_tokens": 24, "temperature": 0.8, "seed": index}
    return {**body, "ignore_eos": True, **options}


def loaded(answer: dict[str, Any]) -> float:
    usage = answer["usage"]
    share: float = usage["prompt_tokens_details"]["loaded_tokens"] / usage["prompt_tokens"]
    return share


@needs_nixl
def test_two_servers_say_what_one_says(pair: Pair) -> None:
    for index, options in enumerate([{}, {"speculation": "off"}, {"cache_salt": "a"}, {"n": 2}]):
        body = body_of(index, **options)
        found = pair.decode(body, pair.prefill(body))
        alone = post(pair.p.url, "/v1/completions", body).json
        assert [each["text"] for each in found["choices"]] == [
            each["text"] for each in alone["choices"]
        ]
        assert loaded(found) > 0.8 / options.get("n", 1)
        assert "kv_transfer_params" not in found
        assert "kv_transfer_params" not in alone
    pair.check()


@needs_nixl
def test_a_conversation_goes_on_at_another_server_as_a_stream_too(pair: Pair) -> None:
    body = {"messages": [{"role": "user", "content": prompt(20)}], "max_tokens": 12, "seed": 4}
    path = "/v1/chat/completions"
    params = pair.prefill(body, path)
    assert len(params["remote_block_ids"]) > 20
    alone = post(pair.p.url, path, body).json["choices"][0]["message"]["content"]
    with opened(
        pair.d.url, "POST", path, {**body, "stream": True, "kv_transfer_params": params}
    ) as got:
        events = [line for line in got if line.startswith(b"data: {")]
    text = "".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', b"".join(events).decode()))
    assert text == alone.replace("\n", "\\n").replace('"', '\\"')
    assert metric(pair.d, "kv_tier_hit_tokens_total", '{tier="peer"}') > 0
    pair.check()


@needs_nixl
def test_parameters_that_are_of_no_use_are_counted_and_cost_no_token(pair: Pair) -> None:
    body, other = body_of(30), body_of(31)
    alone = post(pair.p.url, "/v1/completions", body).json["choices"][0]["text"]
    forged = pair.prefill(body)
    forged["remote_block_ids"] = forged["remote_block_ids"][::-1]
    foreign = pair.prefill({**other, "prompt": prompt(31)})
    short = pair.prefill(body)
    before = {cause: refused(pair.d, cause) for cause in ("unsigned", "foreign", "role")}
    for params in (forged, foreign, {"do_remote_prefill": True}, WANTED):
        found = pair.decode(body, params)
        assert found["choices"][0]["text"] == alone
    assert pair.decode({**body, "prompt": "x"}, short)["choices"][0]["text"]
    assert refused(pair.d, "unsigned") == before["unsigned"] + 2
    assert refused(pair.d, "role") == before["role"] + 1
    assert refused(pair.d, "out_of_range") == 1
    answer = post(pair.d.url, "/v1/completions", {**body, "kv_transfer_params": "x"})
    assert (answer.status, answer.error["param"]) == (400, "kv_transfer_params")


@needs_nixl
def test_parameters_that_come_a_second_time_do_not_make_the_peer_seem_dead(pair: Pair) -> None:
    """P looked at nothing while it held nothing: it was waited for, and shunned."""
    done = partial(metric, pair.p, "kv_transfer_ended_total", '{cause="done"}')
    body, before, num_done = body_of(35), refused(pair.d, "expired"), done()
    params = pair.prefill(body)
    alone = pair.decode(body, params)["choices"][0]["text"]
    wait_until(lambda: done() == num_done + 1)
    post(pair.d.url, "/cache/flush", {})
    assert pair.decode(body, params)["choices"][0]["text"] == alone
    assert refused(pair.d, "expired") == before + 1
    assert refused(pair.d, "unreachable") == 0
    other = body_of(36)
    assert loaded(pair.decode(other, pair.prefill(other))) > 0.8


@needs_nixl
def test_an_answer_of_a_prefill_that_is_a_stream_or_of_several_prompts_holds_nothing(
    pair: Pair,
) -> None:
    held = metric(pair.p, "kv_transfer_held")
    body = {**body_of(40), "max_tokens": 1, "kv_transfer_params": WANTED}
    several = post(pair.p.url, "/v1/completions", {**body, "prompt": [prompt(40), prompt(41)]})
    assert several.status == 200
    assert "kv_transfer_params" not in several.json
    with opened(pair.p.url, "POST", "/v1/completions", {**body, "stream": True}) as got:
        got.read()
    assert metric(pair.p, "kv_transfer_held") == held


@needs_nixl
def test_a_killed_peer_costs_no_answer() -> None:
    with apart() as pair:
        bodies = [body_of(index) for index in range(3)]
        texts = [
            post(pair.d.url, "/v1/completions", body).json["choices"][0]["text"] for body in bodies
        ]
        post(pair.d.url, "/cache/flush", {})
        params = [pair.prefill(body) for body in bodies]
        assert loaded(found := pair.decode(bodies[0], params[0])) > 0.8
        assert found["choices"][0]["text"] == texts[0]
        os.kill(pair.p.process.pid, signal.SIGKILL)
        for body, each, text in zip(bodies[1:], params[1:], texts[1:], strict=True):
            found = pair.decode(body, each)
            assert (found["choices"][0]["text"], loaded(found)) == (text, 0)
        assert refused(pair.d, "unreachable") == 2
        assert pair.d.stop() == 0


@needs_nixl
@pytest.mark.skipif(
    ROUTER is None, reason="vllm-router 0.1.17 is not on the PATH or in VLLM_ROUTER"
)
def test_behind_vllm_router_two_servers_say_what_one_says(pair: Pair) -> None:
    assert ROUTER is not None
    port = free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    flags += ["--vllm-pd-disaggregation", "--prefill", pair.p.url, "--decode", pair.d.url]
    flags += ["--kv-connector", "nixl", "--policy", "round_robin"]
    before = metric(pair.d, "kv_tier_hit_tokens_total", '{tier="peer"}')
    with subprocess.Popen(
        [ROUTER, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as router:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: is_up(url))
            for index in range(50, 54):
                body = {"model": MODEL, **body_of(index)}
                found = post(url, "/v1/completions", body)
                assert found.status == 200, found.content
                alone = post(pair.p.url, "/v1/completions", body).json
                assert found.json["choices"][0]["text"] == alone["choices"][0]["text"]
            chat = {"messages": [{"role": "user", "content": prompt(60)}], "max_tokens": 8}
            body = {"model": MODEL, "seed": 3, **chat}
            found = post(url, "/v1/chat/completions", body)
            alone = post(pair.p.url, "/v1/chat/completions", body).json
            assert found.json["choices"][0]["message"] == alone["choices"][0]["message"]
        finally:
            router.kill()
    assert metric(pair.d, "kv_tier_hit_tokens_total", '{tier="peer"}') > before + 4 * 300
    pair.check()


@needs_nixl
def test_behind_our_front_replicas_with_roles_say_what_one_server_says(pair: Pair) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    flags = [*SMALL, *NIXL, "--role"]
    replicas = [
        start_replica(address, [*flags, role], variables=SECRET) for role in ("prefill", "decode")
    ]
    try:
        with front_at(address, num_replicas=2, variables=SECRET) as front:
            for index in range(70, 73):
                compare(front, pair, body_of(index), is_read=True)
            compare(front, pair, body_of(73, n=2, logprobs=2), is_read=True)
            compare(front, pair, body_of(74, prompt="short"), is_read=False)
            compare(front, pair, body_of(70), is_read=False)  # the pool has it
            assert post(front.url, "/debug/audit").json["ok"]
            wait_until(lambda: total(front, "kv_transfer_held_pages") == 0)
            assert total(front, "kv_transfer_ended_total", 'cause="done"') >= 5
            num_done = partial(total, front, "kv_transfer_ended_total", 'cause="done"')
            before, long = num_done(), body_of(76, prompt=prompt(76) * 4)
            compare(front, pair, long, is_read=True)
            wait_until(lambda: total(front, "kv_transfer_held_pages") == 0)
            assert num_done() > before + 1, "part by part"
            replicas[0].kill()
            compare(front, pair, body_of(75), is_read=False)
            assert front.stop() == 0
    finally:
        for each in replicas:
            each.kill()
            each.wait()


@needs_nixl
def test_a_peer_that_is_killed_between_two_chunks_costs_no_answer(pair: Pair) -> None:
    """D has read parts of the prompt by then, and computes the rest itself."""
    address = f"tcp://127.0.0.1:{free_port()}"
    flags = [*SMALL, *NIXL, "--role"]
    p = start_replica(address, [*flags, "prefill", "--max-batch-tokens", "16"], variables=SECRET)
    d = start_replica(address, [*flags, "decode"], variables=SECRET)
    body = body_of(80, prompt=prompt(80) * 8)
    try:
        with (
            front_at(address, num_replicas=2, variables=SECRET) as front,
            ThreadPoolExecutor() as threads,
        ):
            answer = threads.submit(post, front.url, "/v1/completions", body)
            wait_until(lambda: total(front, "kv_tier_hit_tokens_total", 'tier="peer"') > 0)
            p.kill()
            found = answer.result(timeout=60)
            assert found.status == 200, found.content
            alone = post(pair.p.url, "/v1/completions", body).json
            assert found.json["choices"] == alone["choices"]
            usage = found.json["usage"]
            num_cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert 0 < num_cached < usage["prompt_tokens"] - 64, "it was not killed between chunks"
            assert usage["moves"] == 1
            audits = post(front.url, "/debug/audit").json
            assert audits["ok"], audits
            post(front.url, "/cache/flush", {})
            cache = get(front.url, "/cache").json
            assert cache["free_pages"] == cache["total_pages"], "a page is locked"
            assert front.stop() == 0
    finally:
        for each in (p, d):
            each.kill()
            each.wait()


@needs_nixl
def test_two_servers_of_several_processes_each_say_what_one_says() -> None:
    with apart("--tp", "2") as pair:
        body = body_of(90)
        alone = post(pair.p.url, "/v1/completions", body).json
        post(pair.p.url, "/cache/flush", {})
        found = pair.decode(body, pair.prefill(body))
        assert found["choices"] == alone["choices"]
        assert loaded(found) > 0.8
        pair.check()


def compare(front: Server, pair: Pair, body: dict[str, Any], *, is_read: bool) -> None:
    before = total(front, "kv_tier_hit_tokens_total", 'tier="peer"')
    found = post(front.url, "/v1/completions", body).json
    alone = post(pair.p.url, "/v1/completions", body).json
    assert found["choices"] == alone["choices"]
    num_read = total(front, "kv_tier_hit_tokens_total", 'tier="peer"') - before
    assert (num_read > 0.4 * found["usage"]["prompt_tokens"]) is is_read


def total(front: Server, name: str, labels: str = "") -> float:
    """A metric with such a label, summed over all replicas."""
    shown = get(front.url, "/metrics").content.decode()
    rows = re.findall(rf"^foretoken:{name}\{{([^}}]*)\}} (\S+)$", shown, re.M)
    return sum(float(value) for given, value in rows if labels in given)


def is_up(url: str) -> bool:
    with contextlib.suppress(OSError):
        return get(url, "/health").status == 200
    return False


# -- options --------------------------------------------------------------------------------------


def refusal(*flags: str, variables: dict[str, str] | None = None) -> str:
    """The one line with which a server refuses to start."""
    env = {name: value for name, value in os.environ.items() if name not in SECRET}
    done = run_forked(
        command, "serve", "builtin", "--port", "0", *flags, env={**env, **(variables or {})}
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_role_without_a_transfer_is_refused() -> None:
    assert refusal("--role", "decode").endswith("role needs kv_transfer")


def test_a_transfer_without_a_secret_is_refused() -> None:
    line = refusal(*NIXL)
    assert "kv_transfer needs FORETOKEN_CLUSTER_KEY, the same secret for all servers" in line


def test_without_the_extra_the_command_exits_2_and_names_it() -> None:
    done = run_forked(
        code,
        "import os, sys; sys.modules['nixl'] = None; os.environ['FORETOKEN_CLUSTER_KEY'] = 'x'\n"
        "from foretoken.api.cli.commands import main\n"
        "sys.exit(main(['serve', 'builtin', '--port', '0', '--kv-transfer', 'nixl']))",
    )
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.strip().splitlines()[-1]
    assert "kv_transfer needs the extra pd: pip install 'foretoken[pd]'" in line


def test_without_the_flag_parameters_mean_nothing_and_nothing_of_it_is_imported() -> None:
    with running(SMALL) as server:
        answer = post(server.url, "/v1/completions", {**body_of(1), "kv_transfer_params": WANTED})
        assert answer.status == 200
        assert "kv_transfer_params" not in answer.json
        assert "kv_transfer" not in get(server.url, "/metrics").content.decode()
    done = run_forked(
        code,
        "import sys\n"
        "from foretoken import LLM\n"
        "with LLM('builtin', kv_tokens=2048, threads=1) as llm: assert llm.generate('x')\n"
        "print([each for each in sys.modules if each == 'nixl' or 'core.tiers' in each])",
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
