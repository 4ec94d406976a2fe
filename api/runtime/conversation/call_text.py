"""Tool calls as text in the model's own format, for templates that do not render calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...parsing.families import FAMILIES
from ...parsing.formats.generic import as_text
from .tools import json_text

JSON_LISTS = ("granite", "phi4", "hunyuan")  # formats with calls in a JSON list, between delimiters
PYTHON_LISTS = ("lfm2", "olmo3")  # formats whose calls are a list of Python calls


def with_call_text(message: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """Return the message with its calls after its content, as text in the format of ``family``."""
    if family not in (*JSON_LISTS, *PYTHON_LISTS):
        return as_text([message], (), has_system_role=True)[0]
    begin, end = (*FAMILIES[family].marks, "")[:2]
    write = _json_call if family in JSON_LISTS else _python_call
    calls = ", ".join(write(call["function"]) for call in message["tool_calls"])
    rest = {key: each for key, each in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{message.get('content') or ''}{begin}[{calls}]{end}"}


def _json_call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json_text(arguments)
    return f'{{"name": {json_text(function["name"])}, "arguments": {text}}}'


def _python_call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return f"{function['name']}({arguments})"
    given = (f"{key}={value!r}" for key, value in arguments.items())
    return f"{function['name']}({', '.join(given)})"
