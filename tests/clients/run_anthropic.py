"""The anthropic SDK: Messages, streams, tools, counting, the cache."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic, beta_tool
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

# docs: begin
client = Anthropic(base_url=URL, api_key=KEY)
# docs: end
features = Features("anthropic")
TOOL: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}
PARIS = call("get_weather", city="Paris")


def user(content: Any) -> list[Any]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


def ask(content: Any, *, max_tokens: int = 200, **options: Any) -> Any:
    """One message."""
    return client.messages.create(
        model=MODEL, max_tokens=max_tokens, messages=user(content), **options
    )


def used(message: Any) -> Any:
    """The one tool use of a message."""
    (block,) = [block for block in message.content if block.type == "tool_use"]
    return block


@features.feature("messages")
def messages() -> None:
    answer = ask(say("Hello, wörld!"), system=[{"type": "text", "text": "Be brief."}])
    expect([(block.type, block.text) for block in answer.content], [("text", "Hello, wörld!")])
    expect((answer.role, answer.stop_reason, answer.model), ("assistant", "end_turn", MODEL))
    assert answer.usage.input_tokens > 0
    assert answer.usage.output_tokens > 1


@features.feature("stream")
def stream() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=user(say("Bit by bit."))
    ) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    expect((text, final.stop_reason), ("Bit by bit.", "end_turn"))
    assert final.usage.output_tokens > 1


@features.feature("stream events")
def stream_events() -> None:
    kinds = [event.type for event in ask(say("In order."), stream=True) if event.type != "ping"]
    inner = [kind for kind in kinds if kind != "content_block_delta"]
    begin, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta"]
    expect(inner, [*begin, *end, "message_stop"])


@features.feature("async")
async def asynchronous() -> None:
    async with AsyncAnthropic(base_url=URL, api_key=KEY) as other:
        answer = await other.messages.create(
            model=MODEL, max_tokens=100, messages=user(say("In time."))
        )
    expect(answer.content[0].text, "In time.")


@features.feature("tool loop")
def tool_loop() -> None:
    first = ask(say(PARIS), tools=[TOOL])
    block = used(first)
    expect(
        (block.name, block.input, first.stop_reason), ("get_weather", {"city": "Paris"}, "tool_use")
    )
    result = {"type": "tool_result", "tool_use_id": block.id, "content": say("Sunny in Paris.")}
    conversation = [
        *user(say(PARIS)),
        {"role": "assistant", "content": first.content},
        *user([result]),
    ]
    second = client.messages.create(
        model=MODEL, max_tokens=200, messages=conversation, tools=[TOOL]
    )
    expect(second.content[0].text, "Sunny in Paris.")


@features.feature("streamed tool calls")
def streamed_tool_calls() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=user(say(f"Let me see.\n{PARIS}")), tools=[TOOL]
    ) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    expect("".join(pieces), '{"city": "Paris"}')
    expect(used(final).input, {"city": "Paris"})
    expect((final.content[0].type, final.content[0].text.strip()), ("text", "Let me see."))


@features.feature("forced tool")
def forced_tool() -> None:
    named = ask(say(PARIS), tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"})
    expect(used(named).input, {"city": "Paris"})
    expect(used(ask(say(PARIS), tools=[TOOL], tool_choice={"type": "any"})).name, "get_weather")
    none = ask(say("No tool."), tools=[TOOL], tool_choice={"type": "none"})
    expect(none.content[0].text, "No tool.")


@features.feature("parallel tools")
def parallel_tools() -> None:
    both = f"{PARIS}\n{call('get_weather', city='Rome')}"
    answer = ask(say(both), tools=[TOOL])
    cities = [block.input["city"] for block in answer.content if block.type == "tool_use"]
    expect(cities, ["Paris", "Rome"])
    one = {"type": "auto", "disable_parallel_tool_use": True}
    expect(used(ask(say(both), tools=[TOOL], tool_choice=one)).input, {"city": "Paris"})


@features.feature("stop sequences")
def stop_sequences() -> None:
    answer = ask(say("One. Two. Three."), stop_sequences=["Two"])
    expect(answer.content[0].text, "One. ")
    expect((answer.stop_reason, answer.stop_sequence), ("stop_sequence", "Two"))


@features.feature("max tokens")
def max_tokens() -> None:
    expect(ask(say("One two three four."), max_tokens=2).stop_reason, "max_tokens")


@features.feature("count tokens")
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=user(say("Counted.")))
    usage = ask(say("Counted.")).usage
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    expect(counted.input_tokens, total)


@features.feature("cached tokens")
def cache_usage() -> None:
    block = {"type": "text", "text": PREFIX, "cache_control": {"type": "ephemeral"}}
    first = ask(say("Noted."), system=[block]).usage
    again = ask(say("Noted."), system=[block]).usage
    totals = [
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        for usage in (first, again)
    ]
    expect(totals[1], totals[0], "input tokens in all")
    assert again.cache_read_input_tokens > 200, again


def talk() -> list[Any]:
    """Two turns, the second with a tool's result."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": PREFIX}
    return [
        *user("My cat is Tom."),
        {"role": "assistant", "content": [use]},
        *user([result]),
        {"role": "assistant", "content": "Noted."},
    ]


