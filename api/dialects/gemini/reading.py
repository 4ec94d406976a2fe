"""Convert Gemini's bodies to `ChatInput`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ....core.errors import InvalidRequest
from ...media.sources import ImageSource, file_text, join_parts, unread_file
from ...runtime.conversation.chat_input import ChatInput
from ...runtime.conversation.left_out import tell_left_out
from ...runtime.conversation.tools import (
    ANY_OBJECT,
    allowed_choice,
    as_strict_as,
    json_text,
    plain_arguments,
)
from ...types.results import Tool, ToolChoice
from ...types.sampling_params import SamplingParams
from .bodies import (
    Content,
    FunctionCallingConfig,
    FunctionDeclaration,
    FunctionResponse,
    GenerateBody,
    GenerationConfig,
    Part,
    Schema,
    ThinkingConfig,
    ToolGroup,
)

Plain = dict[str, Any]
SAME_NAME = (
    "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty",
)  # fmt: skip
RESULT = ("result", "output")  # keys of results that have a single field
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high"}
JSON, ENUM, TEXT = "application/json", "text/x.enum", "text/plain"
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def read_chat(body: GenerateBody) -> ChatInput:
    """Return the chat request of a body. Raises `InvalidRequest`."""
    config = body.generation_config or GenerationConfig()
    tools = read_tools(body.tools or ())
    messages, images, paths = plain_messages(body)
    return ChatInput(
        messages=messages,
        images=images,
        paths=paths,
        params=read_params(body, config),
        tools=tools,
        tool_choice=read_choice(body, tools),
        template=template_options(config.thinking_config),
    )


def read_params(body: GenerateBody, config: GenerationConfig) -> SamplingParams:
    """Return the sampling parameters of a body. Raises `InvalidRequest`."""
    given: dict[str, Any] = {name: getattr(config, name) for name in SAME_NAME}
    given |= {"cache_salt": body.cache_salt, "speculation": body.speculation}
    given |= {"n": config.candidate_count, "max_tokens": config.max_output_tokens}
    given["stop"] = config.stop_sequences
    if config.response_logprobs:
        given["logprobs"] = config.logprobs or 0
    given |= answer_form(config)
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        deadline=None if body.deadline_ms is None else body.deadline_ms / 1000,
    )


def answer_form(config: GenerationConfig) -> Mapping[str, Any]:
    """Return the `SamplingParams` fields that set the answer format. Raises `InvalidRequest`."""
    kind, schema = config.response_mime_type or "", config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = json_schema(config.response_schema)
    if kind == ENUM:
        choices = (schema or {}).get("enum")
        if not isinstance(choices, list) or not choices:
            name = "generationConfig.responseSchema"
            raise InvalidRequest(f"{name} must have an enum for {ENUM}", param=name)
        return {"choice": [str(each) for each in choices]}
    if kind not in ("", TEXT, JSON):
        name = "generationConfig.responseMimeType"
        raise InvalidRequest(f"{name} must be one of {TEXT}, {JSON}, {ENUM}", param=name)
    if schema is not None:
        return {"json_schema": as_strict_as(None, schema)}
    return {"json_schema": ANY_OBJECT} if kind == JSON else {}


def template_options(config: ThinkingConfig | None) -> Mapping[str, object]:
    """Return the template options for reasoning: whether to reason, and the effort."""
    options: dict[str, object] = {}
    if config is not None and config.thinking_budget is not None:
        options["enable_thinking"] = config.thinking_budget != 0
    if config is not None and config.thinking_level is not None:
        options["reasoning_effort"] = EFFORTS.get(config.thinking_level.lower(), "medium")
    return options


# -- tools -----------------------------------------------------------------------------------------


def read_tools(specs: Sequence[ToolGroup]) -> list[Tool]:
    """Return the functions among the tools of a body. Tools that Google executes are left out."""
    if any(spec.function_declarations is None for spec in specs):
        tell_left_out("tools other than functions")
    return [
        Tool(name=each.name, description=each.description, parameters=_parameters(each))
        for spec in specs
        for each in spec.function_declarations or ()
    ]


def _parameters(function: FunctionDeclaration) -> Schema | None:
    if function.parameters_json_schema is not None:
        return function.parameters_json_schema
    return None if function.parameters is None else json_schema(function.parameters)


def read_choice(body: GenerateBody, tools: Sequence[Tool]) -> ToolChoice:
    """Return the functions that may or must be called. Raises `InvalidRequest`."""
    config = body.tool_config and body.tool_config.function_calling_config
    config = config or FunctionCallingConfig()
    field = "toolConfig.functionCallingConfig"
    mode: Literal["auto", "required"] = "auto"
    match (config.mode or "AUTO").upper():
        case "NONE":
            return ToolChoice(mode="none")
        case "ANY":
            mode = "required"
            if not tools:
                raise InvalidRequest(f"{field}.mode: ANY needs tools", param=f"{field}.mode")
        case "AUTO" | "VALIDATED" | "MODE_UNSPECIFIED":
            pass
        case _:
            message = f"{field}.mode must be AUTO, ANY, NONE or VALIDATED"
            raise InvalidRequest(message, param=f"{field}.mode")
    names = config.allowed_function_names
    if not names:
        return ToolChoice(mode=mode)
    return allowed_choice(names, tools, mode=mode, parallel=True)


def json_schema(schema: Schema) -> Schema:
    """Return the JSON schema for a schema in Google's form.

    Google's form has type names in upper case, ``nullable``, numbers as strings, and
    ``propertyOrdering``.
    """
    made = {
        key: value for key, value in schema.items() if key not in ("nullable", "propertyOrdering")
    }
    kind = made.get("type")
    if isinstance(kind, str):
        made["type"] = kind.lower()
        if kind == "TYPE_UNSPECIFIED":
            del made["type"]
    for name in COUNTS:
        if isinstance(count := made.get(name), str) and count.isascii() and count.isdigit():
            made[name] = int(count)
    if isinstance(made.get("items"), dict):
        made["items"] = json_schema(made["items"])
    if isinstance(made.get("anyOf"), list):
        made["anyOf"] = [json_schema(each) for each in made["anyOf"] if isinstance(each, dict)]
    properties = made.get("properties")
    if isinstance(properties, dict):
        order = schema.get("propertyOrdering") or ()
        names = [*(name for name in order if name in properties), *properties]
        made["properties"] = {
            name: json_schema(properties[name])
            if isinstance(properties[name], dict)
            else properties[name]
            for name in dict.fromkeys(names)
        }
    if made.get("format") == "enum":
        del made["format"]
    if not schema.get("nullable"):
        return made
    if "type" not in made or "enum" in made:
        return {"anyOf": [made, {"type": "null"}]}
    return {**made, "type": [made["type"], "null"]}


# -- messages --------------------------------------------------------------------------------------


def plain_messages(body: GenerateBody) -> tuple[list[Plain], list[ImageSource], list[str]]:
    """Return messages for the chat template, their images, and the messages' paths in the body.

    Raises `InvalidRequest`, which names a part that is not supported.
    """
    plains: list[Plain] = []
    images: list[ImageSource] = []
    paths: list[str] = []
    calls = _Calls()
    contents = [(f"contents[{at}]", content) for at, content in enumerate(body.contents)]
    if body.system_instruction is not None:
        system = body.system_instruction
        contents.insert(0, ("systemInstruction", Content(parts=system.parts, role="system")))
    for path, content in contents:
        for plain, found in _messages(content, path, calls):
            plains.append(plain)
            images += found
            paths.append(path)
    return plains, images, paths


class _Calls:
    """Assigns ids to calls. Some templates require ids, but clients may leave them out."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, str]] = deque()  # name and id of calls without a result
        self._number = 0

    def begin(self, name: str, call_id: str | None) -> str:
        """Return the id of a call; a new id if the call has none."""
        if call_id is None:
            call_id = f"call_{self._number:08}"
            self._number += 1
        self._waiting.append((name, call_id))
        return call_id

    def end(self, result: FunctionResponse) -> Plain:
        """Return the name and the id of the call that a result answers."""
        for name, call_id in self._waiting:
            if call_id == result.id or (result.id is None and result.name in (None, name)):
                self._waiting.remove((name, call_id))
                return {"name": name, "tool_call_id": call_id}
        return {"name": result.name or "", "tool_call_id": result.id or ""}


