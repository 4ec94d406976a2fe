"""``serve --ray``: Ray Serve starts the replicas, replaces lost ones, changes their number.

One server starts a Ray of its own, which is killed at the end; one joins a Ray that is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.cluster.launcher import LauncherError, ReplicaPlan
from support.plain_http import metrics
from support.server_process import Server, free_port, running

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.slow
SECONDS = 300.0
FLAGS = ["--replica-cpus", "0.5", "--kv-tokens", "16384"]
NUM_GROUPS, NUM_PROMPTS = 4, 40
TOKEN = "0123456789abcdef" * 4
HEAD = """
import sys

import ray
from ray import serve

ray.init(
    num_cpus=2, include_dashboard=False, object_store_memory=2**27, _node_ip_address="127.0.0.1",
    _temp_dir=sys.argv[1], logging_level="ERROR", log_to_driver=False,
)
print(ray.get_runtime_context().gcs_address, flush=True)
for _ in sys.stdin:
    print(sorted(serve.status().applications), flush=True)
"""
STRANGER = """
import sys

import ray

ray.init(sys.argv[1], logging_level="CRITICAL", log_to_driver=False)
print(ray.cluster_resources()["CPU"])
"""


def serve(*flags: str) -> list[str]:
    code = [sys.executable, "-m", "foretoken.api.cli.commands"]
    return [*code, "serve", "builtin", "--port", "0", "--ray", *flags]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(disk: Path) -> Iterator[Server]:
    args = serve("--replicas", "2", "--kv-disk", f"{disk}:64MiB", *FLAGS)
    with running(started_by=args) as found:
        until(lambda: len(pids(found)) == 2)
        yield found
        found.stop()


class Cluster:
    """A Ray that somebody else has started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        address = self._output.readline().strip()
        self.variables = {**with_token(TOKEN), "RAY_ADDRESS": address}

    def applications(self) -> str:
        self._input.write("\n")
        self._input.flush()
        return self._output.readline().strip()


def with_token(token: str) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # its path must be short
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **with_token(TOKEN)},
        )
        with process:
            yield Cluster(process)
            assert process.stdin is not None
            process.stdin.close()


