"""LlamaIndex's OpenAILike: chat, completions, tools, structured prediction."""

from __future__ import annotations

from typing import Any

from harness import KEY, MODEL, URL, Features, call, expect, say
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

# docs: begin
llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key=KEY,
    context_window=4096,
    is_chat_model=True,
    is_function_calling_model=True,
)
# docs: end
completing = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key=KEY)  # by /v1/completions
features = Features("llama-index-llms-openai-like", "llama-index-core")
PARIS = call("get_weather", city="Paris")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Weather of a city."""
    return say(f"Sunny in {city}.")


tool = FunctionTool.from_defaults(get_weather)


def user(text: str) -> list[ChatMessage]:
    """A conversation of one message."""
    return [ChatMessage(role="user", content=text)]


@features.feature("chat")
def chat() -> None:
    messages = [ChatMessage(role="system", content="Be brief."), *user(say("Hello!"))]
    answer = llm.chat(messages)
    expect(answer.message.content, "Hello!")
    assert answer.raw.usage.completion_tokens > 0


@features.feature("stream")
def stream() -> None:
    deltas = [chunk.delta for chunk in llm.stream_chat(user(say("Bit by bit.")))]
    expect("".join(delta or "" for delta in deltas), "Bit by bit.")


@features.feature("async")
async def asynchronous() -> None:
    expect((await llm.achat(user(say("In time.")))).message.content, "In time.")


@features.feature("completions")
def completions() -> None:
    expect(completing.complete(say("Completed."), max_tokens=50).text, "Completed.")
    parts = completing.stream_complete(say("Completed."), max_tokens=50)
    expect("".join(part.delta or "" for part in parts), "Completed.")


@features.feature("tool loop")
def tool_loop() -> None:
    result: Any = llm.predict_and_call([tool], user_msg=say(PARIS))
    expect(result.response, say("Sunny in Paris."))


@features.feature("streamed tool calls")
async def streamed_tool_calls() -> None:
    agent = FunctionAgent(tools=[tool], llm=llm, system_prompt="Use the tools.")
    expect(str(await agent.run(say(PARIS))), "Sunny in Paris.")


@features.feature("forced tool")
def forced_tool() -> None:
    answer = llm.chat_with_tools([tool], user_msg=say(PARIS), tool_required=True)
    (made,) = llm.get_tool_calls_from_response(answer)
    expect((made.tool_name, made.tool_kwargs), ("get_weather", {"city": "Paris"}))


@features.feature("structured output")
def structured_output() -> None:
    prompt = PromptTemplate("{question}")
    made = call("Person", name="Ada", age=36)
    result = llm.structured_predict(Person, prompt, question=say(made))
    expect(result, Person(name="Ada", age=36))


@features.feature("stop")
def stop() -> None:
    expect(llm.chat(user(say("One. Two.")), stop=["Two"]).message.content, "One. ")


if __name__ == "__main__":
    features.run()
