"""Recorded sessions of agents: the bodies of their requests, and bodies with other answers in them.

A recording is a file of JSON lines, ``.jsonl`` or packed ``.jsonl.xz``, with one request per line:
``{"path": "/v1/messages", "body": {...}}``. Bodies follow chat completions, Responses or
Anthropic's Messages. An agent sends back the answers that it received. So each body is sent with
the answers of this run in place of the recorded ones; everything else stays as recorded.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

Item = dict[str, Any]
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
MARKS = ("cache_control", "id", "status")  # Fields of items that are not part of their content.
CALLS = ("function_call", "custom_tool_call")


class Request(msgspec.Struct):
    """One recorded request."""

    path: str
    body: Item

    @property
    def items(self) -> list[Item]:
        """Messages of the conversation, or items of its input."""
        if self.path != "/v1/responses":
            return list(self.body["messages"])
        given = self.body["input"]
        return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)


@dataclass(slots=True)
class Call:
    """A tool call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """An answer: its text without reasoning, and its tool calls."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """A request of a session, and the earlier request that it continues, if any."""

    request: Request
    parent: int | None
    # Index of the request that gave the answer, by the answer's place among the items.
    answers: dict[int, int]
    calls: bool = False  # Whether the recorded answer has tool calls.


def read_recordings(path: Path) -> dict[str, list[Request]]:
    """Read the recordings of a file or folder, by name. Raises SystemExit if there are none."""
    files = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
    found = {each.name.partition(".jsonl")[0]: _read(each) for each in files}
    if not found:
        raise SystemExit(f"--record: {path} has no *.jsonl or *.jsonl.xz files")
    return found


def _read(path: Path) -> list[Request]:
    try:
        data = path.read_bytes()
        lines = (lzma.decompress(data) if path.suffix == ".xz" else data).splitlines()
        requests = [msgspec.json.decode(line, type=Request) for line in lines if line.strip()]
        if not requests or any(each.path not in PATHS or not each.items for each in requests):
            raise ValueError(
                f"the recording must have requests, each with a path of {', '.join(PATHS)}"
            )
    except (OSError, lzma.LZMAError, msgspec.DecodeError, ValueError, KeyError) as error:
        raise SystemExit(f"--record: {path}: {error}") from None
    return requests


def steps(requests: Sequence[Request]) -> list[Step]:
    """Return the requests of a session, each with the request that it continues.

    A request continues the longest earlier request with the same first user message and fewer
    items, if the first additional item is an answer. O(requests squared).
    """
    found: list[Step] = []
    for request in requests:
        items = request.items
        earlier = [
            (len(step.request.items), index)
            for index, step in enumerate(found)
            if _continues(step.request, request, items)
        ]
        parent = max(earlier)[1] if earlier else None
        answers = {}
        if parent is not None:
            length = len(found[parent].request.items)
            answers = {**found[parent].answers, length: parent}
            found[parent].calls = any(map(_has_call, _answer_at(items, length)))
        found.append(Step(request, parent, answers))
    return found


def _continues(before: Request, now: Request, items: Sequence[Item]) -> bool:
    length = len(before.items)
    return (
        before.path == now.path
        and length < len(items)
        and is_answer(items[length])
        and _bare(_first_user(before.items)) == _bare(_first_user(items))
    )


def _first_user(items: Sequence[Item]) -> Item | None:
    return next((item for item in items if item.get("role") == "user"), None)


def _bare(value: object) -> object:
    """Return a value without fields that are not part of its content."""
    if isinstance(value, Mapping):
        return {name: _bare(each) for name, each in value.items() if name not in MARKS}
    return [_bare(each) for each in value] if isinstance(value, list) else value


def is_answer(item: Item) -> bool:
    """Whether the model produced this item."""
    return item.get("role") == "assistant" or item.get("type") in (*CALLS, "reasoning")


def _answer_at(items: Sequence[Item], start: int) -> Sequence[Item]:
    """Return the consecutive items from ``start`` on that the model produced."""
    end = start
    while end < len(items) and is_answer(items[end]):
        end += 1
    return items[start:end]


def _has_call(item: Item) -> bool:
    content = item.get("content")
    blocks = content if isinstance(content, list) else []
    return (
        bool(item.get("tool_calls"))
        or item.get("type") in CALLS
        or any(block.get("type") == "tool_use" for block in blocks)
    )


# -- bodies with other answers ------------------------------------------------------------------


def with_answers(step: Step, said: Mapping[int, Said]) -> list[Item]:
    """Return the items of a request with this run's answers in place of the recorded ones.

    Tool results are assigned to the answer's calls in order. A result without a call becomes a user
    message; a call without a result gets a copy of the last result.
    """
    items, found, at = step.request.items, list[Item](), 0
    dialect = DIALECTS[step.request.path]
    while at < len(items):
        run = _answer_at(items, at)
        if not run or at not in step.answers:
            found.append(items[at])
            at += 1
            continue
        answer = said[step.answers[at]]
        results = [*takewhile(dialect.is_result, items[at + len(run) :])]
        found += [*dialect.answer(run, answer), *dialect.results(results, answer)]
        at += len(run) + len(results)
    return found


def _text_as(recorded: object, text: str) -> object:
    """Return a text in the format that the agent uses: plain, or as a block."""
    if not isinstance(recorded, list):
        return text or None
    block = next((each for each in recorded if "text" in each), {"type": "text"})
    return [{**block, "text": text}] if text else []


def _paired(results: Sequence[Item], calls: Sequence[Call]) -> Iterator[tuple[Item, Call | None]]:
    """Yield results with their calls."""
    for index in range(max(len(results), len(calls)) if results else 0):
        call = calls[index] if index < len(calls) else None
        yield results[min(index, len(results) - 1)], call


class Chat:
    """Chat completions."""

    @staticmethod
    def answer(run: Sequence[Item], said: Said) -> list[Item]:
        """Return the answer's messages."""
        message = {k: v for k, v in run[0].items() if not k.startswith("reasoning")}
        message.pop("tool_calls", None)
        message["content"] = _text_as(message.get("content"), said.text)
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        return [message]

    @staticmethod
    def is_result(item: Item) -> bool:
        """Whether the item is a tool result."""
        return item.get("role") == "tool"

    @staticmethod
    def results(items: Sequence[Item], said: Said) -> list[Item]:
        """Return the results of the answer's calls."""
        return [
            {"role": "user", "content": item["content"]}
            if call is None
            else {**item, "tool_call_id": call.id}
            for item, call in _paired(items, said.calls)
        ]


