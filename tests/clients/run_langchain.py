"""LangChain's ChatOpenAI and ChatAnthropic."""

from __future__ import annotations

from typing import Any

from harness import KEY, LONG, MODEL, PREFIX, URL, Features, call, expect, refused, say
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

# docs: begin
chat = ChatOpenAI(
    model=MODEL,
    base_url=f"{URL}/v1",
    api_key=KEY,
    stream_usage=True,  # or streams have none
)
by_responses = ChatOpenAI(
    model=MODEL,
    base_url=f"{URL}/v1",
    api_key=KEY,
    use_responses_api=True,
)
claude = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=512)
# docs: end
features = Features("langchain-openai", "langchain-anthropic")
PARIS = call("get_weather", city="Paris")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return say(f"Sunny in {city}.")


def joined(chunks: Any) -> Any:
    """One message of all chunks."""
    whole: AIMessageChunk | None = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


def tool_loop_of(model: Any) -> None:
    """Call, run, tell, answer."""
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(say(PARIS))]
    first = bound.invoke(messages)
    (made,) = first.tool_calls
    expect((made["name"], made["args"]), ("get_weather", {"city": "Paris"}))
    result = get_weather.invoke(made)
    assert isinstance(result, ToolMessage)
    expect(bound.invoke([*messages, first, result]).text, "Sunny in Paris.")


@features.feature("chat")
def invoke() -> None:
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage(say("Hello!"))])
    expect(answer.content, "Hello!")
    expect(answer.response_metadata["finish_reason"], "stop")


@features.feature("stream")
def stream() -> None:
    whole = joined(chat.stream(say("Bit by bit.")))
    expect(whole.text, "Bit by bit.")
    usage = whole.usage_metadata
    expect(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])
    assert 0 < usage["output_tokens"] < 20, usage


@features.feature("async")
async def asynchronous() -> None:
    expect("".join([chunk.text async for chunk in chat.astream(say("In time."))]), "In time.")


@features.feature("cached tokens")
def cached() -> None:
    chat.invoke(PREFIX + say("Noted."))
    usage = chat.invoke(PREFIX + say("Noted.")).usage_metadata
    assert usage["input_token_details"]["cache_read"] > 200, usage


@features.feature("tool loop")
def tool_loop() -> None:
    tool_loop_of(chat)


@features.feature("streamed tool calls")
def streamed_tool_calls() -> None:
    whole = joined(chat.bind_tools([get_weather]).stream(say(PARIS)))
    expect([(c["name"], c["args"]) for c in whole.tool_calls], [("get_weather", {"city": "Paris"})])


@features.feature("forced tool")
def forced_tool() -> None:
    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    expect(bound.invoke(say(PARIS)).tool_calls[0]["args"], {"city": "Paris"})


@features.feature("parallel tools")
def parallel_tools() -> None:
    both = f"{PARIS}\n{call('get_weather', city='Rome')}"
    calls = chat.bind_tools([get_weather]).invoke(say(both)).tool_calls
    expect([each["args"]["city"] for each in calls], ["Paris", "Rome"])


@features.feature("structured output")
def structured_output() -> None:
    by_schema = chat.with_structured_output(Person, method="json_schema")
    expect(by_schema.invoke(say('{"name":"Ada","age":36}')), Person(name="Ada", age=36))
    by_tool = chat.with_structured_output(Person, method="function_calling")
    expect(by_tool.invoke(say(call("Person", name="Ada", age=36))), Person(name="Ada", age=36))


@features.feature("stop")
def stop() -> None:
    expect(chat.invoke(say("One. Two."), stop=["Two"]).content, "One. ")


@features.feature("logprobs")
def logprobs() -> None:
    answer = chat.bind(logprobs=True).invoke(say("Sure."))
    assert answer.response_metadata["logprobs"]["content"]


@features.feature("errors")
def errors() -> None:
    refused(ContextOverflowError, lambda: chat.invoke(LONG))


@features.feature("responses")
def responses() -> None:
    expect(by_responses.invoke(say("In short, yes.")).text, "In short, yes.")
    expect(joined(by_responses.stream(say("Bit by bit."))).text, "Bit by bit.")


@features.feature("responses tool loop")
def responses_tool_loop() -> None:
    tool_loop_of(by_responses)


@features.feature("anthropic messages")
def messages() -> None:
    expect(claude.invoke(say("Hello!")).text, "Hello!")
    whole = joined(claude.stream(say("Bit by bit.")))
    expect(whole.text, "Bit by bit.")
    assert 0 < whole.usage_metadata["output_tokens"] < 20, whole.usage_metadata


@features.feature("anthropic tool loop")
def anthropic_tool_loop() -> None:
    tool_loop_of(claude)
    whole = joined(claude.bind_tools([get_weather]).stream(say(PARIS)))
    expect(whole.tool_calls[0]["args"], {"city": "Paris"})


@features.feature("anthropic structured output")
def anthropic_structured_output() -> None:
    structured = claude.with_structured_output(Person)
    expect(structured.invoke(say(call("Person", name="Ada", age=36))), Person(name="Ada", age=36))


if __name__ == "__main__":
    features.run()