def _messages(
    content: Content, path: str, calls: _Calls
) -> list[tuple[Plain, Sequence[ImageSource]]]:
    """Return the messages of a turn: one per function result, then one with the other parts."""
    role = (content.role or "user").lower()
    if role not in ("user", "model", "function", "system"):
        raise InvalidRequest(f"{path}.role must be user or model", param=f"{path}.role")
    made: list[tuple[Plain, Sequence[ImageSource]]] = []
    shown: list[str | ImageSource] = []
    thoughts: list[str] = []
    said: list[Plain] = []
    for index, part in enumerate(content.parts):
        if part.function_response is not None:
            result = part.function_response
            text = _result_text(result.response)
            made.append(({"role": "tool", "content": text, **calls.end(result)}, ()))
        elif part.function_call is not None:
            called = part.function_call
            function = {"name": called.name, "arguments": plain_arguments(called.args)}
            call_id = calls.begin(called.name, called.id)
            said.append({"id": call_id, "type": "function", "function": function})
        elif part.thought:
            thoughts.append(part.text or "")
        else:
            shown += _shown(part, f"{path}.parts[{index}]", is_users=role == "user")
    if role == "model":
        text, images = join_parts(shown)
        plain: Plain = {"role": "assistant", "content": text}
        if any(thoughts):
            plain["reasoning_content"] = "".join(thoughts)
        if said:
            plain["tool_calls"] = said
        made.append((plain, images))
    elif shown or not made:
        text, images = join_parts(shown)
        made.append(({"role": "system" if role == "system" else "user", "content": text}, images))
    return made


def _shown(part: Part, path: str, *, is_users: bool) -> list[str | ImageSource]:
    """Return the text or image of a part. Raises `InvalidRequest` for a user's unreadable file."""
    if part.text is not None:
        return [part.text]
    if part.inline_data is not None:
        blob, where = part.inline_data, f"{path}.inlineData"
        url = f"data:{blob.mime_type};base64,{_standard(blob.data)}"
        if blob.mime_type.startswith("image/"):
            return [ImageSource(url, where)]
        text = file_text(url, None)
        if text is None and is_users:
            message = f"{where}: {blob.mime_type[:64] or 'a file without a type'} cannot be read"
            raise InvalidRequest(message, param=where)
        return [unread_file(None) if text is None else text]
    if part.file_data is not None:
        if is_users:
            where = f"{path}.fileData"
            message = f"{where}: files are not fetched; send inlineData"
            raise InvalidRequest(message, param=where)
        return [unread_file(None)]
    tell_left_out("parts of contents other than text, images and functions")
    return []


def _standard(data: str) -> str:
    """Return base64 in the standard alphabet; Google's clients use the URL-safe one."""
    data = data.translate({ord("-"): "+", ord("_"): "/"})
    return data + "=" * (-len(data) % 4)


def _result_text(response: object) -> str:
    """Return a function result as text: the string in its only field, or else the JSON text."""
    if isinstance(response, dict) and len(response) == 1:
        [(name, value)] = response.items()
        if name in RESULT and isinstance(value, str):
            return value
    return json_text({} if response is None else response)
