"""Tools, response formats and cache options in OpenAI's request bodies."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from ....core.errors import InvalidRequest
from ....core.interface.request import DEFAULT_CACHE, CacheOptions, Pin
from ...structured.schemas.preparing import with_options
from ...types.fields import Refused
from ...types.results import Tool, ToolChoice
from ...types.sampling_params import MAX_CHOICES, MAX_GRAMMAR_CHARS
from .custom_tools import custom_tool
from .left_out import tell_left_out

SECONDS = {"30m": 1800.0, "12h": 12 * 3600.0, "24h": 24 * 3600.0}  # retention in seconds
WHOLE = 2**31 - 1  # more tokens than any prompt has
ANY_OBJECT: Mapping[str, object] = {"type": "object"}


GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
NonEmpty = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_CHOICES)]


class CacheSpec(Struct, kw_only=True):
    """The field ``cache``: whether a request reads from and writes to the prefix cache."""

    read: bool = True
    write: bool = True


class PromptCacheOptions(Struct, kw_only=True):
    """OpenAI's field ``prompt_cache_options``: pin, prewarm and explain a prompt."""

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


class GrammarSpec(Struct, kw_only=True):
    """``format.grammar`` of a custom tool."""

    syntax: str
    definition: GrammarText


class CustomFormat(Struct, kw_only=True):
    """``format`` of a custom tool: any text, or a grammar."""

    type: Literal["text", "grammar"] = "text"
    grammar: GrammarSpec | None = None


class CustomSpec(Struct, kw_only=True):
    """A custom tool, whose input is one text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class ToolSpec(Struct, kw_only=True):
    """An entry of ``tools``: a function or a custom tool. Other types are skipped."""

    known_kinds: ClassVar[frozenset[str]] = frozenset({"function", "custom"})
    type: str = "function"
    function: FunctionSpec | None = None
    custom: CustomSpec | None = None


class FunctionName(Struct):
    """The name of a function or a custom tool."""

    name: str


class AllowedTool(Struct, kw_only=True):
    """An entry of ``allowed_tools.tools``."""

    type: str = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None


class AllowedTools(Struct, kw_only=True):
    """The field ``tool_choice.allowed_tools``: which of the tools in the prompt may be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool] = []


class NamedChoice(Struct, kw_only=True):
    """A ``tool_choice`` that names one tool or lists the allowed tools."""

    type: str = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchemaSpec(Struct, kw_only=True):
    """The field ``response_format.json_schema``: a JSON schema that the answer must follow."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """The field ``response_format``: the form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None
    schema: dict[str, Any] | None = None  # schema of type json_object, which other servers accept


class StructuredOutputs(Struct, kw_only=True):
    """The field ``structured_outputs``, in vLLM's form."""

    json: dict[str, Any] | str | None = None
    regex: GrammarText | None = None
    choice: Texts | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    # recognised but not supported
    structural_tag: Annotated[Any, Refused("")] = None
    whitespace_pattern: Annotated[Any, Refused("")] = None
    disable_any_whitespace: Annotated[Any, Refused(False)] = None
    disable_additional_properties: Annotated[Any, Refused(False)] = None


Tools = list[ToolSpec]


def read_tools(specs: Sequence[ToolSpec] | None) -> list[Tool]:
    """Return the functions and custom tools of a body. Other tools are skipped with a warning.

    Raises `InvalidRequest` for a function tool without a function, a custom tool without its
    fields, and an invalid grammar.
    """
    tools = []
    for index, spec in enumerate(specs or ()):
        where = f"tools[{index}]"
        if spec.type == "custom":
            tools.append(_read_custom(spec.custom, where))
        elif spec.type != "function":
            tell_left_out("tools of type", spec.type)
        elif spec.function is None:
            raise InvalidRequest(f"{where} must have a function", param=where)
        else:
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


def _read_custom(spec: CustomSpec | None, where: str) -> Tool:
    """Return a custom tool. Raises `InvalidRequest`."""
    if spec is None:
        raise InvalidRequest(f"{where} must have custom", param=where)
    param, form = f"{where}.custom.format", spec.format or CustomFormat()
    if form.type == "text":
        return custom_tool(spec.name, spec.description, param=param)
    if form.grammar is None:
        raise InvalidRequest(f"{param} must have a grammar", param=param)
    syntax, definition = form.grammar.syntax, form.grammar.definition
    return custom_tool(spec.name, spec.description, syntax, definition, param=f"{param}.grammar")