def asked(server: Server, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def pids(server: Server) -> set[int]:
    return {each["pid"] for each in asked(server, "/replicas")["replicas"]}


def until(holds: Callable[[], bool]) -> None:
    """Wait for other processes."""
    ends = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def completion(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "builtin", "prompt": prompt, "temperature": 0.8, "seed": 3, **more}
    return asked(server, "/v1/completions", body)


def test_prompts_of_a_few_groups_are_answered_out_of_the_cache(server: Server) -> None:
    def one(index: int) -> dict[str, Any]:
        shared = [20 + index % NUM_GROUPS, *range(100, 355)]
        usage: dict[str, Any] = completion(server, [*shared, 30 + index], max_tokens=4)["usage"]
        return usage

    with ThreadPoolExecutor(4) as pool:
        usages = list(pool.map(one, range(NUM_PROMPTS)))
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    assert cached >= 0.7 * sum(each["prompt_tokens"] for each in usages)


def test_a_killed_replica_costs_no_answer_and_is_replaced(server: Server) -> None:
    wanted = completion(server, list(range(50, 80)), max_tokens=600, ignore_eos=True)
    before, answers = pids(server), list[dict[str, Any]]()
    prompt = list(range(50, 80))
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                completion(server, prompt, max_tokens=600, ignore_eos=True, speculation="off")
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    until(lambda: any(each["running"] for each in asked(server, "/replicas")["replicas"]))
    busy = max(asked(server, "/replicas")["replicas"], key=lambda each: each["requests"])
    os.kill(busy["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(SECONDS)
    assert [each["choices"] for each in answers] == [wanted["choices"]] * 4
    until(lambda: len(pids(server)) == 2 and pids(server) != before)


def test_the_number_of_replicas_changes_on_request(server: Server) -> None:
    before = pids(server)
    asked(server, "/replicas", {"replicas": 1})
    until(lambda: len(pids(server)) == 1)
    assert pids(server) < before  # the other one is not replaced, and keeps its cache
    assert completion(server, [50, 51, 52], max_tokens=4)["choices"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"replicas": 0}, 400),
        ({"min": 2, "max": 1}, 400),
        ({}, 400),
        ({"options": {"kv_tokens": 8192}}, 400),
        ({"replicas": 3}, 400),  # the disk is divided for two
    ],
)
def test_bad_changes_are_refused(server: Server, body: dict[str, Any], status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        asked(server, "/replicas", body)
    assert refused.value.code == status
    refused.value.close()


def test_as_many_folders_of_the_disk_are_used_as_there_were_replicas_at_once(
    server: Server, disk: Path
) -> None:
    """A replica that was killed has left its folder to the next one."""
    assert completion(server, [50, 51, 52], max_tokens=4)["choices"]
    assert sorted(each.name for each in disk.iterdir() if each.is_dir()) == ["0", "1"]
    (held,) = asked(server, "/cache")["tiers"]
    assert held["medium"] == "disk"


def ray_process(server: Server, name: str) -> int:
    """The process of this name among those that the server has started."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            number, rest = each.read_text().split(" (", 1)
            command, fields = rest.rsplit(") ", 1)
            if command == name and int(fields.split()[1]) == server.process.pid:
                found.append(int(number))
    (pid,) = found
    return pid


def variables_of(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text().rstrip("\0")
    found = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, _, value in found}


def test_ray_refuses_those_who_do_not_have_its_token(server: Server, tmp_path: Path) -> None:
    raylet = ray_process(server, "raylet")
    words = Path(f"/proc/{raylet}/cmdline").read_text().split("\0")
    (address,) = [each.partition("=")[2] for each in words if each.startswith("--gcs-address=")]
    ours = variables_of(raylet)["RAY_AUTH_TOKEN"]
    tokens = [with_token(ours), with_token(TOKEN), {"RAY_AUTH_MODE": "disabled"}]
    with ThreadPoolExecutor(len(tokens)) as pool:
        taken, *refused = pool.map(lambda token: connected(address, token, tmp_path), tokens)
    assert float(taken.stdout) > 2.0  # it counts those of one more replica
    for each in refused:
        assert (each.returncode, each.stdout) == (1, "")
        assert "Failed to connect to Ray" in each.stderr.splitlines()[-1]


def connected(
    address: str, variables: Mapping[str, str], home: Path
) -> subprocess.CompletedProcess[str]:
    """A program that connects to Ray and reads its resources."""
    own = {name: each for name, each in os.environ.items() if not name.startswith("RAY_")}
    env = {**own, "HOME": str(home), "RAY_gcs_server_port_wait_time_s": "1", **variables}
    words = [sys.executable, "-c", STRANGER, address]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=SECONDS)


def test_the_front_serves_on_when_the_head_of_ray_is_dead(server: Server) -> None:
    def not_replaced() -> str:
        return re.findall(r"^foretoken:replicas_not_replaced (\S+)$", metrics(server.url), re.M)[0]

    assert not_replaced() == "0.0"
    before = pids(server)
    os.kill(ray_process(server, "gcs_server"), signal.SIGKILL)
    until(lambda: not_replaced() == "1.0")
    assert pids(server) == before
    assert completion(server, [50, 51, 52], max_tokens=4)["choices"]
    assert server.stop() == 0


def test_a_ray_that_is_there_is_joined_follows_the_load_and_outlives_the_front(
    cluster: Cluster,
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    bounds = ["--min-replicas", "1", "--max-replicas", "2", "--scale-down-seconds", "1"]
    args = serve("--front", address, *bounds, "--max-running", "2", *FLAGS)
    with running(started_by=args, variables=cluster.variables) as found:
        assert cluster.applications() == "['foretoken']"
        wanted = completion(found, list(range(60, 90)), max_tokens=64)["choices"]
        answers, ended, quiet = list[Any](), threading.Event(), threading.Event()

        def ask(stop: threading.Event) -> None:
            while not stop.is_set():
                answers.append(completion(found, list(range(60, 90)), max_tokens=64)["choices"])

        with ThreadPoolExecutor(7) as pool:
            asking = [pool.submit(ask, each) for each in (ended, *[quiet] * 6)]
            try:
                until(lambda: len(pids(found)) == 2)
                quiet.set()
                until(lambda: len(pids(found)) == 1)
            finally:
                quiet.set()
                ended.set()
            for each in asking:
                each.result(SECONDS)
        assert len(answers) > 6
        assert all(each == wanted for each in answers)
        assert found.stop() == 0
    assert cluster.applications() == "[]"


def line_of_failure(*flags: str, variables: Mapping[str, str]) -> str:
    """The last line of a server that exits with 1, which says why."""
    env, started = {**os.environ, **variables}, time.monotonic()
    done = subprocess.run(serve(*flags), env=env, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert time.monotonic() - started < 60
    *others, line = done.stderr.splitlines()
    assert any("waiting for" in other for other in others)
    assert "Traceback" not in done.stderr
    return line


@pytest.mark.filterwarnings("ignore")  # of Ray
@pytest.mark.parametrize(
    ("owns_ray", "needs", "reason"),
    [
        (True, {"gpus": 1}, "2 replicas need 2 GPUs, and Ray has 0: fewer --replicas, or a"),
        (False, {"cpus": 8}, "2 replicas need 16 CPUs, and Ray has 6: fewer --replicas, or"),
        (False, {"cpus": 3}, None),
        (True, {"cpus": 0.5 * os.cpu_count()}, None),
    ],
)
def test_too_few_of_what_replicas_need_is_named(
    owns_ray: bool, needs: dict[str, float], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretoken.api.cluster import ray_app

    monkeypatch.setattr(ray_app.ray, "cluster_resources", lambda: {"CPU": 6.0})
    monkeypatch.setattr(ray_app, "num_cpus", os.cpu_count)
    plan = ReplicaPlan(
        model=None, front="", least=2, most=2, quiet_seconds=1, **({"cpus": 0.5, "gpus": 0} | needs)
    )
    refuses = contextlib.nullcontext()
    if reason is not None:
        refuses = pytest.raises(LauncherError, match=re.escape(reason))
    with refuses:
        ray_app.RayCluster(owns_ray=owns_ray)._require_room(plan)


def test_a_cluster_with_too_little_is_named_and_left_alone(cluster: Cluster) -> None:
    front = ["--front", f"tcp://127.0.0.1:{free_port()}", "--replicas", "2"]
    line = line_of_failure(*front, "--replica-cpus", "64", variables=cluster.variables)
    assert "2 replicas need 128 CPUs, and Ray has 2: fewer --replicas, or" in line
    assert cluster.applications() == "[]"


def test_a_ray_that_cannot_start_or_is_not_there_is_named(tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    (folder := tmp_path / ("long" * 30)).mkdir()
    with ThreadPoolExecutor(2) as pool:
        absent = pool.submit(
            line_of_failure, "--front", "tcp://127.0.0.1:0", variables={"RAY_ADDRESS": nowhere}
        )
        broken = pool.submit(line_of_failure, variables={"TMPDIR": str(folder)})
    assert absent.result().endswith(f"no Ray cluster answers at RAY_ADDRESS {nowhere}")
    assert "Ray cannot start: " in broken.result()
    assert "path length cannot exceed" in broken.result()
