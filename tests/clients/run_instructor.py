"""Instructor: structured answers by tools and by JSON schema, with retries and streams."""

from __future__ import annotations

from typing import Any

import instructor
from harness import KEY, MODEL, URL, Features, call, expect, say
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, field_validator

# docs: begin
client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
by_tools = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
# docs: end
features = Features("instructor")
ADA = '{"name":"Ada","age":36}'


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Adult(Person):
    """A person who is no child."""

    @field_validator("age")
    @classmethod
    def is_grown_up(cls, age: int) -> int:
        """The message is what the model is told."""
        if age < 18:
            raise ValueError(say(call("Adult", name="Ada", age=36)))
        return age


def expect_ada(answer: Person) -> None:
    """Instructor's answers are of a class of its own, below the one asked for."""
    assert isinstance(answer, Person)
    expect(answer.model_dump(), {"name": "Ada", "age": 36})


def ask(of: Any, text: str, **more: Any) -> Any:
    """One structured answer."""
    messages = [{"role": "user", "content": text}]
    return of.chat.completions.create(model=MODEL, messages=messages, **more)


@features.feature("forced tool")
def forced_tool() -> None:
    made = say(call("Person", name="Ada", age=36))
    expect_ada(ask(by_tools, made, response_model=Person))


@features.feature("structured output")
def structured_output() -> None:
    expect_ada(ask(by_schema, say(ADA), response_model=Person))


@features.feature("json mode")
def json_mode() -> None:
    by_json = instructor.from_openai(client, mode=instructor.Mode.JSON)
    expect_ada(ask(by_json, say(ADA), response_model=Person))


@features.feature("retry after a bad answer")
def retry() -> None:
    made = say(call("Adult", name="Ada", age=6))
    expect_ada(ask(by_tools, made, response_model=Adult, max_retries=2))


@features.feature("async")
async def asynchronous() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as other:
        patched = instructor.from_openai(other, mode=instructor.Mode.JSON_SCHEMA)
        expect_ada(await ask(patched, say(ADA), response_model=Person))


@features.feature("streamed partial answers")
def partial() -> None:
    pieces = list(ask(by_schema, say(ADA), response_model=instructor.Partial[Person], stream=True))
    expect(pieces[-1].model_dump(), {"name": "Ada", "age": 36})


@features.feature("streamed tool calls")
def streamed_tools() -> None:
    made = say(call("PartialPerson", name="Ada", age=36))
    pieces = list(ask(by_tools, made, response_model=instructor.Partial[Person], stream=True))
    expect(pieces[-1].model_dump(), {"name": "Ada", "age": 36})


if __name__ == "__main__":
    features.run()