def managed(edit: dict[str, Any], messages: list[Any], **options: Any) -> Any:
    """One message with an edit of its context."""
    return client.beta.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=messages,
        context_management={"edits": [edit]},
        betas=["context-management-2025-06-27", "compact-2026-01-12"],
        tools=[TOOL],
        **options,
    )


COMPACT: Any = {
    "type": "compact_20260112",
    "trigger": {"type": "input_tokens", "value": 400},
    "instructions": "[[Tom is a cat.]]",
}


@features.feature("clear tool uses")
def clear_tool_uses() -> None:
    trigger = {"type": "input_tokens", "value": 200}
    edit: Any = {"type": "clear_tool_uses_20250919", "trigger": trigger}
    edit |= {"keep": {"type": "tool_uses", "value": 0}}
    asked = [*talk(), *user(say("Cleared."))]
    answer = managed(edit, asked)
    expect(answer.content[0].text, "Cleared.")
    (applied,) = answer.context_management.applied_edits
    expect((applied.type, applied.cleared_tool_uses), (edit["type"], 1))
    assert applied.cleared_input_tokens > 200, applied
    counted = client.beta.messages.count_tokens(
        model=MODEL, messages=asked, tools=[TOOL], context_management={"edits": [edit]}
    )
    original = counted.context_management.original_input_tokens
    expect(original - counted.input_tokens, applied.cleared_input_tokens, "cleared tokens")
    options: Any = {"model": MODEL, "max_tokens": 200, "messages": asked, "tools": [TOOL]}
    with client.beta.messages.stream(**options, context_management={"edits": [edit]}) as events:
        streamed = events.get_final_message()
    expect(streamed.context_management, answer.context_management, "edits of a stream")


@features.feature("clear thinking")
def clear_thinking() -> None:
    def said(text: str) -> dict[str, Any]:
        thought = {"type": "thinking", "thinking": f"Hm, {text}.", "signature": "unsigned"}
        return {"role": "assistant", "content": [thought, {"type": "text", "text": text}]}

    asked = [*user("One?"), said("one"), *user("Two?"), said("two"), *user(say("Three."))]
    answer = managed({"type": "clear_thinking_20251015"}, asked)
    (applied,) = answer.context_management.applied_edits
    expect((applied.type, applied.cleared_thinking_turns), ("clear_thinking_20251015", 1))
    kept = managed({"type": "clear_thinking_20251015", "keep": "all"}, asked)
    expect(kept.context_management.applied_edits, [])


@features.feature("compaction")
def compaction() -> None:
    asked = [*talk(), *user(say("Go on."))]
    answer = managed(COMPACT, asked)
    expect([block.type for block in answer.content], ["compaction", "text"])
    expect((answer.content[0].content, answer.content[1].text), ("Tom is a cat.", "Go on."))
    expect([each.type for each in answer.usage.iterations], ["compaction", "message"])
    assert answer.usage.iterations[0].input_tokens > answer.usage.input_tokens, answer.usage
    later = [*asked, {"role": "assistant", "content": answer.content}, *user(say("And on."))]
    again = managed(COMPACT, later)
    expect([(block.type, block.text) for block in again.content], [("text", "And on.")])
    paused = managed(COMPACT | {"pause_after_compaction": True}, asked)
    expect([block.type for block in paused.content], ["compaction"])
    expect(paused.stop_reason, "compaction")


@features.feature("streamed compaction")
def streamed_compaction() -> None:
    options: Any = {
        "model": MODEL,
        "max_tokens": 200,
        "messages": [*talk(), *user(say("Go on."))],
        "context_management": {"edits": [COMPACT]},
        "tools": [TOOL],
    }
    with client.beta.messages.stream(**options) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert kinds.index("compaction") < kinds.index("text"), kinds
    block, text = final.content
    expect((block.content, text.text), ("Tom is a cat.", "Go on."))
    assert block.encrypted_content, block
    expect(final.context_management.applied_edits[0].type, "compact_20260112")
    with client.beta.messages.stream(**options) as left:
        expect(next(iter(left)).type, "message_start")
    expect(ask(say("Still here.")).content[0].text, "Still here.")


