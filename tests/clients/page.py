"""Writes docs/clients.md from a run of all clients: ``PYTHONPATH=tests python -m clients.page``."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from clients.catalog import CLIENTS, HERE, Client, Outcome, Urls, run_client
from support.embedders import write_reranker
from support.image_folders import write_image_folder
from support.server_process import running

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "clients.md"
KEY = "sk-local"  # as the scripts have it
FLAGS = ["--api-key", KEY, "--log-level", "error"]
SCRIPTED = [sys.executable, str(TESTS / "support" / "scripted_server.py"), *FLAGS, "--port", "0",
            "--reasoning-parser", "think", "--prices", '{"input": 2, "cached": 0.5, "output": 8}',
            ]  # fmt: skip
SEEING = [*FLAGS, "--served-model-name", "seeing"]
RANKING = [*FLAGS, "--served-model-name", "ranking"]
HEAD = """# Clients

These clients work with foretoken by their base URL alone. `PYTHONPATH=tests python -m
clients.page` writes this page: it runs each client in a process of its own against a real server
whose model gives scripted answers (`tests/support/scripted_server.py`), and for images and
scores against tiny models that see and rank. `make test-rest` repeats it and fails if the table is
not true. The client's script (`tests/clients/`) shows under the name of a feature what is asserted;
a feature that fails is in bold.

"""
POINTING = """
## Client setup

These lines are taken from the scripts in `tests/clients/`. The server is `foretoken serve --api-key
sk-local`. A server without that flag accepts any key; most clients need one to be set.
"""
COLUMNS = "| client | version | features | pass |\n|---|---|---|---|\n"
SERVED = {
    'f"{URL}/v1"': '"http://127.0.0.1:8000/v1"',
    "`${URL}/v1`": '"http://127.0.0.1:8000/v1"',
    'f"hosted_vllm/{MODEL}"': '"hosted_vllm/smollm2"',
    r"\bRANKING_URL\b": '"http://127.0.0.1:8000"',
    r"\bRANKING\b": '"Qwen3-Reranker-0.6B"',
    r"\bURL\b": '"http://127.0.0.1:8000"',
    r"\bMODEL\b": '"smollm2"',
    r"\bKEY\b": f'"{KEY}"',
}


@contextlib.contextmanager
def servers() -> Iterator[Urls]:
    """The servers that clients are run against: scripted, one that sees images, one that ranks."""
    with tempfile.TemporaryDirectory() as folder:
        sees, ranks = Path(folder, "sees"), Path(folder, "ranks")
        for each in (sees, ranks):
            each.mkdir()
        write_image_folder(sees)
        write_reranker(ranks)
        with (
            running(started_by=SCRIPTED) as scripted,
            running(SEEING, model=str(sees)) as seeing,
            running(RANKING, model=str(ranks)) as ranking,
        ):
            yield Urls(scripted.url, seeing.url, ranking.url)


def row(outcome: Outcome) -> str:
    """A client's line of the table."""
    versions = [
        version if len(outcome.versions) == 1 else f"{name} {version}"
        for name, version in outcome.versions.items()
    ]
    features = [f"**{each}**" if why else each for each, why in outcome.failures.items()]
    total = len(outcome.failures)
    passed = f"{total - len(outcome.failed)} of {total}"
    cells = [outcome.client.title, "<br>".join(versions), ", ".join(features), passed]
    return f"| {' | '.join(cells)} |\n"


def pointing(client: Client) -> str:
    """The few lines of a client's script that point it at a server, where it marks them."""
    source = (HERE / client.script).read_text()
    match = re.search(r"(?://|#) docs: begin\n(.*?)(?://|#) docs: end\n", source, re.DOTALL)
    if match is None:
        return ""
    lines = match[1]
    is_python = client.script.endswith(".py")
    imports = (_python_imports if is_python else _js_imports)(source, lines)
    for ours, theirs in SERVED.items():
        if ours.startswith("\\b"):
            lines = re.sub(ours, theirs, lines)
        else:
            lines = lines.replace(ours, theirs)
    name = "python" if is_python else "js"
    return f"\n### {client.title}\n\n```{name}\n{imports}\n{lines}```\n"


def _python_imports(source: str, lines: str) -> str:
    """The imports that ``lines`` need."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module not in ("harness", "__future__"):
            names = [each.name for each in node.names if re.search(rf"\b{each.name}\b", lines)]
            found += [f"from {node.module} import {', '.join(names)}\n"] if names else []
        elif isinstance(node, ast.Import) and f"{node.names[0].name}." in lines:
            found.append(f"import {node.names[0].name}\n")
    return "".join(found)


def _js_imports(source: str, lines: str) -> str:
    imports = re.findall(r'^import \{? ?([\w, ]+?) ?\}? from "[^.].*\n', source, re.MULTILINE)
    statements = re.findall(r'^import .* from "[^.].*\n', source, re.MULTILINE)
    return "".join(
        statement
        for statement, names in zip(statements, imports, strict=True)
        if any(re.search(rf"\b{name}\b", lines) for name in names.split(", "))
    )


def page(outcomes: Sequence[Outcome]) -> str:
    """All of docs/clients.md."""
    once = {outcome.client.script: outcome.client for outcome in reversed(outcomes)}
    return "".join(
        [
            HEAD,
            COLUMNS,
            *(row(outcome) for outcome in outcomes),
            POINTING,
            *(pointing(client) for client in reversed(once.values())),
        ]
    )


def main() -> int:
    """Run, write, and tell what failed."""
    for client in CLIENTS:
        if client.missing():
            print(f"{client.title}: {client.missing()}", file=sys.stderr)
            return 1
    with servers() as urls:
        outcomes = [run_client(client, urls) for client in CLIENTS]
    PAGE.write_text(page(outcomes))
    for outcome in outcomes:
        for feature, why in outcome.failed.items():
            print(f"{outcome.client.title}: {feature}: {why}", file=sys.stderr)
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
