"""smolagents: its OpenAI model, the tool-calling agent and the code agent."""

from __future__ import annotations

from typing import Any

from harness import KEY, MODEL, URL, Features, call, expect, say
from smolagents import ChatMessage, CodeAgent, LogLevel, MessageRole, OpenAIModel, ToolCallingAgent
from smolagents import tool as as_tool

# docs: begin
model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY)
# docs: end
features = Features("smolagents")


@as_tool
def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: The city.
    """
    return say(call("final_answer", answer=f"Sunny in {city}."))


def user(text: str) -> list[Any]:
    """A conversation of one message."""
    return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]


def short(agent: Any) -> Any:
    """An agent with a short system prompt: the built-in pair's context is small."""
    agent.prompt_templates["system_prompt"] = "Use the tools."
    return agent


@features.feature("chat")
def chat() -> None:
    answer = model.generate(user(say("Hello!")))
    expect(answer.content, "Hello!")
    assert answer.token_usage.output_tokens > 0


@features.feature("stream")
def stream() -> None:
    deltas = list(model.generate_stream(user(say("Bit by bit."))))
    expect("".join(delta.content or "" for delta in deltas), "Bit by bit.")
    usages = [delta.token_usage for delta in deltas if delta.token_usage]
    expect(len(usages), 1, "chunks with usage")


@features.feature("tool loop")
def tool_loop() -> None:
    worker = ToolCallingAgent(tools=[get_weather], model=model, verbosity_level=LogLevel.OFF)
    result = short(worker).run(say(call("get_weather", city="Paris")), max_steps=3)
    expect(result, "Sunny in Paris.")


@features.feature("streamed tool calls")
def streamed_tool_calls() -> None:
    worker = ToolCallingAgent(
        tools=[get_weather], model=model, verbosity_level=LogLevel.OFF, stream_outputs=True
    )
    result = short(worker).run(say(call("get_weather", city="Rome")), max_steps=3)
    expect(result, "Sunny in Rome.")


@features.feature("code agent")
def code_agent() -> None:
    worker = CodeAgent(tools=[], model=model, verbosity_level=LogLevel.OFF)
    code = "Thought: easy.\n<code>\nfinal_answer(6 * 7)\n</code>"
    expect(short(worker).run(say(code), max_steps=2), 42)


@features.feature("stop")
def stop() -> None:
    expect(model.generate(user(say("One. Two.")), stop_sequences=["Two"]).content, "One. ")


if __name__ == "__main__":
    features.run()
