"""Tasks: the JSON Lines file of questions with their expected answers, checked as it is read."""

from __future__ import annotations

import codecs
import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...core.errors import InvalidRequest
from ..runtime.conversation.messages import read_message

MAX_SEED = 2**31 - 1  # other servers accept no larger seed


class Task(Struct, kw_only=True, forbid_unknown_fields=True):
    """One task.

    - ``messages`` is a conversation, or ``prompt`` a text to be continued without a chat template.
    - ``expected``: what the scorer compares the answer with.
    - ``scorer``: how the answer is scored (`scorers`); None: the scorer of ``--scorer``.
    - ``tests``: a pytest file for the scorer ``pytest``.
    - ``question``, ``levels``: what the judge is asked, and the names of its levels, worst first.
    - ``tools``: tools that the model may call, in OpenAI's form.
    """

    id: str | int | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    expected: Any = None
    scorer: str | None = None
    tests: str | None = None
    question: str | None = None
    levels: list[str] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The question as one text, for a judge."""
        if self.messages is None:
            return self.prompt or ""
        return "\n\n".join(_content(each) for each in self.messages if each["role"] == "user")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(
        str(each["text"]) for each in parts if isinstance(each, dict) and "text" in each
    )


class TaskFile(Struct, kw_only=True):
    """The tasks in the order in which they are asked, and the SHA-256 of their file."""

    path: str
    sha256: str
    tasks: list[Task]


def read_tasks(path: Path, seed: int) -> TaskFile:
    """Return the tasks of a file, shuffled by ``seed`` so that a sorted file does no harm.

    A task without an id is named by the number of its line. Raises `InvalidRequest`, which names
    the line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"--tasks: {path}: {error.strerror}", param="tasks") from None
    tasks: dict[str | int, Task] = {}
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--tasks: {path}, line {number}"
        task = _task(line, where)
        task.id = number if task.id is None else task.id
        if task.id in tasks:
            raise InvalidRequest(f"{where}: a task before has the id {task.id!r}", param="tasks")
        tasks[task.id] = task
    if not tasks:
        raise InvalidRequest(f"--tasks: {path} has no tasks", param="tasks")
    shuffled = [*tasks.values()]
    random.Random(seed).shuffle(shuffled)
    return TaskFile(path=path.name, sha256=hashlib.sha256(data).hexdigest(), tasks=shuffled)


def _task(line: bytes, where: str) -> Task:
    try:
        task = msgspec.json.decode(line, type=Task)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not a task: {error}", param="tasks") from None
    given = [each for each in (task.messages, task.prompt) if each is not None]
    if len(given) != 1 or not given[0]:
        raise InvalidRequest(f"{where}: a task has either messages or a prompt", param="tasks")
    try:
        for index, message in enumerate(task.messages or ()):
            read_message(message, f"messages[{index}]")
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}", param="tasks") from None
    return task


def seeds_of(seed: int, task: Task, num_samples: int) -> Sequence[int]:
    """Return the seeds of a task's samples, from 0 to `MAX_SEED`.

    They depend on the task's id and not on its place, so that they are the same in a file with
    more tasks.
    """
    return [
        int.from_bytes(hashlib.sha256(f"{seed}/{task.id}/{sample}".encode()).digest()[:4]) >> 1
        for sample in range(num_samples)
    ]
