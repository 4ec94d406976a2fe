"""The client's side of each API: where a body has its conversation, and how answers go back.

Prompts are rendered by the code of the routes. A replay only needs to put answers and results of
tools into the next body, as the client did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import InvalidRequest

Item = dict[str, Any]
MARKS = ("cache_control", "id", "status")
"""Fields of items that are not part of their content."""
LEFT_OUT = (
    "model", "stream", "stream_options", "deadline_ms", "priority", "kv_transfer_params",
)  # fmt: skip
"""Fields of bodies that a replay leaves out, because they change no token of one request alone."""
TOKEN_IDS = ("logit_bias", "allowed_token_ids", "stop_token_ids")
SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. ``id`` is "" if the API has no ids. ``kind``: type of its item in Responses."""

    name: str
    arguments: object  # JSON text, or any JSON value
    id: str = ""
    kind: str = "function_call"

    @property
    def key(self) -> tuple[str, str]:
        """The name and the arguments; equal for equal calls."""
        return self.name, canonical(self.arguments)

    @property
    def text(self) -> str:
        """The call as text."""
        return f"{self.name}({canonical(self.arguments)})"


def canonical(arguments: object) -> str:
    """Return arguments as JSON text with sorted keys; a text that is not JSON as it is."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return str(arguments)
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)


class Form:
    """Bodies of OpenAI's chat completions; the base of the other forms."""

    field = "messages"

    def items(self, body: Mapping[str, Any]) -> list[Item]:
        """Return the messages or input items of a body."""
        given = body.get(self.field)
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        return [each for each in given or [] if isinstance(each, dict)]

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for a changed body with anything but a text or a list of objects.

        Responses that continue an earlier one need no input.
        """
        given = body.get(self.field)
        is_list = isinstance(given, list) and all(isinstance(each, dict) for each in given)
        if not (is_list or given is None or isinstance(given, str)):
            raise InvalidRequest(
                f"--change: {self.field} must be a list of objects", param="change"
            )

    def body(self, body: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
        """Return a body to submit, with other items."""
        kept = {name: value for name, value in body.items() if name not in LEFT_OUT}
        return {**kept, self.field: list(items), "stream": False}

    def with_system(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        """Return a body with another system prompt."""
        items = body[self.field]
        rest = items[1:] if items and items[0].get("role") in SYSTEM else items
        role = items[0]["role"] if len(rest) < len(items) else "system"
        return {**body, self.field: [{"role": role, "content": text}, *rest]}

    def is_answer(self, item: Item) -> bool:
        """Whether the model gave this item."""
        return item.get("role") == "assistant"

    def is_result(self, item: Item) -> bool:
        """Whether this item has the result of a tool."""
        return item.get("role") == "tool"

    def first_user(self, items: Sequence[Item]) -> object:
        """Return the first message of the user, without fields that are not its content."""
        return bare(next((each for each in items if each.get("role") == "user"), None))

    def calls(self, items: Sequence[Item]) -> list[Call]:
        """Return the tool calls of an answer's items."""
        found = []
        for item in items:
            for each in item.get("tool_calls") or ():
                called = each.get("function") or each.get("custom") or {}
                given = called.get("arguments", called.get("input"))
                found.append(Call(called.get("name", ""), given, each.get("id", "")))
        return found

    def answer(self, whole: Mapping[str, Any]) -> list[Item]:
        """Return the items with which a client sends back the answer in this response."""
        message = whole["choices"][0]["message"]
        return [{name: value for name, value in message.items() if value is not None}]

    def parts(self, items: Sequence[Item]) -> list[Item]:
        """Return the parts that have one result each."""
        return list(items)

    def part_id(self, part: Item) -> str:
        """Return the id of the call that a result belongs to; "" without one."""
        return str(part.get("tool_call_id", ""))

    def with_id(self, part: Item, call: Call) -> Item:
        """Return a recorded result as the result of ``call``."""
        return {**part, "tool_call_id": call.id}

    def result(self, call: Call, text: str) -> Item:
        """Return a new result."""
        return {"role": "tool", "tool_call_id": call.id, "content": text}

    def with_text(self, part: Item, text: str) -> Item:
        """Return a recorded result with another text."""
        return {**part, "content": text}

    def map_parts(self, item: Item, other: Callable[[Item], Item]) -> Item:
        """Return an item with ``other`` of each of its results."""
        return other(item)

    def results(self, recorded: Sequence[Item], parts: Sequence[Item]) -> list[Item]:
        """Return the items with these results. ``recorded``: the items in their place."""
        del recorded
        return list(parts)


