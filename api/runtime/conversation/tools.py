"""Tools, response formats and cache options of OpenAI's bodies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ....core.errors import InvalidRequest
from ....core.interface.request import DEFAULT_CACHE, CacheOptions, Pin
from ...types.results import Tool, ToolChoice
from ...types.sampling_params import MAX_CHOICES, MAX_GRAMMAR_CHARS

SECONDS = {"30m": 1800.0, "12h": 12 * 3600.0, "24h": 24 * 3600.0}  # of what keeps a prompt
WHOLE = 2**31 - 1  # tokens: more than any prompt has
ANY_OBJECT: Mapping[str, object] = {"type": "object"}


GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
NonEmpty = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_CHOICES)]


class CacheSpec(Struct, kw_only=True):
    """``cache``: whether the request reads from and writes to the prefix cache."""

    read: bool = True
    write: bool = True


class PromptCacheOptions(Struct, kw_only=True):
    """``prompt_cache_options`` of OpenAI: pin, prewarm and explain a prompt."""

    mode: str | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class FunctionSpec(Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct, kw_only=True):
    """One of ``tools``; only functions are supported."""

    type: str = "function"
    function: FunctionSpec | None = None


class FunctionName(Struct):
    """A function, by name."""

    name: str


class AllowedTool(Struct, kw_only=True):
    """One of ``allowed_tools.tools``."""

    type: str = "function"
    function: FunctionName | None = None


class AllowedTools(Struct, kw_only=True):
    """``tool_choice.allowed_tools``: a subset of the tools; the prompt keeps all."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool] = []


class NamedChoice(Struct, kw_only=True):
    """``tool_choice`` that names a function, or lists those that may be called."""

    type: str = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchemaSpec(Struct, kw_only=True):
    """``response_format.json_schema``."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None


class StructuredOutputs(Struct, kw_only=True):
    """``structured_outputs`` as vLLM's clients send it."""

    json: dict[str, Any] | str | None = None
    regex: GrammarText | None = None
    choice: Texts | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


Tools = list[ToolSpec]


def read_tools(specs: Sequence[ToolSpec] | None) -> list[Tool]:
    """The tools of a body; raises `InvalidRequest` for one that is no function."""
    tools = []
    for index, spec in enumerate(specs or ()):
        if spec.type != "function" or spec.function is None:
            where = f"tools[{index}]"
            raise InvalidRequest(
                f"{where} must be of type function and have a function, not {spec.type}",
                param=where,
            )
        function = spec.function
        tools.append(
            Tool(
                name=function.name,
                description=function.description,
                parameters=function.parameters,
                strict=bool(function.strict),
            )
        )
    return tools


def read_choice(
    choice: Literal["none", "auto", "required"] | NamedChoice | None,
    tools: Sequence[Tool],
    *,
    parallel: bool,
) -> ToolChoice:
    """``tool_choice`` and ``parallel_tool_calls``; raises `InvalidRequest`."""
    if isinstance(choice, NamedChoice):
        if choice.allowed_tools is not None:
            specs = choice.allowed_tools.tools
            names = {spec.function.name for spec in specs if spec.function is not None}
            mode = choice.allowed_tools.mode
            return allowed_choice(names, tools, mode=mode, parallel=parallel)
        if choice.function is None:
            raise InvalidRequest("tool_choice must name a function", param="tool_choice")
        return named_choice(choice.function.name, tools, parallel=parallel)
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    return ToolChoice(mode=choice or "auto", parallel=parallel)


def allowed_choice(
    names: Collection[str],
    tools: Sequence[Tool],
    *,
    mode: Literal["auto", "required"],
    parallel: bool,
) -> ToolChoice:
    """A choice of some tools; raises `InvalidRequest` where one of these names has none."""
    for name in names:
        named_choice(name, tools, parallel=parallel)
    return ToolChoice(mode=mode, parallel=parallel, allowed=frozenset(names))


def named_choice(name: str, tools: Sequence[Tool], *, parallel: bool) -> ToolChoice:
    """A choice of one tool; raises `InvalidRequest` where there is none of that name."""
    if not any(tool.name == name for tool in tools):
        message = f"tool_choice names {name}, which is not among the tools"
        raise InvalidRequest(message, param="tool_choice")
    return ToolChoice(mode="required", name=name, parallel=parallel)


def read_cache(
    spec: CacheSpec | None, retention: str | None, options: PromptCacheOptions | None
) -> CacheOptions:
    """``cache``, ``prompt_cache_retention`` and ``prompt_cache_options.ttl``; the longest holds."""
    if spec is None and retention is None and options is None:
        return DEFAULT_CACHE
    seconds = max(
        SECONDS.get(retention or "", 0.0), SECONDS.get((options and options.ttl) or "", 0.0)
    )
    spec = spec or CacheSpec()
    pins = (Pin(WHOLE, seconds),) if seconds else ()
    return CacheOptions(read=spec.read, write=spec.write, pins=pins)


def structured_outputs(given: StructuredOutputs | None) -> dict[str, object]:
    """vLLM's form of structured output as fields of `SamplingParams`."""
    if given is None:
        return {}
    is_object = ANY_OBJECT if given.json_object else None
    found = {
        "json_schema": is_object if given.json is None else given.json,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
    }
    return {name: value for name, value in found.items() if value is not None}


def format_schema(format: ResponseFormat | None) -> Mapping[str, object] | None:
    """The JSON schema of a ``response_format``; raises `InvalidRequest`."""
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return ANY_OBJECT
    if format.json_schema is None or format.json_schema.schema is None:
        raise InvalidRequest("response_format needs json_schema.schema", param="response_format")
    return format.json_schema.schema


def plain_call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Templates want arguments as an object, clients send them as a JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except RecursionError:
        where = f"{path}.tool_calls"
        raise InvalidRequest(f"{where}: arguments are nested too deeply", param=where) from None
    except (msgspec.DecodeError, ValueError):
        return dict(call)  # a model may have written anything: it is shown as it is
    return {**call, "function": {**function, "arguments": arguments}}
