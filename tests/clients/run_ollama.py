"""The ollama client: chat, generate, streams, tools, JSON, lists."""

from __future__ import annotations

import json
from typing import Any

import ollama
from harness import KEY, LONG, MODEL, URL, WEATHER, Features, call, expect, refused, say
from ollama import AsyncClient, Client

# docs: begin
client = Client(host=URL, headers={"authorization": "Bearer " + KEY})
# docs: end
features = Features("ollama")
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER}
TOOL: Any = {"type": "function", "function": FUNCTION}
PARIS = call("get_weather", city="Paris")


def ask(text: str, **options: Any) -> Any:
    """Send one message."""
    return client.chat(model=MODEL, messages=[{"role": "user", "content": text}], **options)


@features.feature("chat")
def chat() -> None:
    answer = ask(say("Hello, wörld!"), options={"temperature": 0, "num_predict": 100})
    expect((answer.message.role, answer.message.content), ("assistant", "Hello, wörld!"))
    expect((answer.model, answer.done, answer.done_reason), (MODEL, True, "stop"))
    assert answer.prompt_eval_count > 0
    assert answer.eval_count > 1
    assert answer.total_duration > 0


@features.feature("stream")
def stream() -> None:
    parts = [*ask(say("Bit by bit."), stream=True)]
    expect("".join(part.message.content for part in parts), "Bit by bit.")
    expect([part.done for part in parts], [False] * (len(parts) - 1) + [True])


@features.feature("generate")
def generate() -> None:
    answer = client.generate(model=MODEL, prompt=say("As asked."), system="Be brief.")
    expect(answer.response, "As asked.")
    parts = client.generate(model=MODEL, prompt=say("As asked."), stream=True)
    expect("".join(str(part.response) for part in parts), "As asked.")


@features.feature("async")
async def asynchronous() -> None:
    other = AsyncClient(host=URL, headers={"authorization": "Bearer " + KEY})
    message = {"role": "user", "content": say("In time.")}
    expect((await other.chat(model=MODEL, messages=[message])).message.content, "In time.")


@features.feature("tool loop")
def tool_loop() -> None:
    messages: list[Any] = [{"role": "user", "content": say(PARIS)}]
    first = client.chat(model=MODEL, messages=messages, tools=[TOOL]).message
    (found,) = first.tool_calls or ()
    expect(
        (found.function.name, dict(found.function.arguments)), ("get_weather", {"city": "Paris"})
    )
    result = {"role": "tool", "tool_name": "get_weather", "content": say("Sunny in Paris.")}
    last = client.chat(model=MODEL, messages=[*messages, first, result], tools=[TOOL])
    expect(last.message.content, "Sunny in Paris.")


@features.feature("streamed tool calls")
def streamed_tool_calls() -> None:
    parts = [*ask(say(PARIS), tools=[TOOL], stream=True)]
    calls = [each for part in parts for each in part.message.tool_calls or ()]
    expect([dict(each.function.arguments) for each in calls], [{"city": "Paris"}])


@features.feature("structured output")
def structured_output() -> None:
    answer = ask(say('{"city": "Rome"}'), format=WEATHER)
    expect(json.loads(answer.message.content), {"city": "Rome"})


@features.feature("thinking")
def thinking() -> None:
    message = ask(say("<think>Hm.</think>Yes.")).message
    expect(((message.thinking or "").strip(), message.content.strip()), ("Hm.", "Yes."))


@features.feature("list and show")
def list_and_show() -> None:
    expect([each.model for each in client.list().models], [MODEL])
    shown = client.show(MODEL)
    assert {"completion", "tools"} <= set(shown.capabilities or ())
    assert shown.modelinfo


@features.feature("embed")
def embed() -> None:
    found = client.embed(model=MODEL, input=["Hello.", "Good morning."])
    expect([round(sum(x * x for x in each), 3) for each in found.embeddings], [1.0, 1.0])
    assert found.prompt_eval_count
    old = client.embeddings(model=MODEL, prompt="Hello.")
    expect([*old.embedding], [*found.embeddings[0]])


@features.feature("errors")
def errors() -> None:
    expect(refused(ollama.ResponseError, lambda: ask("x", options={"top_p": 2})).status_code, 400)
    missing = refused(ollama.ResponseError, lambda: client.show("missing"))
    expect(missing.status_code, 404)
    too_long = refused(ollama.ResponseError, lambda: ask(LONG))
    assert "prompt is too long" in too_long.error


if __name__ == "__main__":
    features.run()
