"""Catalog of clients: where each is installed, and how one is run against a server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent.parent / ".venv-clients"  # made by `make test-rest`
NODE_MODULES = HERE / "js" / "node_modules"
RUN_SECONDS = 120.0
# A developer's own keys and addresses must not reach these clients.
FOREIGN = (
    "OPENAI_",
    "ANTHROPIC_",
    "COHERE_",
    "GEMINI_",
    "GOOGLE_",
    "CO_",
    "LANGCHAIN_",
    "LANGSMITH_",
    "LITELLM_",
    "LOGFIRE_",
    "OLLAMA_",
    "PYTHONPATH",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client program."""

    title: str
    script: str  # beside this file
    environment: str = ""  # of Python, below ENVIRONMENTS; empty: Node

    @property
    def key(self) -> str:
        """A short name for tests."""
        return f"{Path(self.script).stem.removeprefix('run_')}-{self.environment or 'js'}"

    def command(self) -> list[str]:
        """Command line that runs the client's script, up to the script's own arguments."""
        path = str(HERE / self.script)
        if not self.environment:
            return ["node", path]
        return [str(ENVIRONMENTS / self.environment / "bin" / "python"), path]

    def missing(self) -> str:
        """Why it cannot run on this machine, or nothing."""
        if self.environment:
            is_there = (ENVIRONMENTS / ".done").is_file()
            return "" if is_there else f"{ENVIRONMENTS.name} is not installed: run make test-rest"
        if shutil.which("node") is None:
            return "node is not installed"
        is_there = (NODE_MODULES / ".done").is_file()
        return "" if is_there else "npm has not installed the clients: run make test-rest"


CLIENTS = (
    Client(title="openai", script="run_openai.py", environment="openai3"),
    Client(title="openai, Responses", script="run_openai_responses.py", environment="openai3"),
    Client(title="openai 2", script="run_openai.py", environment="openai2"),
    Client(title="openai 2, Responses", script="run_openai_responses.py", environment="openai2"),
    Client(title="anthropic", script="run_anthropic.py", environment="openai3"),
    Client(title="LangChain", script="run_langchain.py", environment="openai3"),
    Client(title="LlamaIndex", script="run_llama_index.py", environment="openai2"),
    Client(title="pydantic-ai", script="run_pydantic_ai.py", environment="openai3"),
    Client(title="OpenAI Agents SDK", script="run_openai_agents.py", environment="openai3"),
    Client(title="LiteLLM", script="run_litellm.py", environment="openai2"),
    Client(title="Instructor", script="run_instructor.py", environment="openai2"),
    Client(title="Cohere", script="run_cohere.py", environment="openai2"),
    Client(title="smolagents", script="run_smolagents.py", environment="openai3"),
    Client(title="ollama", script="run_ollama.py", environment="openai3"),
    Client(title="google-genai", script="run_google_genai.py", environment="openai3"),
    Client(title="openai (JavaScript)", script="js/run_openai.mjs"),
    Client(title="anthropic (JavaScript)", script="js/run_anthropic.mjs"),
    Client(title="ollama (JavaScript)", script="js/run_ollama.mjs"),
    Client(title="Vercel AI SDK", script="js/run_ai_sdk.mjs"),
)


class Urls(NamedTuple):
    """Addresses of the servers that clients are run against, without /v1."""

    scripted: str
    seeing: str  # its model is tiny and random, and sees images
    ranking: str  # its model is tiny and random, and ranks documents

    @property
    def variables(self) -> dict[str, str]:
        """Variables of a client's process."""
        local = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        return local | {
            "FORETOKEN_URL": self.scripted,
            "FORETOKEN_SEEING_URL": self.seeing,
            "FORETOKEN_RANKING_URL": self.ranking,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of one client's run, by feature."""

    client: Client
    versions: dict[str, str]  # by package
    failures: dict[str, str]  # by feature; empty text: it passed
    stderr: str

    @property
    def failed(self) -> dict[str, str]:
        """The features that do not work, and why."""
        return {feature: why for feature, why in self.failures.items() if why}


def run_client(client: Client, urls: Urls) -> Outcome:
    """Run a client against these servers."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        client.command(),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env=kept | urls.variables,
        check=False,
    )
    head, *rows = [json.loads(line) for line in done.stdout.splitlines()] or [{"versions": {}}]
    failures = {row["feature"]: "" if row["ok"] else row["detail"] for row in rows}
    if done.returncode:
        failures["running to the end"] = f"exit status {done.returncode}"
    return Outcome(client=client, versions=head["versions"], failures=failures, stderr=done.stderr)