class Messages(Form):
    """Bodies of Anthropic's Messages."""

    def with_system(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        """Return a body with another system prompt."""
        return {**body, "system": text}

    def is_result(self, item: Item) -> bool:
        """Whether this item has the result of a tool."""
        return item.get("role") == "user" and bool(self.parts([item]))

    def calls(self, items: Sequence[Item]) -> list[Call]:
        """Return the tool calls of an answer's items."""
        return [
            Call(block.get("name", ""), block.get("input"), block.get("id", ""))
            for block in _blocks(items)
            if block.get("type") == "tool_use"
        ]

    def answer(self, whole: Mapping[str, Any]) -> list[Item]:
        """Return the items with which a client sends back the answer in this response."""
        return [{"role": "assistant", "content": whole["content"] or "-"}]

    def parts(self, items: Sequence[Item]) -> list[Item]:
        """Return the parts that have one result each."""
        return [block for block in _blocks(items) if block.get("type") == "tool_result"]

    def part_id(self, part: Item) -> str:
        """Return the id of the call that a result belongs to."""
        return str(part.get("tool_use_id", ""))

    def with_id(self, part: Item, call: Call) -> Item:
        """Return a recorded result as the result of ``call``."""
        return {**part, "tool_use_id": call.id}

    def result(self, call: Call, text: str) -> Item:
        """Return a new result."""
        return {"type": "tool_result", "tool_use_id": call.id, "content": text}

    def map_parts(self, item: Item, other: Callable[[Item], Item]) -> Item:
        """Return an item with ``other`` of each of its results."""
        blocks = [
            other(each) if each.get("type") == "tool_result" else each for each in _blocks([item])
        ]
        return {**item, "content": blocks}

    def results(self, recorded: Sequence[Item], parts: Sequence[Item]) -> list[Item]:
        """Return one message with all results first, as the API requires."""
        rest = [each for each in _blocks(recorded) if each.get("type") != "tool_result"]
        return [{"role": "user", "content": [*parts, *rest]}] if parts or rest else []


class Responses(Form):
    """Bodies of OpenAI's Responses."""

    field = "input"

    def body(self, body: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
        """Return a body to submit, with other items. Its response is stored for the next turn."""
        return {**super().body(body, items), "store": True}

    def with_system(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        """Return a body with another system prompt."""
        items = body[self.field]
        if body.get("instructions") is None and items and items[0].get("role") in SYSTEM:
            return super().with_system(body, text)
        return {**body, "instructions": text}

    def is_answer(self, item: Item) -> bool:
        """Whether the model gave this item."""
        kind = str(item.get("type", ""))
        return super().is_answer(item) or kind == "reasoning" or kind.endswith("_call")

    def is_result(self, item: Item) -> bool:
        """Whether this item has the result of a tool."""
        return str(item.get("type", "")).endswith("_call_output")

    def calls(self, items: Sequence[Item]) -> list[Call]:
        """Return the tool calls of an answer's items."""
        return [
            Call(
                item.get("name", ""),
                item.get("arguments", item.get("input")),
                item.get("call_id", ""),
                item["type"],
            )
            for item in items
            if str(item.get("type", "")).endswith("_call")
        ]

    def answer(self, whole: Mapping[str, Any]) -> list[Item]:
        """Return the items with which a client sends back the answer in this response."""
        return list(whole["output"])

    def part_id(self, part: Item) -> str:
        """Return the id of the call that a result belongs to."""
        return str(part.get("call_id", ""))

    def with_id(self, part: Item, call: Call) -> Item:
        """Return a recorded result as the result of ``call``."""
        return {**part, "call_id": call.id}

    def result(self, call: Call, text: str) -> Item:
        """Return a new result."""
        return {"type": f"{call.kind}_output", "call_id": call.id, "output": text}

    def with_text(self, part: Item, text: str) -> Item:
        """Return a recorded result with another text."""
        return {**part, "output": text}


class Ollama(Form):
    """Bodies of Ollama's /api/chat, whose calls have no ids."""

    def calls(self, items: Sequence[Item]) -> list[Call]:
        """Return the tool calls of an answer's items."""
        functions = [
            each.get("function") or {} for item in items for each in item.get("tool_calls") or ()
        ]
        return [Call(each.get("name", ""), each.get("arguments")) for each in functions]

    def answer(self, whole: Mapping[str, Any]) -> list[Item]:
        """Return the items with which a client sends back the answer in this response."""
        return [whole["message"]]

    def part_id(self, part: Item) -> str:  # noqa: ARG002
        """Return "": results of this API have no ids."""
        return ""

    def with_id(self, part: Item, call: Call) -> Item:
        """Return a recorded result as the result of ``call``."""
        return {**part, "tool_name": call.name}

    def result(self, call: Call, text: str) -> Item:
        """Return a new result."""
        return {"role": "tool", "tool_name": call.name, "content": text}


class Gemini(Form):
    """Bodies of Gemini's generateContent. Names of fields may be in camel case or snake case."""

    field = "contents"

    def with_system(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        """Return a body with another system prompt."""
        kept = {name: value for name, value in body.items() if name != "system_instruction"}
        return {**kept, "systemInstruction": {"parts": [{"text": text}]}}

    def is_answer(self, item: Item) -> bool:
        """Whether the model gave this item."""
        return item.get("role") == "model"

    def is_result(self, item: Item) -> bool:
        """Whether this item has the result of a tool."""
        return bool(self.parts([item]))

    def first_user(self, items: Sequence[Item]) -> object:
        """Return the first message of the user, which may have no role."""
        return bare(next((each for each in items if not self.is_answer(each)), None))

    def calls(self, items: Sequence[Item]) -> list[Call]:
        """Return the tool calls of an answer's items."""
        given = [_field(part, "functionCall") for item in items for part in _parts(item)]
        return [
            Call(each.get("name", ""), each.get("args"), str(each.get("id") or ""))
            for each in given
            if each
        ]

    def answer(self, whole: Mapping[str, Any]) -> list[Item]:
        """Return the items with which a client sends back the answer in this response."""
        return [whole["candidates"][0]["content"]]

    def parts(self, items: Sequence[Item]) -> list[Item]:
        """Return the parts that have one result each."""
        return [part for item in items for part in _parts(item) if _field(part, _RESULT)]

    def part_id(self, part: Item) -> str:
        """Return the id of the call that a result belongs to; "" without one."""
        return str(_field(part, _RESULT).get("id") or "")

    def with_id(self, part: Item, call: Call) -> Item:
        """Return a recorded result as the result of ``call``."""
        return {_RESULT: {**_field(part, _RESULT), "id": call.id or None}}

    def result(self, call: Call, text: str) -> Item:
        """Return a new result."""
        given = {"name": call.name, "id": call.id or None, "response": {"result": text}}
        return {_RESULT: given}

    def with_text(self, part: Item, text: str) -> Item:
        """Return a recorded result with another text."""
        return {_RESULT: {**_field(part, _RESULT), "response": {"result": text}}}

    def map_parts(self, item: Item, other: Callable[[Item], Item]) -> Item:
        """Return an item with ``other`` of each of its results."""
        parts = [other(each) if _field(each, _RESULT) else each for each in _parts(item)]
        return {**item, "parts": parts}

    def results(self, recorded: Sequence[Item], parts: Sequence[Item]) -> list[Item]:
        """Return one message with all results."""
        rest = [part for item in recorded for part in _parts(item) if not _field(part, _RESULT)]
        return [{"role": "user", "parts": [*parts, *rest]}] if parts or rest else []


class Completions(Form):
    """Bodies of OpenAI's completions, which have a prompt and no conversation."""

    field = "prompt"

    def items(self, body: Mapping[str, Any]) -> list[Item]:
        """Return nothing: a prompt has no messages."""
        del body
        return []

    def check(self, body: Mapping[str, Any]) -> None:
        """Accept any prompt: the route checks it."""

    def body(self, body: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
        """Return a body to submit. Raises `InvalidRequest` for several prompts."""
        del items
        prompt = body.get(self.field)
        if isinstance(prompt, list) and len(prompt) > 1 and not _is_ids(prompt):
            raise InvalidRequest("a request with several prompts cannot be changed", param="change")
        return {**super().body(body, ()), self.field: prompt}

    def with_system(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        """Raise `InvalidRequest`."""
        del body, text
        raise InvalidRequest("--system: completions have no system prompt", param="system")

    def answer(self, whole: Mapping[str, Any]) -> list[Item]:
        """Return nothing: no request continues a completion."""
        del whole
        return []


_RESULT = "functionResponse"
_SNAKE = {_RESULT: "function_response", "functionCall": "function_call"}


def _field(part: Item, name: str) -> dict[str, Any]:
    """Return an object in a part of Gemini's, or an empty one."""
    found = part.get(name) or part.get(_SNAKE[name])
    return found if isinstance(found, dict) else {}


def _parts(item: Item) -> list[Item]:
    return [each for each in item.get("parts") or () if isinstance(each, dict)]


def token_id_fields(body: Mapping[str, Any]) -> list[str]:
    """Return the fields of a body that have token ids, which mean other texts to another model."""
    found = [name for name in TOKEN_IDS if body.get(name)]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        (prompt,) = prompt
    return [*found, "prompt"] if _is_ids(prompt) else found


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and all(type(each) is int for each in prompt)


def bare(value: object) -> object:
    """Return a value without fields that are not part of its content."""
    if isinstance(value, Mapping):
        return {name: bare(each) for name, each in value.items() if name not in MARKS}
    return [bare(each) for each in value] if isinstance(value, list) else value


def by_call(form: Form, calls: Sequence[Call], items: Sequence[Item]) -> list[Item | None]:
    """Return the recorded result of each call: by its id, or in order if there are no ids."""
    parts = form.parts(items)
    named = {form.part_id(part): part for part in parts if form.part_id(part)}
    rest = [part for part in parts if form.part_id(part) not in {each.id for each in calls}]
    found: list[Item | None] = []
    for call in calls:
        part = named.get(call.id) if call.id else None
        found.append(part if part is not None else rest.pop(0) if rest else None)
    return found


def _blocks(items: Sequence[Item]) -> list[Item]:
    """Return the blocks of messages; a text counts as one block."""
    found: list[Item] = []
    for item in items:
        content = item.get("content")
        if isinstance(content, str):
            found.append({"type": "text", "text": content})
        elif isinstance(content, list):
            found += [block for block in content if isinstance(block, dict)]
    return found


FORMS: Mapping[str, Form] = {
    "/v1/chat/completions": Form(),
    "/v1/messages": Messages(),
    "/v1/responses": Responses(),
    "/api/chat": Ollama(),
    "/v1/completions": Completions(),
    "/v1beta/models/{model:path}:generateContent": Gemini(),
}
"""Forms by the path of their route."""

_GEMINI = re.compile(r"(/v1beta/models/).+:(?:g|streamG)(enerateContent)")


def route_of(path: str) -> str:
    """Return the path of the route that answers a request, without streaming."""
    return _GEMINI.sub(r"\1{model:path}:g\2", path)
