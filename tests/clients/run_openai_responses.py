"""The openai SDK: Responses."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

import openai
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
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
features = Features("openai")
TOOL: Any = {"type": "function", "name": "get_weather", "strict": True, "parameters": WEATHER}
FORCED: Any = {"type": "function", "name": "get_weather"}
PARIS = call("get_weather", city="Paris")


class Person(BaseModel):
    """Form of the structured answers."""

    name: str
    age: int


def user(text: Any) -> list[Any]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def ask(text: Any, **options: Any) -> Any:
    """One response."""
    return client.responses.create(model=MODEL, input=text, **options)


@features.feature("create")
def create() -> None:
    answer = ask(say("In short, yes."), instructions="Be brief.")
    expect((answer.output_text, answer.status), ("In short, yes.", "completed"))
    assert answer.usage.input_tokens > 0
    assert answer.usage.input_tokens_details.cached_tokens >= 0


@features.feature("stream")
def streams() -> None:
    with client.responses.stream(model=MODEL, input=say("Bit by bit.")) as stream:
        events = list(stream)
        final = stream.get_final_response()
    expect(final.output_text, "Bit by bit.")
    expect([e.sequence_number for e in events], list(range(len(events))), "sequence numbers")
    expect((events[0].type, events[-1].type), ("response.created", "response.completed"))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    expect("".join(deltas), "Bit by bit.")


@features.feature("tools")
def tools() -> None:
    first = ask(user(say(PARIS)), tools=[TOOL])
    made = next(item for item in first.output if item.type == "function_call")
    expect((made.name, json.loads(made.arguments)), ("get_weather", {"city": "Paris"}))
    output = {"type": "function_call_output", "call_id": made.call_id, "output": say("Sunny.")}
    conversation = [*user(say(PARIS)), *first.output, output]
    second = ask(conversation, tools=[TOOL])
    expect(second.output_text, "Sunny.")


@features.feature("streamed tools")
def streamed_tools() -> None:
    with client.responses.stream(model=MODEL, input=say(PARIS), tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds, kinds
    expect(json.loads(final.output[-1].arguments), {"city": "Paris"})


@features.feature("parse")
def parse() -> None:
    answer = client.responses.parse(
        model=MODEL, input=say('{"name":"Ada","age":36}'), text_format=Person
    )
    expect(answer.output_parsed, Person(name="Ada", age=36))


@features.feature("stored")
def stored() -> None:
    first = ask(say("Remember."), store=True)
    second = ask(say("I do."), previous_response_id=first.id)
    expect(second.output_text, "I do.")
    assert second.usage.input_tokens > first.usage.input_tokens
    expect(client.responses.retrieve(first.id).output_text, "Remember.")
    expect(len(client.responses.input_items.list(first.id).data), 1)
    client.responses.delete(first.id)
    refused(openai.NotFoundError, lambda: client.responses.retrieve(first.id))


@features.feature("count")
def counts() -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=say("Counted."))
    answer = ask(say("Counted."))
    expect(counted.input_tokens, answer.usage.input_tokens)


@features.feature("reasoning")
def reasoning() -> None:
    answer = ask(say("<think>Hm.</think>Yes."))
    expect([item.type for item in answer.output], ["reasoning", "message"])
    expect(answer.output_text, "Yes.")


@features.feature("as coding agents ask")
def agent() -> None:
    hosted: Any = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
    stream = client.responses.create(
        model=MODEL,
        instructions="You are a coding agent.",
        input=[{"role": "developer", "content": "Be careful."}, *user(say(PARIS))],
        tools=[TOOL, *hosted],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="a-session",
        store=False,
        stream=True,
    )
    events = list(stream)
    expect(events[-1].type, "response.completed")
    expect(events[-1].response.output[-1].name, "get_weather")


def conversation() -> list[Any]:
    """Two turns."""
    first = {"role": "assistant", "content": "Noted."}
    return [*user(PREFIX), first, *user("And this."), first]


@features.feature("compact")
def compact() -> None:
    items = conversation()
    whole = client.responses.input_tokens.count(model=MODEL, input=items).input_tokens
    first = ask(items)
    done = client.responses.compact(model=MODEL, input=[*items, *first.output])
    expect([item.type for item in done.output], ["message", "message", "compaction"])
    assert done.usage.input_tokens_details.cached_tokens > whole - 20, done.usage
    after = ask([*done.output, *user(say("Go on."))])
    expect(after.output_text, "Go on.")
    stored = client.responses.compact(model=MODEL, previous_response_id=first.id)
    expect(stored.output[-1].type, "compaction")


@features.feature("compaction by a threshold")
def compaction() -> None:
    managed: Any = [{"type": "compaction", "compact_threshold": 200}]
    items = [*conversation(), *user(say("Go on."))]
    answer = ask(items, context_management=managed)
    expect([item.type for item in answer.output], ["compaction", "message"])
    expect(answer.output_text, "Go on.")
    cut = answer.usage.compaction
    expect(cut["compacted_input_tokens"], answer.usage.input_tokens, "tokens that stayed")
    assert cut["original_input_tokens"] > 2 * cut["compacted_input_tokens"], cut
    later = ask([*items, *answer.output, *user(say("And on."))])
    expect(later.output_text, "And on.")
    assert later.usage.input_tokens_details.cached_tokens > answer.usage.input_tokens - 16
    by_id = ask(say("And on."), previous_response_id=answer.id)
    expect(by_id.usage.input_tokens, later.usage.input_tokens, "tokens of the same prompt")


@features.feature("streamed compaction")
def streamed_compaction() -> None:
    managed: Any = [{"type": "compaction", "compact_threshold": 200}]
    items = [*conversation(), *user(say("Go on."))]
    with client.responses.stream(model=MODEL, input=items, context_management=managed) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    expect([item.type for item in final.output], ["compaction", "message"])
    expect(final.output_text, "Go on.")
    expect(kinds[2:4], ["response.output_item.added", "response.output_item.done"])
    trigger: Any = {"type": "compaction_trigger"}
    triggered = list(ask([*conversation(), trigger], stream=True))
    expect(triggered[3].type, "response.compaction.compacting")
    expect([item.type for item in triggered[-1].response.output], ["compaction"])
    with client.responses.create(
        model=MODEL, input=items, context_management=managed, stream=True
    ) as left:
        expect(next(iter(left)).type, "response.created")
    expect(ask(say("Still here.")).output_text, "Still here.")


@features.feature("altered compaction")
def altered_compaction() -> None:
    item = client.responses.compact(model=MODEL, input=conversation()).output[-1]
    sealed = item.encrypted_content
    broken: Any = {"type": "compaction", "encrypted_content": f"{sealed[:-6]}AAAA{sealed[-2:]}"}
    error = refused(openai.BadRequestError, lambda: ask([broken, *user("Hi")]))
    expect(error.param, "input[0].encrypted_content")
    wrong: Any = [{"type": "compaction", "compact_threshold": 0}]
    error = refused(openai.BadRequestError, lambda: ask("Hi", context_management=wrong))
    expect(error.param, "context_management[0].compact_threshold")


@features.feature("images")
def images() -> None:
    def look(png: str, text: str) -> tuple[str, int, int]:
        image = {
            "type": "input_image",
            "image_url": f"data:image/png;base64,{png}",
            "detail": "low",
        }
        answer: Any = client.with_options(base_url=f"{SEEING_URL}/v1").responses.create(
            model=SEEING,
            input=user([image, {"type": "input_text", "text": text}]),
            max_output_tokens=8,
            temperature=0,
        )
        details = answer.usage.input_tokens_details
        return answer.output_text, details.image_tokens, details.cached_tokens

    check_sight(look)


@features.feature("errors")
def errors() -> None:
    error = refused(openai.BadRequestError, lambda: ask(LONG))
    expect(error.code, "context_length_exceeded")
    assert "tokens too long. Compaction" in str(error), error


@features.feature("async")
async def asynchronous() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as other:
        answer = await other.responses.create(model=MODEL, input=say("In time."))
    expect(answer.output_text, "In time.")


@features.feature("cached tokens")
def cached_tokens() -> None:
    ask(PREFIX + say("Noted."))
    usage = ask(PREFIX + say("Noted.")).usage
    assert usage.input_tokens_details.cached_tokens > 200, usage


@features.feature("cache breakpoints")
def cache_breakpoints() -> None:
    def marked(**mark: Any) -> list[Any]:
        part = {"type": "input_text", "text": PREFIX, **mark}
        rest = {"type": "input_text", "text": say("Noted.")}
        return [{"role": "user", "content": [part, rest]}]

    def body(**options: Any) -> Any:
        return {
            "prompt_cache_options": {"mode": "explicit", **options},
            "cache_salt": f"{sys.prefix} responses",
        }

    mark: Any = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    none = client.responses.create(model=MODEL, input=marked(), extra_body=body())
    expect(none.usage.input_tokens_details.cache_write_tokens, 0, "without a breakpoint")
    stream = client.responses.create(
        model=MODEL, input=marked(**mark), extra_body=body(), stream=True
    )
    first = list(stream)[-1].response
    expect(dict(first.prompt_cache_options)["mode"], "explicit")
    written = dict(first.usage.input_tokens_details.cache_write_tokens_details)
    assert written["ttl_12h_tokens"] > 200, written
    compared = body(comparison_response_id=first.id)
    again = client.responses.create(model=MODEL, input=marked(**mark), extra_body=compared)
    assert again.usage.input_tokens_details.cached_tokens > 200, again.usage
    expect(dict(again.prompt_cache_diagnostics)["type"], "cache_hit")
    other = client.responses.create(
        model=MODEL, instructions="Be brief.", input=marked(**mark), extra_body=compared
    )
    found = dict(other.prompt_cache_diagnostics)
    expect((found["type"], found["reason"]), ("cache_miss", "input_changed"))
    left = client.responses.create(
        model=MODEL, input=marked(**mark), extra_body=body(), stream=True
    )
    next(iter(left))
    left.close()  # the client leaves
    bad: Any = {"prompt_cache_breakpoint": {"mode": "implicit"}}
    error = refused(
        openai.BadRequestError,
        lambda: client.responses.create(model=MODEL, input=marked(**bad), extra_body=body()),
    )
    expect(error.param, "input[0].content[0]")
    error = refused(
        openai.BadRequestError,
        lambda: client.responses.create(model=MODEL, input="Hi", extra_body=body(ttl="1h")),
    )
    expect(error.param, "prompt_cache_options.ttl")


@features.feature("cost")
def cost() -> None:
    with client.responses.stream(model=MODEL, input=say("How much?")) as stream:
        stream.until_done()
        usage: Any = stream.get_final_response().usage
    cached = usage.input_tokens_details.cached_tokens
    plain = usage.input_tokens - cached
    wanted = (plain * 2 + cached * 0.5 + usage.output_tokens * 8) / 1e6
    expect(usage.cost, round(wanted, 12))


if find_spec("websockets"):  # not where openai 2 is

    @features.feature("websocket")
    def websocket() -> None:
        with client.responses.connect() as connection:

            def turn(**fields: Any) -> Any:
                connection.response.create(model=MODEL, **fields)
                events = []
                for event in connection:
                    events.append(event)
                    if event.type in ("response.completed", "error"):
                        return events
                raise AssertionError("the connection ended")

            *events, last = turn(input=say("Over the wire."), stream_id="a")
            deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
            expect("".join(deltas), "Over the wire.")
            expect({e.stream_id for e in [*events, last]}, {"a"})
            warm = turn(input=PREFIX, generate=False, store=False)[-1].response
            expect((warm.output, warm.usage.output_tokens), ([], 0))
            then = turn(input=say("Warm."), previous_response_id=warm.id)[-1].response
            expect(then.output_text, "Warm.")
            assert then.usage.input_tokens_details.cached_tokens > 200, then.usage
            [error] = turn(input="Hi", temperature=-1)
            expect((error.type, error.status, error.error.param), ("error", 400, "temperature"))
        with client.responses.connect() as connection:  # it is left before its answer
            connection.response.create(model=MODEL, input=say("One two three four five."))
            expect(connection.recv().type, "response.created")
        expect(ask(say("Still here.")).output_text, "Still here.")


@features.feature("forced tool")
def forced_tool() -> None:
    for choice in (FORCED, "required"):
        made = ask(say(PARIS), tools=[TOOL], tool_choice=choice).output[-1]
        expect((made.name, json.loads(made.arguments)), ("get_weather", {"city": "Paris"}))
    none = ask(say("No tool."), tools=[TOOL], tool_choice="none")
    expect(none.output_text, "No tool.")


@features.feature("parallel tools")
def parallel_tools() -> None:
    both = f"{PARIS}\n{call('get_weather', city='Rome')}"
    calls = ask(say(both), tools=[TOOL]).output
    cities = [json.loads(each.arguments)["city"] for each in calls if each.type == "function_call"]
    expect(cities, ["Paris", "Rome"])
    expect(len(ask(say(both), tools=[TOOL], parallel_tool_calls=False).output), 1, "calls")


@features.feature("length")
def length() -> None:
    answer = ask(say("One two three four five."), max_output_tokens=2)
    expect((answer.status, answer.incomplete_details.reason), ("incomplete", "max_output_tokens"))


@features.feature("logprobs")
def logprobs() -> None:
    answer = ask(say("Sure."), include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = answer.output[-1].content[0].logprobs
    expect("".join(each.token for each in tokens).removesuffix("<|im_end|>"), "Sure.")


if __name__ == "__main__":
    features.run()
