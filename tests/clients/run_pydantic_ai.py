"""pydantic-ai over all three of its ways here: chat completions, Responses, Messages."""

from __future__ import annotations

from typing import Any

from harness import KEY, MODEL, PREFIX, URL, Features, call, expect, say
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

# docs: begin
provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=provider)
by_responses = OpenAIResponsesModel(MODEL, provider=provider)
claude_provider = AnthropicProvider(base_url=URL, api_key=KEY)
claude = AnthropicModel(MODEL, provider=claude_provider)
# docs: end
features = Features("pydantic-ai-slim")
PARIS = call("get_weather", city="Paris")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Weather of a city."""
    return say(f"Sunny in {city}.")


async def tool_loop_of(model: Any) -> None:
    """Call, run, tell, answer."""
    agent = Agent(model, tools=[get_weather], instructions="Use the tools.")
    result = await agent.run(say(PARIS))
    expect(result.output, "Sunny in Paris.")
    expect(result.usage.requests, 2)
    expect(result.usage.tool_calls, 1)


async def streamed_tool_loop_of(model: Any) -> None:
    """The same as a stream."""
    agent = Agent(model, tools=[get_weather])
    async with agent.run_stream(say(PARIS)) as result:
        expect(await result.get_output(), "Sunny in Paris.")


async def streams(model: Any) -> None:
    """Text deltas, and usage at the end."""
    async with Agent(model).run_stream(say("Bit by bit.")) as result:
        text = "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])
        expect(text, "Bit by bit.")
        assert 0 < result.usage.output_tokens < 20, result.usage


@features.feature("chat")
async def plain() -> None:
    result = await Agent(chat, instructions="Be brief.").run(say("Hello!"))
    expect(result.output, "Hello!")
    assert 0 < result.usage.output_tokens < 20, result.usage


@features.feature("stream")
async def stream() -> None:
    await streams(chat)


@features.feature("cached tokens")
async def cached() -> None:
    await Agent(chat).run(PREFIX + say("Noted."))
    usage = (await Agent(chat).run(PREFIX + say("Noted."))).usage
    assert usage.cache_read_tokens > 200, usage


@features.feature("tool loop")
async def tool_loop() -> None:
    await tool_loop_of(chat)


@features.feature("streamed tool calls")
async def streamed_tool_calls() -> None:
    await streamed_tool_loop_of(chat)


@features.feature("parallel tools")
async def parallel_tools() -> None:
    cities: list[str] = []

    def visit(city: str) -> str:
        """Visit a city."""
        cities.append(city)
        return say("Both.")

    both = f"{call('visit', city='Paris')}\n{call('visit', city='Rome')}"
    expect((await Agent(chat, tools=[visit]).run(say(both))).output, "Both.")
    expect(sorted(cities), ["Paris", "Rome"])


@features.feature("forced tool")
async def tool_output() -> None:
    made = call("final_result", name="Ada", age=36)
    result = await Agent(chat, output_type=Person).run(say(made))
    expect(result.output, Person(name="Ada", age=36))


@features.feature("structured output")
async def structured_output() -> None:
    agent = Agent(chat, output_type=NativeOutput(Person))
    result = await agent.run(say('{"name":"Ada","age":36}'))
    expect(result.output, Person(name="Ada", age=36))


@features.feature("structured output with tools")
async def structured_output_with_tools() -> None:
    def tell_person(name: str) -> str:
        """All about a person."""
        return say(f'{{"name":"{name}","age":36}}')

    agent = Agent(chat, tools=[tell_person], output_type=NativeOutput(Person))
    result = await agent.run(say(call("tell_person", name="Ada")))
    expect(result.output, Person(name="Ada", age=36))


@features.feature("responses")
async def responses() -> None:
    expect((await Agent(by_responses).run(say("In short, yes."))).output, "In short, yes.")
    await streams(by_responses)


@features.feature("responses tool loop")
async def responses_tool_loop() -> None:
    await tool_loop_of(by_responses)
    await streamed_tool_loop_of(by_responses)


@features.feature("anthropic messages")
async def messages() -> None:
    expect((await Agent(claude).run(say("Hello!"))).output, "Hello!")
    await streams(claude)


@features.feature("anthropic tool loop")
async def anthropic_tool_loop() -> None:
    await tool_loop_of(claude)
    await streamed_tool_loop_of(claude)


if __name__ == "__main__":
    features.run()
