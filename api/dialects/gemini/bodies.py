"""Bodies of Gemini's routes. Decoding validates them; unknown fields are ignored.

Names are Google's JSON names in camel case. As in Google's API, snake case is accepted too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect

from ...serving.decoding import decoder
from ...serving.peers import Empty, Zero
from ...serving.sampling import (
    Count,
    Milliseconds,
    NumChoices,
    NumTop,
    Penalty,
    Positive,
    Probability,
    Salt,
    Seed,
    Speculation,
    StopTexts,
    Temperature,
)
from ...types.fields import Refused

T = TypeVar("T", bound=Struct)
Schema = dict[str, Any]


class GeminiStruct(Struct, kw_only=True, rename="camel"):
    """A part of a body; its fields are written in camel case."""

    takes_single_entries: ClassVar[bool] = True  # a list may be sent as its only entry


class Blob(GeminiStruct, kw_only=True):
    """Bytes in base64."""

    mime_type: str = ""
    data: str = ""


class FileData(GeminiStruct, kw_only=True):
    """A file, named by its URI."""

    mime_type: str = ""
    file_uri: str = ""


class CalledFunction(GeminiStruct, kw_only=True):
    """A function call by the model. Its arguments may be any JSON value."""

    name: str
    id: str | None = None
    args: Any = None


class FunctionResponse(GeminiStruct, kw_only=True):
    """The result of a function call."""

    name: str | None = None
    id: str | None = None
    response: Any = None


class Part(GeminiStruct, kw_only=True):
    """A part of a turn. In a part of an unknown kind, no field is set."""

    text: str | None = None
    thought: bool | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    function_call: CalledFunction | None = None
    function_response: FunctionResponse | None = None


class Content(GeminiStruct, kw_only=True):
    """One turn of a conversation. ``role``: user, model, function or system."""

    parts: list[Part] = []
    role: str | None = None


class FunctionDeclaration(GeminiStruct, kw_only=True):
    """A function that the model may call. In ``parameters``, type names are in upper case."""

    name: str
    description: str | None = None
    parameters: Schema | None = None
    parameters_json_schema: Schema | None = None


class ToolGroup(GeminiStruct, kw_only=True):
    """An entry of ``tools``. Tools that Google executes, such as search, are ignored."""

    function_declarations: list[FunctionDeclaration] | None = None


class FunctionCallingConfig(GeminiStruct, kw_only=True):
    """``mode``: AUTO, ANY, NONE or VALIDATED."""

    mode: str | None = None
    allowed_function_names: list[str] | None = None


class ToolConfig(GeminiStruct, kw_only=True):
    """``tool_config``: which functions may or must be called."""

    function_calling_config: FunctionCallingConfig | None = None


class ThinkingConfig(GeminiStruct, kw_only=True):
    """``thinking_config``. ``thinking_budget``: 0 disables reasoning, any other value enables
    it.
    """

    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class GenerationConfig(GeminiStruct, kw_only=True):
    """``generation_config``: sampling parameters and the output format."""

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    candidate_count: NumChoices | None = None
    max_output_tokens: Positive | None = None
    stop_sequences: StopTexts | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    response_logprobs: bool | None = None
    logprobs: NumTop | None = None
    response_mime_type: str | None = None
    response_schema: Schema | None = None
    response_json_schema: Schema | None = None
    thinking_config: ThinkingConfig | None = None
    # recognised but not supported
    response_modalities: Annotated[Any, Refused([], ["TEXT"])] = None
    speech_config: Empty = None
    image_config: Empty = None


class GenerateBody(GeminiStruct, kw_only=True):
    """Body of generateContent and streamGenerateContent."""

    contents: Annotated[list[Content], Meta(min_length=1)]
    system_instruction: Content | None = None
    tools: list[ToolGroup] | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    cached_content: Empty = None  # a resource of Google's API; prefixes are cached without one
    # extensions of Google's API
    cache_salt: Salt | None = None
    speculation: Speculation | None = None
    deadline_ms: Milliseconds | None = None
    # set from the path of the request
    model: str | None = None
    stream: bool | None = None


class CountTokensBody(GeminiStruct, kw_only=True):
    """Body of countTokens: contents, or a whole request."""

    contents: list[Content] | None = None
    generate_content_request: GenerateBody | None = None
    model: str | None = None
    stream: bool | None = None
    deadline_ms: Zero = None


def gemini_decoder(body_type: type[T]) -> Callable[[bytes], T]:
    """Return a function that decodes a body.

    It raises `ApiError` 400 for an invalid body, and `InvalidRequest` for a refused field.
    """
    decode, kind = decoder(body_type), inspect.type_info(body_type)

    def read(data: bytes) -> T:
        try:
            plain = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            return decode(data)  # raises the error of invalid JSON
        return decode(msgspec.json.encode(_camel(plain, kind)))

    return read


def _camel(value: Any, kind: inspect.Type) -> Any:  # noqa: ANN401 - JSON
    """Return the value with field names converted to camel case according to its type."""
    match kind:
        case inspect.Metadata():
            return _camel(value, kind.type)
        case inspect.UnionType(types=types):
            for each in types:
                value = _camel(value, each)
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            names = {each.name: each.encode_name for each in fields}
            kinds = {each.encode_name: each.type for each in fields}
            renamed = {names.get(name, name): each for name, each in value.items()}
            return {
                name: _camel(each, kinds[name]) if name in kinds else each
                for name, each in renamed.items()
            }
        case inspect.ListType(item_type=item):
            # Clients may send a single content or part in place of a list.
            listed = [value] if isinstance(value, dict) else value
            return [_camel(each, item) for each in listed] if isinstance(listed, list) else value
    return value
