"""The openai SDK: chat completions, completions and models."""

from __future__ import annotations

import asyncio
import json
import sys
import time
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

# docs: begin
client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
# docs: end
features = Features("openai")
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER}
TOOL: Any = {"type": "function", "function": FUNCTION}
# For answers off the script: there is one way to call it.
ONLY_PARIS = WEATHER | {"properties": {"city": {"type": "string", "enum": ["Paris"]}}}
PARIS_ALONE: Any = {"type": "function", "function": FUNCTION | {"parameters": ONLY_PARIS}}
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}
PARIS = call("get_weather", city="Paris")
TEAMS: Any = [{"value": "post"}, {"value": True}, {"value": "post office"}]
LATE: Any = [{"label": "on time"}, {"label": "late", "description": "by a day"}]


class Person(BaseModel):
    """Form of the structured answers."""

    name: str
    age: int


def user(text: Any) -> list[Any]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def chat(text: str, **options: Any) -> Any:
    """One chat completion."""
    return client.chat.completions.create(model=MODEL, messages=user(text), **options)


@features.feature("chat")
def chat_answers() -> None:
    answer = chat(say("Hello, wörld!"))
    expect(answer.choices[0].message.content, "Hello, wörld!")
    expect(answer.choices[0].finish_reason, "stop")
    expect((answer.object, answer.model), ("chat.completion", MODEL))


@features.feature("stream")
def chat_streams() -> None:
    options = {"include_usage": True}
    chunks = list(chat(say("One two three, ünd four."), stream=True, stream_options=options))
    expect(
        "".join(c.choices[0].delta.content or "" for c in chunks[:-1]), "One two three, ünd four."
    )
    expect(chunks[-2].choices[0].finish_reason, "stop")
    expect(chunks[-1].choices, [])
    assert chunks[-1].usage.completion_tokens > 1


@features.feature("stream helper")
def chat_stream_helper() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(say("Step by step.")), n=2
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    expect([c.message.content for c in final.choices], ["Step by step."] * 2)


@features.feature("async")
async def chat_async() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as other:
        stream = await other.chat.completions.create(
            model=MODEL, messages=user(say("In time.")), stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    expect(text, "In time.")


@features.feature("cached tokens")
def cached_usage() -> None:
    first, second = (chat(PREFIX + say("Noted.")).usage for _ in range(2))
    expect(second.prompt_tokens, first.prompt_tokens)
    expect(second.total_tokens, second.prompt_tokens + second.completion_tokens)
    assert 0 < second.prompt_tokens - second.prompt_tokens_details.cached_tokens <= 16


@features.feature("cache breakpoints")
def cache_breakpoints() -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}

    def ask(mark: dict[str, Any]) -> Any:
        system = {"role": "system", "content": [{"type": "text", "text": PREFIX, **mark}]}
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[system, *user(say("Noted."))],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={
                "prompt_cache_options": {"mode": "explicit"},
                "cache_salt": f"{sys.prefix} chat",
            },
        )
        return list(stream)[-1].usage.prompt_tokens_details

    none = [ask({}) for _ in range(2)]
    expect([each.cached_tokens for each in none], [0, 0], "without a breakpoint")
    first, again = ask(mark), ask(mark)
    written: Any = first.cache_write_tokens_details
    assert written["ttl_12h_tokens"] > 200, written
    expect(sum(written.values()), first.cache_write_tokens)
    assert again.cached_tokens > 200, again
    expect(again.cache_write_tokens_details, {"ttl_30m_tokens": 0, "ttl_12h_tokens": 0})
    bad = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "1h"}}
    error = refused(openai.BadRequestError, lambda: ask(bad))
    expect(error.param, "messages[0].content[0].prompt_cache_breakpoint.ttl")


