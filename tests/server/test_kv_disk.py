"""Promises of docs/tiers.md about ``--kv-disk``: a restart, flushes, reports, bad values."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.forked import Forked, command, run_forked
from support.plain_http import get, metrics, post
from support.server_process import Server, free_port, running

pytestmark = pytest.mark.slow

SMALL = ["--kv-tokens", "1024", "--max-model-len", "512", "--threads", "1"]
PROMPT = "def quicksort(items):\n" * 20
SIZE = "32MiB"


def ask(server: Server, **fields: Any) -> tuple[str, int, int]:
    """The text, and how many tokens were cached and loaded, as shares of the prompt."""
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "ignore_eos": True, **fields}
    answer = post(server.url, "/v1/completions", body).json
    details = answer["usage"]["prompt_tokens_details"]
    num_tokens = answer["usage"]["prompt_tokens"]
    shares = (details[name] / num_tokens for name in ("cached_tokens", "loaded_tokens"))
    return (answer["choices"][0]["text"], *shares)  # type: ignore[return-value]


def tier(server: Server) -> dict[str, Any]:
    """The one tier that GET /cache lists."""
    (found,) = get(server.url, "/cache").json["tiers"]
    return dict(found)


def metric(server: Server, name: str, labels: str = 'tier="disk"') -> float:
    text = metrics(server.url)
    found = re.search(rf"^foretoken:{name}{{{labels}}} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"no {name} in\n{text}"
    return float(found[1])


def test_a_restarted_server_goes_on_with_what_the_old_one_left(tmp_path: Path) -> None:
    flags = [*SMALL, "--kv-disk", f"{tmp_path}:{SIZE}"]
    with running(flags) as server:
        cold, cached, loaded = ask(server)
        assert (cached, loaded) == (0, 0)
        for salt in ("a", "b"):
            ask(server, cache_salt=salt)
        assert server.stop() == 0
    with running(flags) as server:
        num_pages = tier(server)["pages"]
        assert num_pages > 20
        text, cached, loaded = ask(server)
        assert text == cold
        assert cached == loaded > 0.8
        check_flush_of_a_salt(server)
        check_reports(server)
        check_flush_of_all(server, cold)
        check_that_the_folder_is_held(tmp_path)
        assert server.stop() == 0


def check_flush_of_a_salt(server: Server) -> None:
    assert post(server.url, "/cache/flush", {"cache_salt": "a"}).status == 200
    assert ask(server, cache_salt="a")[1:] == (0, 0)
    assert ask(server, cache_salt="b")[2] > 0.8


def check_reports(server: Server) -> None:
    state = tier(server)
    assert (state["medium"], state["is_open"], state["times_closed"]) == ("disk", True, 0)
    assert state["loaded_pages"] > 0 < state["capacity_pages"]
    assert metric(server, "kv_tier_capacity_pages") == state["capacity_pages"]
    assert metric(server, "kv_tier_hit_tokens_total") == 16 * state["loaded_pages"]
    assert metric(server, "kv_tier_load_seconds_total") == pytest.approx(state["load_seconds"])
    assert metric(server, "kv_tier_closed") == 0
    for name in ("kv_tier_pages", "kv_tier_queued_pages", "kv_tier_saved_pages_total"):
        assert metric(server, name) >= 0
    for cause in ("left_the_pool", "queue_full", "unsound", "given_up", "evicted"):
        labels = f'cause="{cause}",tier="disk"'
        assert metric(server, "kv_tier_dropped_pages_total", labels) >= 0


def check_flush_of_all(server: Server, cold: str) -> None:
    assert post(server.url, "/cache/flush").status == 200
    assert ask(server) == (cold, 0, 0), "the look-up comes behind the flush"
    assert ask(server, cache_salt="b")[1:] == (0, 0)


def check_that_the_folder_is_held(folder: Path) -> None:
    line = refusal(f"{folder}:{SIZE}")
    assert "another process uses it" in line


def refusal(value: str, *, after_loading: bool = True) -> str:
    """The line with which a value of the flag is refused."""
    done = run_forked(command, "run", "builtin", "x", "--kv-disk", value, *SMALL)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert re.match(r"foretoken run: (--kv-disk|kv_disk)\b", line), line
    return line


@pytest.mark.parametrize("value", ["{}", "{}:", "{}:much", "{}:0", ":1GiB", "{}:-5GiB"])
def test_a_value_without_a_folder_and_a_size_is_refused(value: str, tmp_path: Path) -> None:
    refusal(value.format(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_size_below_64_pages_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    assert re.search(r"64 pages need \d+ bytes.*raise the size", refusal(f"{tmp_path}:1MiB"))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_is_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    assert "is not a folder" in refusal(f"{tmp_path / name}:1GiB")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_folder_that_cannot_be_written_is_refused_before_weights_are_read() -> None:
    done = run_forked(command, "serve", "builtin", "--port", "0", "--kv-disk", "/proc/no:1GiB")
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("foretoken serve: --kv-disk /proc/no: ")
    assert "kernels on" not in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def replica(front: str, *flags: str) -> Iterator[Forked]:
    """A replica that dials a front, which may come later."""
    with open(os.devnull, "w+") as nothing:
        streams = {"stdin": nothing, "stdout": nothing, "stderr": sys.stderr.fileno()}
        words = ("replica", "builtin", "--front", front, "--log-level", "error", *SMALL, *flags)
        process = Forked(command, *words, env=os.environ, **streams)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_replicas_share_a_disk_and_one_that_is_killed_leaves_its_part_to_the_next(
    tmp_path: Path,
) -> None:
    front = f"tcp://127.0.0.1:{free_port()}"
    disk = ["--kv-disk", f"{tmp_path}:{SIZE}", "--replicas", "2"]
    with replica(front, *disk) as first:
        args = ["--front", front, "--replicas", "1"]
        with running(started_by=[sys.executable, "-m", "foretoken.api.cli.commands", "serve",
                                 "builtin", "--port", "0", *args]) as server:  # fmt: skip
            cold, _, loaded = ask(server)
            assert loaded == 0
            whole = tier(server)["capacity_pages"]
            with replica(front, *disk):
                wait_until(lambda: len(get(server.url, "/replicas").json["replicas"]) == 2)
                assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]
                tiers = get(server.url, "/cache").json["tiers"]
                assert [each["capacity_pages"] for each in tiers] == [whole] * 2
                done = run_forked(command, "replica", "builtin", "--front", front, *SMALL, *disk)
                assert done.returncode == 2
                assert "other replicas use all of its 2 shares" in done.stderr
            wait_until(lambda: tier(server)["pages"] >= 7)  # of the prompt
            first.send_signal(signal.SIGKILL)
            first.wait()
            with replica(front, *disk):
                wait_until(lambda: get(server.url, "/ready").status == 200)
                text, cached, loaded = ask(server)
                assert text == cold
                assert cached == loaded > 0.8
                assert server.stop() == 0


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(1200):
        if holds():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it never held")