class Messages:
    """Anthropic's Messages."""

    @staticmethod
    def answer(run: Sequence[Item], said: Said) -> list[Item]:
        """Return the answer's message; its last block keeps a recorded ``cache_control``."""
        blocks: list[Item] = [{"type": "text", "text": said.text}] if said.text else []
        for call in said.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name}
            blocks.append({**block, "input": _arguments(call)})
        recorded = run[-1]["content"]
        if blocks and isinstance(recorded, list) and "cache_control" in recorded[-1]:
            blocks[-1]["cache_control"] = recorded[-1]["cache_control"]
        return [{**run[0], "content": blocks or "-"}]

    @staticmethod
    def is_result(item: Item) -> bool:
        """Whether the item contains a tool result."""
        content = item["content"]
        return isinstance(content, list) and any(each["type"] == "tool_result" for each in content)

    @staticmethod
    def results(items: Sequence[Item], said: Said) -> list[Item]:
        """Return one message with all results first, as the API requires."""
        blocks = [block for item in items for block in item["content"]]
        given = [block for block in blocks if block["type"] == "tool_result"]
        rest = [block for block in blocks if block["type"] != "tool_result"]
        results, texts = list[Item](), list[Item]()
        for block, call in _paired(given, said.calls):
            if call is not None:
                results.append({**block, "tool_use_id": call.id})
                continue
            content = block.get("content") or ""
            texts += content if isinstance(content, list) else [{"type": "text", "text": content}]
        return [{"role": "user", "content": [*results, *texts, *rest]}] if blocks else []


def _arguments(call: Call) -> Item:
    """Return a call's arguments as an object; JSON that was cut off is wrapped in one."""
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"INVALID_JSON": call.arguments}


class Responses:
    """OpenAI's Responses."""

    @staticmethod
    def answer(_: Sequence[Item], said: Said) -> list[Item]:
        """Return the answer's items."""
        found: list[Item] = []
        if said.text:
            block = {"type": "output_text", "text": said.text}
            found.append({"type": "message", "role": "assistant", "content": [block]})
        for call in said.calls:
            named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            found.append({"type": "function_call", **named})
        return found

    @staticmethod
    def is_result(item: Item) -> bool:
        """Whether the item is a tool result."""
        return item.get("type") in [f"{each}_output" for each in CALLS]

    @staticmethod
    def results(items: Sequence[Item], said: Said) -> list[Item]:
        """Return the results of the answer's calls."""
        found: list[Item] = []
        for item, call in _paired(items, said.calls):
            if call is None:
                output = item["output"]
                block = {"type": "input_text", "text": output}
                content = output if isinstance(output, list) else [block]
                found.append({"type": "message", "role": "user", "content": content})
            else:
                kind = "function_call_output"
                found.append({"type": kind, "call_id": call.id, "output": item["output"]})
        return found


DIALECTS: dict[str, type[Chat] | type[Messages] | type[Responses]] = dict(
    zip(PATHS, (Chat, Messages, Responses), strict=True)
)
