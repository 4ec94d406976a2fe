"""Bodies that are served, and how to put something else into one place of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Place = tuple[str | int, ...]
"""The path to a value in a body."""

MARK = "@@here@@"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLED = {
    "max_tokens": 3,
    "n": 1,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "min_tokens": 0,
    "stop": ["zzz"],
    "stop_token_ids": [7],
    "seed": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {"7": 1.0},
    "allowed_token_ids": None,
    "bad_words": ["zzz"],
    "ignore_eos": False,
    "speculation": 2,
    "cache_salt": "s",
    "priority": 0,
    "deadline_ms": 60000,
    "cache": {"read": True, "write": True},
    "stream": False,
    "explain_cache": False,
    "model": None,
    "stream_options": {"include_usage": True},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m", "prewarm": False},
    "nvext": {"agent_hints": {"priority": 1, "osl": 8, "speculative_prefill": True}},
    "kv_hints": {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {
                "action_id": "a",
                "action_type": "kv.retain",
                "action_version": "1.0",
                "payload": {"directives": [{"end": 4, "priority": 50, "duration": 9.0}]},
            }
        ],
    },
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": "hi", "name": "n"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ],
            **SAMPLED,
            "logprobs": True,
            "top_logprobs": 1,
            "prediction": {"type": "content", "content": "x"},
        },
        {
            "messages": HI,
            "max_tokens": 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            },
        },
        {
            "messages": HI,
            "max_tokens": 3,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
        },
        {
            "messages": HI,
            "max_completion_tokens": 3,
            "structured_outputs": {"json": SCHEMA},
            "chat_template_kwargs": {"enable_thinking": True},
            "reasoning_effort": "low",
        },
    ],
    "/v1/completions": [
        {"prompt": "hi", **SAMPLED, "echo": False, "logprobs": 1, "best_of": 1, "prediction": "x"},
        {"prompt": ["a", "b"], "max_tokens": 2},
        {"prompt": [[5, 6], [7]], "max_tokens": 2},
        {"prompt": "hi", "max_tokens": 3, "regex": "a+"},
        {"prompt": "hi", "max_tokens": 3, "json_schema": SCHEMA},
        {"prompt": "hi", "max_tokens": 3, "grammar": 'start: "a"'},
        {"prompt": "hi", "max_tokens": 3, "choice": ["a", "b"]},
    ],
    "/v1/embeddings": [
        {
            "input": ["a", "b"],
            "dimensions": 256,
            "encoding_format": "float",
            "cache_salt": "s",
            "priority": 0,
            "deadline_ms": 60000,
            "stream": False,
            "model": None,
        },
        {"input": [5, 6], "encoding_format": "base64"},
        {"input": [[5, 6], [7]]},
    ],
    "/v1/responses": [
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "hi"}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "instructions": "i",
            "max_output_tokens": 3,
            "metadata": {"a": "b"},
            "store": True,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "reasoning": {"effort": "low"},
        },
        {
            "input": "hi",
            **SAMPLED,
            "max_tokens": None,
            "max_output_tokens": 3,
            "truncation": "auto",
            "context_management": [{"type": "compaction", "compact_threshold": 100000}],
        },
        {
            "input": [
                {"type": "message", "role": "user", "content": "hi"},
                {"type": "compaction_trigger"},
            ],
        },
        {
            "input": "hi",
            "max_output_tokens": 3,
            "tool_choice": {"type": "function", "name": "f"},
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        },
        {
            "input": "hi",
            "max_output_tokens": 3,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        },
    ],
    "/v1/responses/input_tokens": [{"input": "hi", "instructions": "i"}],
    "/api/chat": [
        {
            "model": None,
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "thinking": "t",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x"}}}],
                },
                {"role": "tool", "tool_name": "f", "content": "1"},
            ],
            "stream": False,
            "think": False,
            "keep_alive": "5m",
            "options": {
                "num_predict": 3,
                "num_ctx": 4096,
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "seed": 1,
                "stop": ["zzz"],
                "repeat_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "speculation": 2,
                "cache_salt": "s",
            },
            "deadline_ms": 60000,
        },
        {
            "messages": HI,
            "tools": [{"type": "function", "function": FUNCTION}],
            "options": {"num_predict": 3},
        },
        {"messages": HI, "format": SCHEMA, "options": {"num_predict": 3}, "stream": True},
    ],
    "/api/generate": [
        {"prompt": "hi", "system": "s", "stream": False, "options": {"num_predict": 3}},
        {"prompt": "hi", "raw": True, "format": "json", "options": {"num_predict": 3}},
    ],
    "/v1/messages": [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "text",
                            "text": "hi",
                            "cache_control": {"type": "ephemeral", "ttl": "5m"},
                        }
                    ],
                },
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}],
                },
            ],
            **SAMPLED,
            "system": [{"type": "text", "text": "s"}],
            "stop_sequences": ["zzz"],
        },
        {
            "messages": HI,
            "max_tokens": 3,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "disabled"},
        },
        {
            "messages": HI,
            "max_tokens": 3,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "compaction", "content": "c", "encrypted_content": None},
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}],
                },
            ],
            "max_tokens": 3,
            "context_management": {
                "edits": [
                    {
                        "type": "clear_thinking_20251015",
                        "keep": {"type": "thinking_turns", "value": 1},
                    },
                    {
                        "type": "clear_tool_uses_20250919",
                        "trigger": {"type": "tool_uses", "value": 1},
                        "keep": {"type": "tool_uses", "value": 0},
                        "clear_at_least": {"type": "input_tokens", "value": 1},
                        "exclude_tools": ["g"],
                        "clear_tool_inputs": ["f"],
                    },
                    {
                        "type": "compact_20260112",
                        "trigger": {"type": "input_tokens", "value": 100000},
                        "pause_after_compaction": False,
                        "instructions": "i",
                    },
                ]
            },
        },
    ],
    "/v1/messages/count_tokens": [{"messages": HI, "system": "s"}],
    "/tokenize": [
        {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True},
        {"messages": HI},
    ],
    "/detokenize": [{"tokens": [5, 6]}],
    "/cache/flush": [{"cache_salt": "s", "prefix": list(range(16))}, {"prefix": HI * 4}],
}
"""By path, with a value in as many places as can be."""


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every place in a body, the body itself first."""
    yield at
    inner = value.items() if isinstance(value, dict) else _numbered(value)
    for key, each in inner:
        yield from places(each, (*at, key))


def replaced(body: Any, place: Place, text: str) -> bytes:
    """The body as JSON, with this text in one place, well-formed or not."""
    marked = json.dumps(_marked(body, place))
    return marked.replace(f'"{MARK}"', text).encode("utf-8", "surrogatepass")


def _marked(body: Any, place: Place) -> Any:
    if not place:
        return MARK
    key, rest = place[0], place[1:]
    if isinstance(body, list):
        return [_marked(each, rest) if at == key else each for at, each in enumerate(body)]
    return {**body, key: _marked(body.get(key), rest)}


def _numbered(value: Any) -> Iterator[tuple[int, Any]]:
    return iter(enumerate(value if isinstance(value, list) else ()))