@features.feature("summarize")
def summarize() -> None:
    options: Any = {"model": MODEL, "max_tokens": 200, "messages": talk()}
    config: Any = {"type": "summarize", "instructions": "[[Tom is a cat.]]"}
    answer = client.beta.messages.create(**options, compaction=config)
    (block,) = answer.content
    expect((block.type, block.content), ("compaction", "Tom is a cat."))
    expect(answer.stop_reason, "compaction")
    with client.beta.messages.stream(**options, compaction=config) as events:
        streamed = events.get_final_message().content[0]
    for each in (block, streamed):
        begun: Any = [{"role": "assistant", "content": [each]}, *user(say("Go on."))]
        after = client.beta.messages.create(**options | {"messages": begun})
        expect(after.content[0].text, "Go on.")


@beta_tool
def look(place: str) -> str:
    """Look at a place.

    Args:
        place: the place to look at.
    """
    return say(f"{place} is quiet.")


@features.feature("compaction by the tool runner")
def tool_runner() -> None:
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, tools=[look], messages=user(say(call("look", place="Rome")))
    )
    seen = []
    for message in runner:
        seen.append(message.stop_reason)
        if len(seen) == 1:
            runner.compact_before_next_turn({"type": "summarize", "instructions": say("Rome.")})
    expect(seen[:2], ["tool_use", "compaction"])


@features.feature("altered compaction")
def altered_compaction() -> None:
    block = managed(COMPACT, [*talk(), *user("Hi")]).content[0].to_dict()
    for field, code in (
        ("content", "content_mismatch"),
        ("encrypted_content", "signature_invalid"),
    ):
        said = {"role": "assistant", "content": [block | {field: f"{block[field]}A"}]}
        error = refused(
            anthropic.BadRequestError, lambda said=said: managed(COMPACT, [said, *user("Hi")])
        )
        expect(error.body["error"]["details"]["error_code"], f"compaction_{code}")
        expect(f"messages[0].content[0].{field} " in str(error), True, str(error))
    wrong: Any = {"type": "clear_everything"}
    error = refused(anthropic.BadRequestError, lambda: managed(wrong, user("Hi")))
    expect("context_management.edits[0].type" in str(error), True, str(error))


@features.feature("cache lifetimes")
def cache_lifetimes() -> None:
    def system(*ttls: str) -> list[Any]:
        return [
            {"type": "text", "text": f"{PREFIX} {ttl}", "cache_control": control(ttl)}
            for ttl in ttls
        ]

    def control(ttl: str) -> Any:
        return {"type": "ephemeral", "ttl": ttl}

    salt = {"cache_salt": "lifetimes"}
    with client.messages.stream(
        model=MODEL,
        max_tokens=50,
        system=system("1h", "5m"),
        messages=user(say("Noted.")),
        extra_body=salt,
    ) as events:
        first = events.get_final_message()
    written = first.usage.cache_creation
    assert min(written.ephemeral_1h_input_tokens, written.ephemeral_5m_input_tokens) > 200, written
    total = written.ephemeral_1h_input_tokens + written.ephemeral_5m_input_tokens
    expect(first.usage.cache_creation_input_tokens, total)
    asked = {"diagnostics": {"previous_message_id": first.id}, **salt}
    again: Any = ask(say("Noted."), system=system("1h", "5m"), extra_body=asked)
    expect((again.diagnostics, again.usage.cache_creation_input_tokens), (None, 0))
    other: Any = ask(say("Noted."), system=system("5m", "1h"), extra_body=asked)
    reason = dict(other.diagnostics)["cache_miss_reason"]
    expect(dict(reason)["type"], "system_changed")
    error = refused(
        anthropic.BadRequestError, lambda: ask("Hi", system=system("2h"), extra_body=salt)
    )
    expect("system[0].cache_control.ttl" in str(error), True, str(error))


