"""The google-genai client: chats, streams, functions, JSON, counts, errors."""

from __future__ import annotations

import json
from typing import Any

from google import genai
from google.genai import errors as genai_errors
from google.genai import types
from harness import (
    KEY,
    LONG,
    MODEL,
    PREFIX,
    SEEING,
    SEEING_URL,
    URL,
    WEATHER,
    Features,
    call,
    check_sight,
    expect,
    refused,
    say,
)

# docs: begin
client = genai.Client(api_key=KEY, http_options={"base_url": URL})
# docs: end
features = Features("google-genai")
FUNCTION = types.FunctionDeclaration(
    name="get_weather",
    description="Weather of a city",
    parameters=types.Schema(
        type=types.Type.OBJECT,
        properties={"city": types.Schema(type=types.Type.STRING)},
        required=["city"],
    ),
)
TOOLS: Any = [types.Tool(function_declarations=[FUNCTION])]
PARIS = call("get_weather", city="Paris")


def ask(text: Any, **config: Any) -> Any:
    """Send one message."""
    made = types.GenerateContentConfig(**config)
    return client.models.generate_content(model=MODEL, contents=text, config=made)


@features.feature("chat")
def chat() -> None:
    answer = ask(
        say("Hello, wörld!"), temperature=0, max_output_tokens=100, system_instruction="Be brief."
    )
    expect((answer.text, answer.model_version), ("Hello, wörld!", MODEL))
    expect(answer.candidates[0].finish_reason, types.FinishReason.STOP)
    usage = answer.usage_metadata
    expect(usage.total_token_count, usage.prompt_token_count + usage.candidates_token_count)
    cut = ask(say("One two three four."), max_output_tokens=2)
    expect(cut.candidates[0].finish_reason, types.FinishReason.MAX_TOKENS)


@features.feature("stream")
def stream() -> None:
    parts = [*client.models.generate_content_stream(model=MODEL, contents=say("Bit by bit."))]
    expect("".join(part.text or "" for part in parts), "Bit by bit.")
    reasons = [part.candidates[0].finish_reason for part in parts]
    expect(reasons, [None] * (len(parts) - 1) + [types.FinishReason.STOP])
    assert parts[-1].usage_metadata.candidates_token_count > 1


@features.feature("chat session")
def chat_session() -> None:
    session = client.chats.create(model=MODEL)
    expect(session.send_message(say("First.")).text, "First.")
    expect(session.send_message(say("Second.")).text, "Second.")


@features.feature("async")
async def asynchronous() -> None:
    answer = await client.aio.models.generate_content(model=MODEL, contents=say("In time."))
    expect(answer.text, "In time.")
    streamed = await client.aio.models.generate_content_stream(model=MODEL, contents=say("So."))
    expect("".join([part.text or "" async for part in streamed]), "So.")


@features.feature("cached tokens")
def cached_tokens() -> None:
    first = ask(f"{PREFIX} google {say('Once.')}")
    again = ask(f"{PREFIX} google {say('Once.')}")
    assert first.usage_metadata.prompt_token_count > 100
    assert again.usage_metadata.cached_content_token_count > 100


@features.feature("tool loop")
def tool_loop() -> None:
    question = types.Content(role="user", parts=[types.Part(text=say(PARIS))])
    first = ask([question], tools=TOOLS)
    (found,) = first.function_calls
    expect((found.name, found.args), ("get_weather", {"city": "Paris"}))
    result = types.Part.from_function_response(
        name=found.name, response={"result": say("Sunny in Paris.")}
    )
    turns = [question, first.candidates[0].content, types.Content(role="user", parts=[result])]
    expect(ask(turns, tools=TOOLS).text, "Sunny in Paris.")


@features.feature("automatic function calls")
def automatic_function_calls() -> None:
    asked = []

    def get_weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return say(f"Sunny in {city}.")

    config = types.GenerateContentConfig(tools=[get_weather])
    session = client.chats.create(model=MODEL, config=config)
    expect(session.send_message(say(PARIS)).text, "Sunny in Paris.")
    expect(asked, ["Paris"])


