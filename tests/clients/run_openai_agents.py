"""The OpenAI Agents SDK, by Responses (its default) and by chat completions."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from harness import KEY, MODEL, PREFIX, URL, Features, call, expect, say
from openai import AsyncOpenAI
from pydantic import BaseModel

# docs: begin
set_tracing_disabled(True)  # it would go to OpenAI
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
by_responses = OpenAIResponsesModel(MODEL, openai_client=client)
chat = OpenAIChatCompletionsModel(MODEL, openai_client=client)
# docs: end
features = Features("openai-agents")
PARIS = call("get_weather", city="Paris")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return say(f"Sunny in {city}.")


@function_tool
def tell_person(name: str) -> str:
    """All about a person."""
    return say(f'{{"name":"{name}","age":36}}')


def agent(model: Any, **options: Any) -> Any:
    """An agent of one model."""
    return Agent(name="helper", instructions="Be brief.", model=model, **options)


async def tool_loop_of(model: Any) -> None:
    """Call, run, tell, answer."""
    result = await Runner.run(agent(model, tools=[get_weather]), say(PARIS))
    expect(result.final_output, "Sunny in Paris.")
    expect(result.context_wrapper.usage.requests, 2)


async def streamed_tool_loop_of(model: Any) -> None:
    """The same as a stream."""
    result = Runner.run_streamed(agent(model, tools=[get_weather]), say(PARIS))
    kinds = [event.type async for event in result.stream_events()]
    expect(result.final_output, "Sunny in Paris.")
    assert kinds.count("run_item_stream_event") >= 3, kinds


async def forced_tool_of(model: Any) -> None:
    """A required call; the agent takes the choice back for the second turn."""
    settings = ModelSettings(tool_choice="get_weather")
    worker = agent(model, tools=[get_weather], model_settings=settings)
    expect((await Runner.run(worker, say(PARIS))).final_output, "Sunny in Paris.")


async def structured_output_of(model: Any) -> None:
    """A final answer with a schema."""
    result = await Runner.run(agent(model, output_type=Person), say('{"name":"Ada","age":36}'))
    expect(result.final_output, Person(name="Ada", age=36))


async def structured_tool_loop_of(model: Any) -> None:
    """A tool and a schema in one request: the schema is for the words alone."""
    worker = agent(model, tools=[tell_person], output_type=Person)
    result = await Runner.run(worker, say(call("tell_person", name="Ada")))
    expect(result.final_output, Person(name="Ada", age=36))


async def handoff_of(model: Any) -> None:
    """One agent gives over to another, which answers."""
    other = Agent(name="other", instructions="[[From the other.]]", model=model)
    first = agent(model, handoffs=[other])
    result = await Runner.run(first, say(call("transfer_to_other")))
    expect(result.last_agent.name, "other")


@features.feature("chat")
async def plain() -> None:
    result = await Runner.run(agent(chat), say("Hello!"))
    expect(result.final_output, "Hello!")
    assert result.context_wrapper.usage.output_tokens > 0


@features.feature("stream")
async def stream() -> None:
    # It asks for usage in streams of OpenAI's own address alone, or when told to.
    settings = ModelSettings(include_usage=True)
    result = Runner.run_streamed(agent(chat, model_settings=settings), say("Bit by bit."))
    async for _ in result.stream_events():
        pass
    expect(result.final_output, "Bit by bit.")
    assert 0 < result.context_wrapper.usage.output_tokens < 20


@features.feature("cached tokens")
async def cached() -> None:
    await Runner.run(agent(chat), PREFIX + say("Noted."))
    usage = (await Runner.run(agent(chat), PREFIX + say("Noted."))).context_wrapper.usage
    assert usage.input_tokens_details.cached_tokens > 200, usage


@features.feature("tool loop")
async def tool_loop() -> None:
    await tool_loop_of(chat)


@features.feature("streamed tool calls")
async def streamed_tool_calls() -> None:
    await streamed_tool_loop_of(chat)


@features.feature("forced tool")
async def forced_tool() -> None:
    await forced_tool_of(chat)


@features.feature("structured output")
async def structured_output() -> None:
    await structured_output_of(chat)
    await structured_tool_loop_of(chat)


@features.feature("handoff")
async def handoff() -> None:
    await handoff_of(chat)


@features.feature("responses")
async def responses() -> None:
    result = await Runner.run(agent(by_responses), say("In short, yes."))
    expect(result.final_output, "In short, yes.")
    assert result.context_wrapper.usage.output_tokens > 0


@features.feature("responses stream")
async def responses_stream() -> None:
    result = Runner.run_streamed(agent(by_responses), say("Bit by bit."))
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    expect("".join(deltas), "Bit by bit.")


@features.feature("responses tool loop")
async def responses_tool_loop() -> None:
    await tool_loop_of(by_responses)
    await streamed_tool_loop_of(by_responses)
    await forced_tool_of(by_responses)


@features.feature("responses structured output")
async def responses_structured_output() -> None:
    await structured_output_of(by_responses)
    await structured_tool_loop_of(by_responses)


if __name__ == "__main__":
    features.run()
