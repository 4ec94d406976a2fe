"""Record what real agents send: ``python tests/clients/record_agents.py FOLDER [NAME ...]``.

Each agent reads a report part by part, against the scripted server of `agents_server.py`; a proxy
keeps the bodies of its requests. ``foretoken bench serve agents --record`` replays them. Every
word that a body holds as text is replaced by another one, always by the same: a recording keeps
the shape of what the agent sends and its lines that change, and nobody's prompts or paths.
"""

from __future__ import annotations

import http.client
import json
import lzma
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1]))

import test_agents
from test_agents import KEY, RUN, TESTS, environment

from support import server_process
from support.server_process import running

server_process.START_SECONDS = test_agents.SECONDS = 900  # nobody waits for it

NUM_PARTS, PART_WORDS = 20, 260
TEXTS = ("text", "content", "description", "instructions", "output", "system", "input", "title")
VOLATILE = re.compile(
    r"x-anthropic-billing-header|current_date|[Tt]oday's date|[Cc]urrent (date|time)"
)
WORDS = re.findall(
    r"\w+",
    """a I of to in is it on at by we us the and for one two has its new old way day all any out
    off line file code test list tree page time work part name next last form read open call step
    table queue model cache token batch index write first small large where which there place
    prompt answer system server client reader number format folder letter memory result change
    request version history message between content feature program measure without explain
    complete sentence document together language position describe schedule operator calendar
    different beginning recording important character condition structure interface generated
    repository throughput definition instrument percentage permission statistics vocabulary
    conversation organization architecture distribution significance configuration
    representation implementation documentation responsibility""",
)
WHO = ("client_metadata", "metadata", "prompt_cache_key", "user", "safety_identifier")
BY_LEN = {n: [word for word in WORDS if len(word) == n] for n in {len(word) for word in WORDS}}


def other_word(found: re.Match[str]) -> str:
    """A word of about the same length or a number of the same, always the same one."""
    word = found[0]
    if word.isdigit():
        return str(zlib.crc32(word.encode()) % 9 * 10 ** (len(word) - 1) + 10 ** (len(word) - 1))
    length = min(len(word), max(BY_LEN))
    pool = BY_LEN.get(length) or BY_LEN[max(n for n in BY_LEN if n < length)]
    other = pool[zlib.crc32(word.lower().encode()) % len(pool)]
    if word.isupper() and len(word) > 1:
        return other.upper()
    return other.capitalize() if word[0].isupper() else other


def other_text(text: str) -> str:
    """The same lines in other words, but for those that change from request to request."""
    lines = text.split("\n")
    return "\n".join(
        line if VOLATILE.search(line) else re.sub(r"[^\W\d_]{2,}|\d{2,}", other_word, line)
        for line in lines
    )


def other_words(value: Any, key: str = "") -> Any:
    """A body with its texts in other words; names, types and ids stay, but for the user's."""
    if isinstance(value, dict):
        return {name: other_words(each, name) for name, each in value.items() if name not in WHO}
    if isinstance(value, list):
        return [other_words(each, key) for each in value]
    return other_text(value) if isinstance(value, str) and key in TEXTS else value


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on, and keeps their bodies."""

    upstream: str
    bodies: list[dict[str, Any]]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Pass on."""
        self._pass_on(None)

    def do_POST(self) -> None:
        """Keep the body and pass on."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = urlsplit(self.path).path
        if path in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
            self.bodies.append({"path": path, "body": json.loads(body)})
        self._pass_on(body)

    def _pass_on(self, body: bytes | None) -> None:
        to = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=300)
        fields = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
        to.request(self.command, self.path, body, fields)
        answer = to.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def recording(upstream: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a proxy, and the bodies that it has seen."""
    bodies: list[dict[str, Any]] = []
    handler = type("Proxy", (Proxy,), {"upstream": upstream, "bodies": bodies})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()


def call(agent: str, number: int) -> str:
    """The model's call that reads a part; after the last one its last words."""
    name = f"part-{number}.txt"
    tool, arguments = {
        "codex": ("exec_command", {"cmd": f"cat {name}"}),
        "claude": ("Bash", {"command": f"cat {name}", "description": "Read a part."}),
    }.get(agent, ("read_part", {"name": name}))
    if number > NUM_PARTS:
        return "[[That was the report.]]"
    written = json.dumps({"name": tool, "arguments": arguments})
    return f"[[I read part {number}.\n<tool_call>\n{written}\n</tool_call>]]"


def write_report(agent: str, folder: Path) -> None:
    """Write the parts; each ends with what the model says after it."""
    rng = random.Random(agent)
    for number in range(1, NUM_PARTS + 1):
        words = " ".join(rng.choices(WORDS, k=rng.randint(PART_WORDS // 2, PART_WORDS * 3 // 2)))
        text = re.sub(r"(.{60,80}) ", r"\1\n", words)
        (folder / f"part-{number}.txt").write_text(f"{text}\n{call(agent, number + 1)}\n", "utf-8")


def python_agent(name: str, task: str, url: str, home: Path) -> None:
    """Run one of `python_agents.py`."""
    python = TESTS.parent / ".venv-clients" / "openai3" / "bin" / "python"
    script = TESTS / "clients" / "agents" / "python_agents.py"
    subprocess.run([python, script, name, url, task], cwd=home, env=environment(home), check=True)


def record(agent: str, upstream: str) -> list[dict[str, Any]]:
    """The bodies of one agent's session."""
    task = f"Read the report, part by part. {call(agent, 1)}"
    with tempfile.TemporaryDirectory() as folder, recording(upstream) as (url, bodies):
        home = Path(folder)
        write_report(agent, home)
        if agent in RUN:
            RUN[agent](task, url, home)
        else:
            python_agent(agent, task, url, home)
    return bodies


def write(path: Path, bodies: Sequence[dict[str, Any]]) -> None:
    """Write a recording, in other words."""
    lines = "".join(
        json.dumps({"path": each["path"], "body": other_words(each["body"])}) + "\n"
        for each in bodies
    )
    path.write_bytes(lzma.compress(lines.encode()))


def main(folder: str, *names: str) -> None:
    """Record some agents, or all."""
    with tempfile.NamedTemporaryFile() as log:
        server = [sys.executable, str(TESTS / "support" / "agents_server.py"), log.name]
        with running(started_by=[*server, "--port", "0", "--api-key", KEY]) as running_server:
            for name in names or [*RUN, "openai-agents", "pydantic-ai"]:
                bodies = record(name, running_server.url)
                if raw := os.environ.get("RAW"):
                    Path(raw, f"{name}.json").write_text(json.dumps(bodies), "utf-8")
                write(Path(folder, f"{name}.jsonl.xz"), bodies)
                print(f"{name}: {len(bodies)} requests")


if __name__ == "__main__":
    main(*sys.argv[1:])
