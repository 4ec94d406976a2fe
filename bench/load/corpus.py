"""Text for prompts, taken from the standard library's sources; nothing is downloaded.

A prompt is assembled from cuts. A cut belongs to a key and is the same each time, so two prompts
share a prefix exactly as far as their keys are equal. Each cut begins with marks drawn for its key,
because pieces of one text could match by chance.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from .generator import Content

POOL_CHARS = 600_000
PART_CHARS = 60_000  # Characters that are tokenised at once.
CHARS_PER_TOKEN = 4.0  # Estimate for servers that cannot tokenise.
NUM_MARKS = 8  # Length of the random beginning of a cut.
RANDOM_TOKENS = 100_000
Encode = Callable[[str], Awaitable[list[int]]]
TOOLS = (
    ("read_file", "Read a file of the repository.", ("path", "first_line", "last_line")),
    ("write_file", "Write a file of the repository, whole.", ("path", "text")),
    ("search", "Search the repository for a regular expression.", ("pattern", "folder")),
    ("run_tests", "Run the tests that match a pattern.", ("pattern", "timeout")),
    ("shell", "Run a command and return what it prints.", ("command", "folder", "timeout")),
    ("ask_agent", "Give a task to another agent and wait for its summary.", ("task", "tools")),
)


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Token ids or text to cut prompts from; ``per_token`` is the number of items per token."""

    pool: Content
    tools: Content
    seed: object = 0
    per_token: float = 1.0

    def cut(self, key: object, length: int) -> Content:
        """Return the ``length`` tokens that belong to ``key``, the same each time."""
        rng = random.Random(f"{self.seed}/{key}")
        size = max(1, round(length * self.per_token))
        at = rng.randrange(len(self.pool))
        return _taken([_marks(self.pool, rng), self.pool[at : at + size], self.pool], size)

    def tool_schemas(self, length: int) -> Content:
        """Return ``length`` tokens of function schemas, which all agents share."""
        size = max(1, round(length * self.per_token))
        return _taken([self.tools, self.cut("tools", length)], size)


def _marks(pool: Content, rng: random.Random) -> Content:
    if isinstance(pool, str):
        return "".join(rng.choices(pool, k=NUM_MARKS))
    return rng.choices(pool, k=NUM_MARKS)


def _taken(parts: list[Content], size: int) -> Content:
    """Return the first ``size`` items of the parts; the last part is repeated as needed."""
    taken = parts[0][:size]
    while len(taken) < size:
        following = parts.pop(1) if len(parts) > 2 else parts[1]
        taken = taken + following[: size - len(taken)]  # type: ignore[operator]
    return taken


async def id_corpus(encode: Encode | None, vocab_size: int, seed: object) -> TextCorpus:
    """Return real text as token ids; without a tokenizer, random ids below ``vocab_size``."""
    if encode is None:
        rng = random.Random(f"{seed}/pool")
        drawn = rng.choices(range(vocab_size), k=RANDOM_TOKENS)
        return TextCorpus(drawn, drawn[: RANDOM_TOKENS // 100], seed)
    text = pool_text()
    parts = [text[at : at + PART_CHARS] for at in range(0, len(text), PART_CHARS)]
    pool = [token_id for part in parts for token_id in await encode(part)]
    return TextCorpus(pool, await encode(tools_text()), seed)


async def chat_corpus(encode: Encode | None, seed: object) -> TextCorpus:
    """Return text; without a tokenizer, a token is estimated as 4 characters."""
    text = pool_text()
    sample = text[:PART_CHARS]
    rate = CHARS_PER_TOKEN if encode is None else len(sample) / len(await encode(sample))
    return TextCorpus(text, tools_text(), seed, rate)


def pool_text(num_chars: int = POOL_CHARS) -> str:
    """Return Python's own sources, ordered by file name."""
    texts: list[str] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, texts)) >= num_chars:
            break
    return "".join(texts)[:num_chars]


def tools_text() -> str:
    """Return the agents' tools in OpenAI's format, as templates write them into a prompt."""
    return "\n".join(json.dumps(_schema(*tool)) for tool in TOOLS)


def _schema(name: str, description: str, parameters: tuple[str, ...]) -> dict[str, object]:
    properties = {each: {"type": "string", "description": f"The {each}."} for each in parameters}
    shape = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": shape}
    return {"type": "function", "function": function}