@features.feature("sessions")
def sessions() -> None:
    def end(name: str) -> Any:
        return client.delete(f"/v1/sessions/{name}", cast_to=dict[str, object])["deleted"]

    def num_sessions() -> Any:
        return client.get("/cache", cast_to=dict[str, object])["num_sessions"]

    def turn(name: str, **headers: str) -> Any:
        return client.messages.create(
            model=MODEL,
            max_tokens=50,
            messages=user(PREFIX + say("One two three.")),
            stream=True,
            extra_headers={"x-session-id": name, **headers},
        )

    list(turn("anthropic run"))
    expect([end("anthropic run"), end("anthropic run")], [True, False], "ended")
    list(turn("anthropic last", **{"x-session-close": "true"}))
    expect(end("anthropic last"), False, "ended by its last request")
    before = num_sessions()
    stream = turn("anthropic left")
    next(iter(stream))
    stream.close()  # the client leaves
    while num_sessions() == before:  # until the turn has ended
        time.sleep(0.05)
    expect(end("anthropic left"), True, "the turn that was left")
    error = refused(anthropic.BadRequestError, lambda: turn("x", **{"x-session-close": "so"}))
    expect("x-session-close" in str(error), True, str(error))


@features.feature("images")
def images() -> None:
    def look(png: str, text: str) -> tuple[str, int, int]:
        source: Any = {"type": "base64", "media_type": "image/png", "data": png}
        parts = [{"type": "image", "source": source}, {"type": "text", "text": text}]
        answer: Any = client.with_options(base_url=SEEING_URL).messages.create(
            model=SEEING, messages=user(parts), max_tokens=8, extra_body={"temperature": 0}
        )
        usage = answer.usage
        words = "".join(block.text for block in answer.content)  # a random model may say nothing
        return words, usage.image_tokens, usage.cache_read_input_tokens

    check_sight(look, 20)  # in tiles: there is no detail


@features.feature("thinking")
def thinking() -> None:
    answer = ask(say("<think>Hm, let me see.</think>Yes."))
    expect([block.type for block in answer.content], ["thinking", "text"])
    expect(answer.content[0].thinking.strip(), "Hm, let me see.")
    said = {"role": "assistant", "content": answer.content}
    again = client.messages.create(
        model=MODEL, max_tokens=50, messages=[*user("So?"), said, *user(say("Sure."))]
    )
    expect(again.content[0].text, "Sure.")


@features.feature("structured output")
def structured_output() -> None:
    output: Any = {"format": {"type": "json_schema", "schema": WEATHER}}
    answer = ask(say('{"city":"Paris"}'), output_config=output)
    expect(json.loads(answer.content[0].text), {"city": "Paris"})


@features.feature("as coding agents ask")
def as_agents_ask() -> None:
    ephemeral: Any = {"type": "ephemeral"}
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f2e;"},
        {"type": "text", "text": PREFIX, "cache_control": ephemeral},
    ]
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    with client.beta.messages.stream(
        model=MODEL,
        max_tokens=300,
        system=system,
        messages=user([{"type": "text", "text": say(PARIS), "cache_control": ephemeral}]),
        tools=[{**TOOL, "cache_control": ephemeral}, hosted],
        metadata={"user_id": "someone"},
        thinking={"type": "disabled"},
        betas=["prompt-caching-scope-2026-01-05"],
    ) as events:
        final = events.get_final_message()
    expect((used(final).input, final.stop_reason), ({"city": "Paris"}, "tool_use"))


@features.feature("errors")
def errors() -> None:
    error = refused(
        anthropic.AuthenticationError,
        lambda: client.with_options(api_key="wrong").messages.count_tokens(
            model=MODEL, messages=user("Hi")
        ),
    )
    expect(error.body["error"]["type"], "authentication_error")
    error = refused(
        anthropic.NotFoundError,
        lambda: client.messages.create(model="no-such", max_tokens=1, messages=user("Hi")),
    )
    expect(error.body["error"]["type"], "not_found_error")
    error = refused(anthropic.BadRequestError, lambda: ask(LONG))
    expect("prompt is too long" in str(error), True, str(error))
    expect("tokens too long. Compaction" in str(error), True, str(error))
    error = refused(anthropic.BadRequestError, lambda: ask("Hi", extra_body={"temperature": "hot"}))
    expect(error.body["error"]["type"], "invalid_request_error")


@features.feature("models")
def models() -> None:
    expect([model.id for model in client.models.list()], [MODEL])
    expect([model.id for model in client.models.list(limit=1)], [MODEL])
    found = client.models.retrieve(MODEL)
    expect((found.id, found.type, found.display_name), (MODEL, "model", MODEL))
    error = refused(anthropic.NotFoundError, lambda: client.models.retrieve("no-such"))
    expect(error.body["error"]["type"], "not_found_error")
    expect(error.body["request_id"], error.request_id)


if __name__ == "__main__":
    features.run()
