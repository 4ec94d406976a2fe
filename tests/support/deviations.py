"""Tools, marks and a check for tests of calls a little off their format."""

from __future__ import annotations

import json

from foretoken.api.types.results import Tool

from .parse_harness import Read, read, syntax

TOOLS = (
    Tool(
        name="f",
        parameters={
            "type": "object",
            "properties": {
                "s": {"type": "string"},
                "i": {"type": "integer"},
                "l": {"type": "array"},
                "b": {"type": "boolean"},
            },
        },
    ),
    Tool(name="g", parameters={"type": "object", "properties": {}}),
)
ONE = '{"name": "f", "arguments": {"s": "x"}}'
TWO = '{"name": "g", "arguments": {}}'
F, G = ("f", {"s": "x"}), ("g", {})
SI = ("f", {"s": "x", "i": 3})


def of(family: str, text: str) -> Read:
    """Read a text in the format of a family."""
    return read(lambda: syntax(family).parser(tools=TOOLS), text)


def check(family: str, text: str, *calls: tuple[str, dict], words: str = "") -> None:
    """See that a text has exactly these calls, all whole, and these words."""
    found = of(family, text)
    assert [(name, json.loads(arguments)) for name, arguments, _ in found.calls] == list(calls)
    assert all(is_whole for _, _, is_whole in found.calls)
    assert found.words == words


MARKS = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "generic": ("<tool_call>\n", "\n</tool_call>"),
    "mistral": ("[TOOL_CALLS] ", ""),
    "granite": ("<|tool_call|>", ""),
    "phi4": ("<|tool_call|>", "<|/tool_call|>"),
    "hunyuan": ("<tool_calls>", "</tool_calls>"),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": ("<function_calls>\n", "\n</function_calls>"),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "qwen3-coder": ("<tool_call>\n", "\n</tool_call>"),
    "seed": ("<seed:tool_call>\n", "\n</seed:tool_call>"),
    "minimax": ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    "glm": ("<tool_call>", "</tool_call>"),
}