@features.feature("sessions and hints")
def sessions() -> None:
    def end(name: str) -> Any:
        return client.delete(f"/sessions/{name}", cast_to=dict[str, object])["deleted"]

    def num_sessions() -> Any:
        root = client.with_options(base_url=URL)
        return root.get("/cache", cast_to=dict[str, object])["num_sessions"]

    def turn(name: str, **options: Any) -> Any:
        headers = {"x-session-id": name, **options.pop("headers", {})}
        return chat(PREFIX + say("One two three."), extra_headers=headers, **options)

    hints = {"agent_hints": {"priority": 1, "osl": 8, "speculative_prefill": True}}
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in turn("hinted", stream=True, extra_body={"nvext": hints})
    )
    expect(text, "One two three.")
    list(turn("run", stream=True))
    expect([end("run"), end("run")], [True, False], "ended")
    turn("last", headers={"x-session-close": "true"})
    expect(end("last"), False, "ended by its last request")
    before = num_sessions()
    stream = turn("left", stream=True)
    next(iter(stream))
    stream.close()  # the client leaves
    while num_sessions() == before:  # until the turn has ended
        time.sleep(0.05)
    expect(end("left"), True, "the turn that was left")
    error = refused(openai.BadRequestError, lambda: turn("x", headers={"x-session-close": "so"}))
    expect(error.param, "x-session-close")
    bad = {"nvext": {"agent_hints": {"priority": "high"}}}
    error = refused(openai.BadRequestError, lambda: turn("x", extra_body=bad))
    expect(error.param, "nvext.agent_hints.priority")
    action = {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0"}
    envelope = {"protocol_version": "0.1", "message_id": "1"}
    for directive, field in (({"priority": 50, "duration": 9}, ""), ({"priority": -1}, "priority")):
        payload = {**action, "payload": {"directives": [directive]}}
        body = {"kv_hints": {**envelope, "actions": [payload]}}
        if not field:
            turn("x", extra_body=body)
            continue
        error = refused(openai.BadRequestError, lambda body=body: turn("x", extra_body=body))
        expect(error.param, f"kv_hints.actions[0].payload.directives[0].{field}")


@features.feature("cost")
def cost() -> None:
    def priced(usage: Any) -> float:
        cached = usage.prompt_tokens_details.cached_tokens
        plain = usage.prompt_tokens - cached
        return round((plain * 2 + cached * 0.5 + usage.completion_tokens * 8) / 1e6, 12)

    options = {"include_usage": True}
    whole = chat(say("How much?")).usage
    *_, last = chat(say("How much?"), stream=True, stream_options=options)
    expect((whole.cost, last.usage.cost), (priced(whole), priced(last.usage)))


if hasattr(client, "decisions"):  # not in openai 2

    @features.feature("decisions")
    def decisions() -> None:
        asked: Any = [
            {"type": "predicate", "instructions": "A parcel arrived."},
            {"type": "choice", "name": "team", "instructions": "Who?", "choices": TEAMS},
            {"type": "score", "instructions": "How late?", "levels": LATE},
        ]
        answers = client.decisions.create(model=MODEL, input="It came.", questions=asked).answers
        expect([each.type for each in answers], ["predicate", "choice", "score"])
        assert 0 < answers[0].probability < 1
        shares = {each.value: each.probability for each in answers[1].probabilities}
        expect((answers[1].name, [*shares]), ("team", ["post", True, "post office"]))
        expect(answers[1].confidence, shares[answers[1].choice])
        assert abs(sum(shares.values()) - 1) < 1e-6, shares
        assert 0 <= answers[2].score <= 1
        asked[1]["choices"] = TEAMS[:1]
        error = refused(
            openai.BadRequestError,
            lambda: client.decisions.create(model=MODEL, input="It came.", questions=asked),
        )
        expect(error.param, "questions[1].choices")
        impatient = client.with_options(timeout=0.001, max_retries=0)
        many: Any = [{"type": "predicate", "instructions": f"Claim {n}."} for n in range(400)]
        refused(
            openai.APITimeoutError,
            lambda: impatient.decisions.create(model=MODEL, input=PREFIX, questions=many),
        )
        expect(chat(say("Still here.")).choices[0].message.content, "Still here.")


@features.feature("tool loop")
def tool_loop() -> None:
    messages = user(say(PARIS))
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0]
    expect(first.finish_reason, "tool_calls")
    expect(first.message.content, None)
    made = first.message.tool_calls[0]
    expect((made.type, made.function.name), ("function", "get_weather"))
    expect(json.loads(made.function.arguments), {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": made.id, "content": say("Sunny in Paris.")}
    messages += [first.message, result]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    expect(second.choices[0].message.content, "Sunny in Paris.")


@features.feature("streamed tool calls")
def streamed_tool_calls() -> None:
    stream = client.chat.completions.stream(
        model=MODEL, messages=user(say(f"Let me see.\n{PARIS}")), tools=[TOOL]
    )
    with stream as events:
        pieces = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
        choice = events.get_final_completion().choices[0]
    assert pieces, "no argument deltas"
    expect("".join(piece.arguments_delta for piece in pieces), '{"city": "Paris"}')
    expect(choice.message.tool_calls[0].function.name, "get_weather")
    expect((choice.message.content or "").strip(), "Let me see.")
    expect(choice.finish_reason, "tool_calls")


@features.feature("forced tool")
def forced_tool() -> None:
    choice = chat(say(PARIS), tools=[TOOL], tool_choice=FORCED).choices[0]
    expect(json.loads(choice.message.tool_calls[0].function.arguments), {"city": "Paris"})
    required = chat(say(PARIS), tools=[TOOL], tool_choice="required").choices[0]
    expect(required.message.tool_calls[0].function.name, "get_weather")
    none = chat(say("No tool."), tools=[TOOL], tool_choice="none").choices[0]
    expect((none.message.content, none.message.tool_calls), ("No tool.", None))


@features.feature("unwilling forced tool")
def unwilling_forced_tool() -> None:
    text = say("<think>Shall I?</think>I would rather not.")
    choice = chat(text, tools=[PARIS_ALONE], tool_choice=FORCED, max_tokens=100).choices[0]
    made = choice.message.tool_calls[0].function
    expect((made.name, json.loads(made.arguments)), ("get_weather", {"city": "Paris"}))


@features.feature("parallel tools")
def parallel_tools() -> None:
    both = f"{PARIS}\n{call('get_weather', city='Rome')}"
    calls = chat(say(both), tools=[TOOL]).choices[0].message.tool_calls
    cities = [json.loads(each.function.arguments)["city"] for each in calls]
    expect(cities, ["Paris", "Rome"])
    assert calls[0].id != calls[1].id
    single = chat(say(both), tools=[TOOL], parallel_tool_calls=False).choices[0]
    expect(len(single.message.tool_calls), 1, "calls with parallel_tool_calls=False")


@features.feature("strict tools")
def strict_tools() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=user(say(call("Person", name="Ada", age=36))),
        tools=[openai.pydantic_function_tool(Person)],
    )
    made = answer.choices[0].message.tool_calls[0]
    expect(made.function.parsed_arguments, Person(name="Ada", age=36))


@features.feature("allowed tools")
def allowed_tools() -> None:
    other: Any = {"type": "function", "function": {"name": "other", "parameters": WEATHER}}
    allowed = {"mode": "required", "tools": [FORCED]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    text = say(call("other", city="Rome"))
    answer = chat(text, tools=[other, PARIS_ALONE], tool_choice=choice, max_tokens=100)
    expect(answer.choices[0].message.tool_calls[0].function.name, "get_weather")


@features.feature("reasoning")
def reasoning() -> None:
    text = say("<think>Hm, let me see.</think>Yes.")
    message = chat(text).choices[0].message
    expect((message.reasoning_content.strip(), message.content), ("Hm, let me see.", "Yes."))
    deltas = [chunk.choices[0].delta for chunk in chat(text, stream=True)]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    words = "".join(delta.content or "" for delta in deltas)
    expect((thought.strip(), words), ("Hm, let me see.", "Yes."))


@features.feature("structured output")
def structured_output() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=user(say('{"name":"Ada","age":36}')), response_format=Person
    )
    expect(answer.choices[0].message.parsed, Person(name="Ada", age=36))
    message = chat(say('{"a": [1, 2]}'), response_format={"type": "json_object"}).choices[0].message
    expect(json.loads(message.content), {"a": [1, 2]})


@features.feature("stop")
def stop() -> None:
    choice = chat(say("One. Two. Three."), stop=["Two"]).choices[0]
    expect((choice.message.content, choice.finish_reason), ("One. ", "stop"))


@features.feature("length")
def length() -> None:
    choice = chat(say("One two three four five."), max_completion_tokens=2).choices[0]
    expect(choice.finish_reason, "length")


@features.feature("n")
def several() -> None:
    answer = chat(say("Same."), n=3, temperature=0.5)
    expect([c.message.content for c in answer.choices], ["Same."] * 3)
    expect([c.index for c in answer.choices], [0, 1, 2])


@features.feature("logprobs")
def logprobs() -> None:
    answer = chat(say("Sure thing."), logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    expect(len(content), answer.usage.completion_tokens)
    data = b"".join(bytes(each.bytes) for each in content[:-1])
    expect(data.decode(), "Sure thing.")
    assert all(len(each.top_logprobs) == 2 for each in content)


@features.feature("prediction")
def prediction() -> None:
    text = "def add(a, b):\n    return a + b\n"
    usage = chat(say(text), prediction={"type": "content", "content": text}).usage
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens >= 0


@features.feature("completions")
def completions() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["a [[b c]]", "d [[e]]"], echo=True, logprobs=1, max_tokens=20
    )
    expect([c.text for c in answer.choices], ["a [[b c]]b c", "d [[e]]e"])
    assert answer.choices[0].logprobs.token_logprobs[0] is None


@features.feature("token ids")
def token_ids() -> None:
    tokens = client.post(f"{URL}/tokenize", body={"prompt": "x [[token ids]]"}, cast_to=object)[
        "tokens"
    ]
    answer = client.completions.create(model=MODEL, prompt=tokens, max_tokens=20)
    expect(answer.choices[0].text, "token ids")
    expect(answer.usage.prompt_tokens, len(tokens))


@features.feature("embeddings")
def embeddings() -> None:
    texts = ["One text.", "Another text."]
    packed = client.embeddings.create(model=MODEL, input=texts)  # the SDK asks for base64
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    expect([each.embedding for each in packed.data], [each.embedding for each in plain.data])
    expect([each.index for each in plain.data], [0, 1])
    assert abs(sum(number**2 for number in plain.data[0].embedding) - 1) < 1e-5
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 2


@features.feature("images")
def images() -> None:
    def look(png: str, text: str) -> tuple[str, int, int]:
        url: Any = {"url": f"data:image/png;base64,{png}", "detail": "low"}
        parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
        answer: Any = client.with_options(base_url=f"{SEEING_URL}/v1").chat.completions.create(
            model=SEEING, messages=user(parts), max_tokens=8, temperature=0
        )
        details = answer.usage.prompt_tokens_details
        return answer.choices[0].message.content, details.image_tokens, details.cached_tokens

    check_sight(look)


@features.feature("concurrency")
async def concurrency() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as other:

        async def ask(age: int) -> Any:
            """Every second one is free to say what it likes."""
            text = f'{{"name":"Number {age}","age":{age}}}'
            schema: Any = {"response_format": Person} if age % 2 else {}
            return await other.chat.completions.parse(
                model=MODEL, messages=user(say(text)), temperature=0.8, **schema
            )

        answers = await asyncio.gather(*(ask(age) for age in range(24)))
    texts = [answer.choices[0].message.content for answer in answers]
    people = [Person.model_validate_json(text) for text in texts]
    expect(people, [Person(name=f"Number {age}", age=age) for age in range(24)])


@features.feature("errors")
def errors() -> None:
    error = refused(
        openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list()
    )
    expect(error.code, "invalid_api_key")
    error = refused(
        openai.NotFoundError,
        lambda: client.chat.completions.create(model="no-such", messages=user("Hi")),
    )
    expect(error.code, "model_not_found")
    error = refused(openai.BadRequestError, lambda: chat(LONG))
    expect(error.code, "context_length_exceeded")
    error = refused(openai.BadRequestError, lambda: chat("Hi", temperature="hot"))
    expect(error.param, "temperature")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = refused(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=user([image])),
    )
    expect(error.param, "messages[0].content[0]")


@features.feature("closing a stream")
def closing() -> None:
    stream = chat(say("word " * 600), stream=True)
    next(iter(stream))
    stream.close()
    expect(chat(say("Next.")).choices[0].message.content, "Next.")


@features.feature("models")
def models() -> None:
    expect([model.id for model in client.models.list()], [MODEL])
    expect(client.models.retrieve(MODEL).id, MODEL)
    expect(client.models.retrieve(MODEL).root, MODEL)


if __name__ == "__main__":
    features.run()
