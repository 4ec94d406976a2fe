"""LiteLLM over chat completions, Responses and Messages, with its own names of errors."""

from __future__ import annotations

import json
import os
from typing import Any

from harness import (
    KEY,
    LONG,
    MODEL,
    PREFIX,
    RANKING,
    RANKING_URL,
    URL,
    WEATHER,
    Features,
    call,
    check_ranking,
    expect,
    refused,
    say,
)
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network first

import litellm

# docs: begin
options = {
    "model": f"hosted_vllm/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": KEY,
}
litellm.completion(messages=[{"role": "user", "content": "Hello!"}], **options)
# docs: end
as_openai = options | {"model": f"openai/{MODEL}"}
as_anthropic = options | {"model": f"anthropic/{MODEL}", "api_base": URL}
features = Features("litellm")
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
PARIS = call("get_weather", city="Paris")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def ask(text: str, *, to: dict[str, Any] = options, **more: Any) -> Any:
    """One completion."""
    return litellm.completion(messages=[{"role": "user", "content": text}], **to, **more)


def loop(to: dict[str, Any]) -> None:
    """Call, run, tell, answer."""
    messages: list[Any] = [{"role": "user", "content": say(PARIS)}]
    first = litellm.completion(messages=messages, tools=[TOOL], **to)
    (made,) = first.choices[0].message.tool_calls
    expect(json.loads(made.function.arguments), {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": made.id, "content": say("Sunny.")}
    messages += [first.choices[0].message.model_dump(), result]
    second = litellm.completion(messages=messages, tools=[TOOL], **to)
    expect(second.choices[0].message.content, "Sunny.")


def streamed(text: str, **more: Any) -> Any:
    """A stream, put together again."""
    chunks = list(ask(text, stream=True, stream_options={"include_usage": True}, **more))
    return litellm.stream_chunk_builder(chunks)


@features.feature("chat")
def chat() -> None:
    for to in (options, as_openai):
        answer = ask(say("Hello!"), to=to)
        expect(answer.choices[0].message.content, "Hello!")
        assert answer.usage.completion_tokens > 0


@features.feature("stream")
def stream() -> None:
    whole = streamed(say("Bit by bit."))
    expect(whole.choices[0].message.content, "Bit by bit.")
    assert 0 < whole.usage.completion_tokens < 20, whole.usage


@features.feature("async")
async def asynchronous() -> None:
    messages = [{"role": "user", "content": say("In time.")}]
    answer = await litellm.acompletion(messages=messages, **options)
    expect(answer.choices[0].message.content, "In time.")


@features.feature("cached tokens")
def cached() -> None:
    ask(PREFIX + say("Noted."))
    usage = ask(PREFIX + say("Noted.")).usage
    assert usage.prompt_tokens_details.cached_tokens > 200, usage


@features.feature("tool loop")
def tool_loop() -> None:
    loop(options)


@features.feature("streamed tool calls")
def streamed_tool_calls() -> None:
    (made,) = streamed(say(PARIS), tools=[TOOL]).choices[0].message.tool_calls
    expect(json.loads(made.function.arguments), {"city": "Paris"})


@features.feature("forced tool")
def forced_tool() -> None:
    (made,) = ask(say(PARIS), tools=[TOOL], tool_choice=FORCED).choices[0].message.tool_calls
    expect(made.function.name, "get_weather")


@features.feature("structured output")
def structured_output() -> None:
    answer = ask(say('{"name":"Ada","age":36}'), response_format=Person)
    expect(Person.model_validate_json(answer.choices[0].message.content).age, 36)


@features.feature("stop and n")
def stop() -> None:
    answer = ask(say("One. Two."), stop=["Two"], n=2)
    expect([choice.message.content for choice in answer.choices], ["One. "] * 2)


@features.feature("text completions")
def text_completions() -> None:
    to = options | {"model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(prompt=say("Completed."), max_tokens=50, **to)
    expect(answer.choices[0].text, "Completed.")


@features.feature("embeddings")
def embeddings() -> None:
    texts = ["One text.", "Another text."]
    answer = litellm.embedding(input=texts, encoding_format="float", **options)
    again = litellm.embedding(input=texts[:1], encoding_format="float", **options)
    expect(answer.data[0]["embedding"], again.data[0]["embedding"])
    assert answer.data[1]["embedding"] != again.data[0]["embedding"]


@features.feature("rerank")
def rerank() -> None:
    for provider, base in (("hosted_vllm", f"{RANKING_URL}/v1"), ("cohere", RANKING_URL)):

        def rank(query: str, documents: list[str], top_n: int) -> list[Any]:
            answer = litellm.rerank(
                model=f"{provider}/{RANKING}", query=query, documents=documents, top_n=top_n,  # noqa: B023
                api_base=base, api_key=KEY,  # noqa: B023
            )  # fmt: skip
            return [
                (each["index"], each["relevance_score"], each.get("document", {}).get("text"))
                for each in answer.results
            ]

        check_ranking(rank)


@features.feature("errors")
def errors() -> None:
    refused(litellm.ContextWindowExceededError, lambda: ask(LONG))
    refused(litellm.NotFoundError, lambda: ask("Hi", to=options | {"model": "hosted_vllm/no-such"}))


@features.feature("responses")
def responses() -> None:
    answer = litellm.responses(input=say("In short, yes."), **as_openai)
    expect(answer.output[-1].content[0].text, "In short, yes.")


@features.feature("anthropic messages")
def messages() -> None:
    expect(ask(say("Hello!"), to=as_anthropic).choices[0].message.content, "Hello!")
    whole = streamed(say("Bit by bit."), to=as_anthropic)
    expect(whole.choices[0].message.content, "Bit by bit.")


@features.feature("anthropic tool loop")
def anthropic_tool_loop() -> None:
    loop(as_anthropic)


if __name__ == "__main__":
    features.run()