def read_choice(
    choice: Literal["none", "auto", "required"] | NamedChoice | None,
    tools: Sequence[Tool],
    *,
    parallel: bool,
) -> ToolChoice:
    """Return ``tool_choice`` combined with ``parallel_tool_calls``. Raises `InvalidRequest`."""
    if isinstance(choice, NamedChoice):
        if choice.allowed_tools is not None:
            specs = choice.allowed_tools.tools
            named = [spec.function or spec.custom for spec in specs]
            names = {each.name for each in named if each is not None}
            mode = choice.allowed_tools.mode
            return allowed_choice(names, tools, mode=mode, parallel=parallel)
        if (named_tool := choice.function or choice.custom) is None:
            raise InvalidRequest("tool_choice must name a tool", param="tool_choice")
        return named_choice(named_tool.name, tools, parallel=parallel)
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
    """Return a choice restricted to ``names``. Raises `InvalidRequest` for an unknown name."""
    for name in names:
        named_choice(name, tools, parallel=parallel)
    return ToolChoice(mode=mode, parallel=parallel, allowed=frozenset(names))


def named_choice(name: str, tools: Sequence[Tool], *, parallel: bool) -> ToolChoice:
    """Return a choice of one tool. Raises `InvalidRequest` for an unknown name."""
    if not any(tool.name == name for tool in tools):
        message = f"tool_choice names {name}, which is not among the tools"
        raise InvalidRequest(message, param="tool_choice")
    return ToolChoice(mode="required", name=name, parallel=parallel)


def read_cache(
    spec: CacheSpec | None, retention: str | None, options: PromptCacheOptions | None
) -> CacheOptions:
    """Return the cache options of a body; the longest requested retention applies.

    ``retention``: ``prompt_cache_retention``; ``options``: ``prompt_cache_options``.
    """
    if spec is None and retention is None and options is None:
        return DEFAULT_CACHE
    seconds = max(
        SECONDS.get(retention or "", 0.0), SECONDS.get((options and options.ttl) or "", 0.0)
    )
    spec = spec or CacheSpec()
    pins = (Pin(WHOLE, seconds),) if seconds else ()
    return CacheOptions(read=spec.read, write=spec.write, pins=pins)


def structured_outputs(given: StructuredOutputs | None) -> dict[str, object]:
    """Return vLLM's ``structured_outputs`` as fields of `SamplingParams`."""
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
    """Return the JSON schema of a ``response_format``; None for text. Raises `InvalidRequest`."""
    if format is None or format.type == "text":
        return None
    given = format.json_schema or JsonSchemaSpec(schema=format.schema)
    if format.type == "json_object" and given.schema is None:
        return ANY_OBJECT
    if given.schema is None:
        raise InvalidRequest("response_format needs json_schema.schema", param="response_format")
    return as_strict_as(given.strict, given.schema)


def as_strict_as(strict: bool | None, schema: Mapping[str, object]) -> Mapping[str, object]:
    """Return the schema with an option for its strictness.

    If ``strict`` is true, unsupported keywords are rejected even if validators may ignore them,
    such as an unknown format.
    """
    return with_options(schema, "strict" if strict else "exact", param="json_schema")


def loaded_text(tools: Sequence[Tool], names: Sequence[str] = ()) -> str:
    """Return the text of a tool search result, which lists the tools that it found.

    ``names``: names of found tools without a definition. The definitions are rendered in the result
    and not with the other tools, so that the prompt prefix stays unchanged.
    """
    if not tools and not names:
        return "No tools were found."
    lines = [msgspec.json.encode(tool.body["function"]).decode() for tool in tools]
    lines += [msgspec.json.encode({"name": name}).decode() for name in names]
    return "\n".join(["These tools can be called now:", *lines])


def plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier answer in the shape that templates read, a function call.

    The call of a custom tool gets a single argument, ``input``. For other kinds of calls, all
    fields become arguments.
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        kind = call.get("type")
        named = call.get(kind) if isinstance(kind, str) else None
        fields = dict(named if isinstance(named, Mapping) else call)
        name = fields.pop("name", kind)
        given = {key: each for key, each in fields.items() if key not in ("id", "index", "type")}
        function = {"name": name, "arguments": given.get("arguments", given)}
        call = {key: each for key, each in call.items() if key == "id"} | {"type": "function"}
    name = function.get("name")
    written = {
        **function,
        "name": name if isinstance(name, str) else "",
        "arguments": plain_arguments(function.get("arguments")),
    }
    if not isinstance(call.get("id"), str | int | None):
        call = {key: each for key, each in call.items() if key != "id"}
    return {**call, "function": written}


def json_text(value: object) -> str:
    """Return a value of a message as JSON. Raises `InvalidRequest` if it cannot be encoded."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        message = "messages: a value is not valid JSON, or nested too deeply"
        raise InvalidRequest(message, param="messages") from None


def plain_arguments(arguments: object) -> Any:  # noqa: ANN401 - an object, or the text of none
    """Return the arguments of a call as an object, or as text if they are not a JSON object.

    A model may have written any text. Missing and null arguments are an empty object.
    """
    if arguments is None or isinstance(arguments, Mapping):
        return arguments or {}
    if not isinstance(arguments, str):
        return json_text(arguments)
    if not arguments.strip():
        return {}
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments
    if decoded is None:
        return {}
    return decoded if isinstance(decoded, dict) else arguments