@features.feature("streamed tool calls")
def streamed_tool_calls() -> None:
    config = types.GenerateContentConfig(tools=TOOLS)
    parts = client.models.generate_content_stream(model=MODEL, contents=say(PARIS), config=config)
    calls = [each for part in parts for each in part.function_calls or ()]
    expect([each.args for each in calls], [{"city": "Paris"}])


@features.feature("forced tool")
def forced_tool() -> None:
    forced = types.ToolConfig(
        function_calling_config=types.FunctionCallingConfig(
            mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["get_weather"]
        )
    )
    answer = ask(say(PARIS), tools=TOOLS, tool_config=forced)
    expect([each.name for each in answer.function_calls], ["get_weather"])


@features.feature("structured output")
def structured_output() -> None:
    form = {"response_mime_type": "application/json"}
    answer = ask(say('{"city": "Rome"}'), response_json_schema=WEATHER, **form)
    expect(json.loads(answer.text), {"city": "Rome"})
    typed = ask(say('{"city": "Rome"}'), response_schema=FUNCTION.parameters, **form)
    expect(json.loads(typed.text), {"city": "Rome"})


@features.feature("thinking")
def thinking() -> None:
    shown = types.ThinkingConfig(include_thoughts=True)
    thought, said = ask(say("<think>Hm.</think>Yes."), thinking_config=shown).parts
    expect((thought.thought, thought.text.strip(), said.text.strip()), (True, "Hm.", "Yes."))
    expect(ask(say("<think>Hm.</think>Yes.")).text.strip(), "Yes.")


@features.feature("logprobs")
def logprobs() -> None:
    answer = ask(say("Yes."), response_logprobs=True, logprobs=2)
    found = answer.candidates[0].logprobs_result
    assert "Yes" in "".join(each.token for each in found.chosen_candidates)
    expect({len(each.candidates) for each in found.top_candidates}, {2})


@features.feature("images")
def images() -> None:
    import base64

    seeing = genai.Client(api_key=KEY, http_options={"base_url": SEEING_URL})

    def look(picture: str, text: str) -> tuple[str, int, int]:
        image = types.Part.from_bytes(data=base64.b64decode(picture), mime_type="image/png")
        config = types.GenerateContentConfig(temperature=0, max_output_tokens=4)
        found = seeing.models.generate_content(model=SEEING, contents=[image, text], config=config)
        usage = found.usage_metadata
        rows = {each.modality.value: each.token_count for each in usage.prompt_tokens_details or ()}
        return found.text or "", rows.get("IMAGE", 0), usage.cached_content_token_count or 0

    check_sight(look, num_tokens=20)


@features.feature("count tokens")
def count_tokens() -> None:
    counted = client.models.count_tokens(model=MODEL, contents=say("Hello.")).total_tokens
    expect(ask(say("Hello.")).usage_metadata.prompt_token_count, counted)


@features.feature("models")
def models() -> None:
    expect([each.name for each in client.models.list()], [f"models/{MODEL}"])
    assert "generateContent" in client.models.get(model=MODEL).supported_actions


@features.feature("errors")
def errors() -> None:
    bad = refused(genai_errors.ClientError, lambda: ask("x", top_p=2))
    expect((bad.code, bad.status), (400, "INVALID_ARGUMENT"))
    too_long = refused(genai_errors.ClientError, lambda: ask(LONG))
    assert "prompt is too long" in too_long.message
    unknown = refused(
        genai_errors.ClientError,
        lambda: client.models.generate_content(model="missing", contents="x"),
    )
    expect((unknown.code, unknown.status), (404, "NOT_FOUND"))
    other = genai.Client(api_key="wrong", http_options={"base_url": URL})
    keyless = refused(
        genai_errors.ClientError,
        lambda: other.models.generate_content(model=MODEL, contents="x"),
    )
    expect((keyless.code, keyless.status), (401, "UNAUTHENTICATED"))


if __name__ == "__main__":
    features.run()
