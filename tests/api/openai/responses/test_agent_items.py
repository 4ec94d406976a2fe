"""Items and tools as agents send them: what is understood is used, the rest is left out."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from foretoken.api.dialects.openai.reading import plain_messages
from foretoken.api.dialects.responses.bodies import FlatTool, Item, ResponsesRequest
from foretoken.api.dialects.responses.items import read_items, thread_of, to_messages
from foretoken.api.dialects.responses.tools import flat_name, read_tools
from foretoken.api.runtime.conversation import left_out

USER = {"role": "user", "content": "hi"}
NO_FIELDS = {"type": "object", "properties": {}}
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": NO_FIELDS}
EXEC = {"type": "custom", "name": "exec", "description": "Runs a script."}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": NO_FIELDS}
FILES = {"type": "namespace", "name": "mcp__fs", "description": "Files.", "tools": [READ, EXEC]}


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(left_out, "_told", set())


def plain(*items: dict[str, Any]) -> list[dict[str, Any]]:
    given = msgspec.convert(list(items), list[Item])
    return plain_messages(to_messages(thread_of([], read_items(given, lambda item_id: None))))


def only(*items: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages behind the user's."""
    return plain(USER, *items)[1:]


def output(call_id: str, value: object, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": value}


def function(message: dict[str, Any]) -> dict[str, Any]:
    [call] = message["tool_calls"]
    return dict(call["function"])


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}},
        {"type": "file_search_call", "id": "fs_1", "queries": ["x"], "results": None},
        {"type": "image_generation_call", "id": "ig_1", "result": "iVBORw0KGgo="},
        {"type": "context_compaction", "id": "c_1"},
        {"type": "mcp_list_tools", "server_label": "a", "tools": []},
        {"type": "mcp_approval_request", "name": "a", "arguments": "{}"},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "1"}},
        {"type": "of_the_future", "content": {"not": "a list"}, "role": "critic", "input": [1]},
    ],
)
def test_an_item_without_meaning_for_the_model_is_left_out_and_named_once(item, caplog):
    assert plain(USER, item, item) == [USER]
    kind = item["type"]
    assert [each.message for each in caplog.records] == [
        f"items of type '{kind}' are not passed to the model (logged once)"
    ]


ODD_FIELDS = {"name": {"a": 1}, "status": 5, "tools": "x", "text": [1], "parameters": [1]}
LISTED = {"type": "mcp_list_tools", "server_label": "a", "tools": [{"name": "f", "annotations": 1}]}


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [USER, LISTED, USER]},
        {"input": [USER, {"type": "of_the_future", **ODD_FIELDS}, USER]},
        {"input": [USER, {"type": "of_the_future_call", "call_id": {}}, USER]},
        {"input": [USER, {"type": "of_the_future_call_output", "call_id": 7}, USER]},
        {"input": [{"role": "user", "content": [{"type": "of_the_future", **ODD_FIELDS}]}]},
        {"input": [{"role": "assistant", "content": [{"type": "of_the_future", **ODD_FIELDS}]}]},
        {"input": "hi", "tools": [{"type": "of_the_future", **ODD_FIELDS}]},
        {"input": "hi", "tools": [{**FILES, "tools": [READ, {"type": "odd", **ODD_FIELDS}]}]},
        {"input": [{"type": "additional_tools", "tools": [{"type": "odd", **ODD_FIELDS}]}, USER]},
    ],
)
def test_an_entry_of_an_unknown_kind_may_have_fields_of_any_form(server, say, fields):
    say("ok")
    body = {"model": "tiny/model", **fields}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=20)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "function_call", "name": 5}]}, "input[0].name"),
        ({"input": [{"role": "user", "status": 5, "content": "x"}]}, "input[0].status"),
        ({"input": [LISTED, {"type": 5}]}, "input[1].type"),
        ({"input": [USER], "tools": [{"type": "function", "name": 5}]}, "tools[0].name"),
    ],
)
def test_a_wrong_field_of_a_known_kind_is_named(server, fields, param):
    answer = httpx.post(f"{server.url}/v1/responses", json=fields, timeout=20)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_additional_tools_are_tools_and_no_message(caplog):
    item = {"type": "additional_tools", "role": "developer", "tools": [FILES]}
    assert plain(item, USER) == [USER]
    assert not caplog.records


def test_hidden_reasoning_says_nothing():
    hidden = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"}
    assert plain(USER, hidden, {"role": "assistant", "content": "a"}) == [
        USER,
        {"role": "assistant", "content": "a"},
    ]


def test_what_another_agent_says_is_a_message_with_its_name():
    parts = [
        {"type": "input_text", "text": "look"},
        {"type": "encrypted_content", "encrypted": "x"},
    ]
    item = {"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": parts}
    assert only(item) == [{"role": "user", "content": "Message of the agent /root/a:\nlook"}]


def test_the_call_of_a_function_in_a_namespace_has_the_name_that_the_model_knows():
    call = {"type": "function_call", "call_id": "c", "name": "read", "namespace": "mcp__fs"}
    assert function(only({**call, "arguments": "{}"})[0])["name"] == "mcp__fs__read"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}},
            {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}},
        ),
        (
            {"type": "shell_call", "action": {"commands": ["ls"]}},
            {"name": "shell", "arguments": {"commands": ["ls"]}},
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
            {"name": "apply_patch", "arguments": {"type": "delete_file", "path": "a"}},
        ),
        (
            {"type": "computer_call", "action": {"type": "click", "x": 1}},
            {"name": "computer", "arguments": {"type": "click", "x": 1}},
        ),
        (
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}},
            {"name": "tool_search", "arguments": {"query": "x"}},
        ),
        (
            {"type": "of_the_future_call", "arguments": '{"a": 1}'},
            {"name": "of_the_future", "arguments": {"a": 1}},
        ),
        (
            {"type": "custom_tool_call", "name": "exec", "input": "ls"},
            {"name": "exec", "arguments": {"input": "ls"}},
        ),
        ({"type": "function_call", "name": "f", "arguments": None}, {"name": "f", "arguments": {}}),
    ],
)
def test_calls_of_any_kind_are_calls(call, expected):
    first, second = only({**call, "call_id": "c"}, output("c", "done", f"{call['type']}_output"))
    assert function(first) == expected
    assert second == {"role": "tool", "tool_call_id": "c", "content": "done"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "text"),
        (None, ""),
        ([{"type": "input_text", "text": "a"}, {"type": "odd", "x": 1}], "a"),
        ([{"stdout": "a", "stderr": "", "outcome": {"exit_code": 0}}], None),
        ({"any": ["thing"]}, None),
        (7, "7"),
    ],
)
def test_results_of_any_form_are_text(value, expected):
    [message] = only(output("c", value))
    wanted = json.dumps(value, separators=(",", ":")) if expected is None else expected
    assert message == {"role": "tool", "tool_call_id": "c", "content": wanted}


def test_a_result_needs_neither_an_id_nor_a_call():
    assert only({"type": "function_call_output", "output": "x"}) == [
        {"role": "tool", "content": "x"}
    ]


def test_calls_that_a_provider_ran_stand_with_their_results():
    mcp = {"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "found"}
    code = {"type": "code_interpreter_call", "id": "i", "code": "1+1", "outputs": [{"logs": "2"}]}
    first, found, second, logs = only(mcp, code)
    assert function(first) == {"name": "f", "arguments": {}}
    assert found == {"role": "tool", "tool_call_id": "m", "content": "found"}
    assert function(second) == {"name": "code_interpreter", "arguments": {"code": "1+1"}}
    assert logs["content"] == '[{"logs":"2"}]'


def test_a_search_for_tools_results_in_their_definitions():
    found = {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": [FILES]}
    [message] = only(found)
    assert message["tool_call_id"] == "s"
    assert '{"name":"mcp__fs__read","description":"Reads.",' in message["content"]
    [nothing] = only({**found, "tools": []})
    assert nothing["content"] == "No tools were found."


# -- tools --------------------------------------------------------------------------------------


def served(tools: list[dict[str, Any]], *items: dict[str, Any]) -> list[tuple[str, str, bool]]:
    body = ResponsesRequest(tools=msgspec.convert(tools, list[FlatTool]))
    found = read_tools(body, msgspec.convert(list(items), list[Item]))
    return [(each.tool.name, each.kind, each.tool.is_loaded) for each in found]


def test_functions_custom_tools_and_searches_are_served_wherever_they_stand():
    tools = [READ, FILES, SEARCH, {"type": "web_search"}, {"type": "tool_search"}, {"type": "new"}]
    assert served(tools) == [
        ("read", "function", False),
        ("mcp__fs__read", "function", False),
        ("mcp__fs__exec", "custom", False),
        ("tool_search", "tool_search", False),
    ]
    more = {"type": "additional_tools", "role": "developer", "tools": [FILES]}
    loaded = {"type": "tool_search_output", "call_id": "s", "tools": [READ]}
    assert served([], more, loaded) == [
        ("mcp__fs__read", "function", False),
        ("mcp__fs__exec", "custom", False),
        ("read", "function", True),
    ]


def test_a_tool_that_comes_again_takes_the_place_of_the_first():
    again = {"type": "additional_tools", "tools": [READ]}
    assert served([READ], again, again) == [("read", "function", False)]


@pytest.mark.parametrize(
    ("name", "namespace", "expected"),
    [
        ("read", None, "read"),
        ("read", "mcp__fs", "mcp__fs__read"),
        ("read", "mcp__fs__", "mcp__fs__read"),
        ("exec", "functions", "functions__exec"),
    ],
)
def test_names_in_namespaces(name, namespace, expected):
    assert flat_name(name, namespace) == expected


def test_odd_and_long_names_become_names_that_differ():
    names = {
        flat_name("read", "my server"),
        flat_name("read", "my.server"),
        flat_name("r" * 200, "a"),
    }
    assert len(names) == 3
    assert all(len(each) <= 128 and each.replace("_", "").isalnum() for each in names)


IN_FILES = {"namespace": "mcp__fs"}
CALLED: dict[str, tuple[str, dict[str, Any]]] = {
    "mcp__fs__read": (
        '{"a": 1}',
        {"type": "function_call", "name": "read", "arguments": '{"a": 1}', **IN_FILES},
    ),
    "mcp__fs__exec": (
        '{"input": "ls"}',
        {"type": "custom_tool_call", "name": "exec", "input": "ls", **IN_FILES},
    ),
    "tool_search": (
        '{"query": "x"}',
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}},
    ),
    "plain": ("{}", {"type": "function_call", "name": "plain", "arguments": "{}"}),
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_goes_back_in_the_form_of_its_tool(server, say, name, is_streamed):
    arguments, expected = CALLED[name]
    say(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
    tools = [{**READ, "name": "plain"}, SEARCH]
    items = [{"type": "additional_tools", "role": "developer", "tools": [FILES]}, USER]
    body = {"model": "tiny/model", "input": items, "tools": tools, "stream": is_streamed}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=20).raise_for_status()
    if not is_streamed:
        item = answer.json()["output"][0]
    else:
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(each) for each in data]
        item = events[-1]["response"]["output"][0]
        done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        assert done == [item]
        kinds = [each["type"] for each in events]
        assert ("response.custom_tool_call_input.done" in kinds) == (
            item["type"] == "custom_tool_call"
        )
    assert item.pop("status") == "completed"
    assert item.pop("id")
    assert item.pop("call_id").startswith("call_")
    assert item == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a" "b"}', 'a" "b'),
        ('{"other": "a"}', '{"other": "a"}'),
        ('{"input": [1]}', '{"input": [1]}'),
        ('{"input" = a, }', '{"input" = a, }'),
    ],
)
def test_a_custom_call_without_its_argument_has_the_text_of_all(server, say, arguments, expected):
    say(f'<tool_call>\n{{"name": "mcp__fs__exec", "arguments": {arguments}}}\n</tool_call>')
    body = {"model": "tiny/model", "input": "hi", "tools": [FILES]}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=20).raise_for_status()
    assert answer.json()["output"][0]["input"] == expected


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "read"},
        {"type": "function", "name": "read", "namespace": "mcp__fs"},
        {"type": "custom", "name": "exec"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "read"}],
        },
    ],
)
def test_a_choice_may_name_a_tool_of_a_namespace(server, say, engine, choice):
    say("ok")
    body = {"model": "tiny/model", "input": "hi", "tools": [FILES], "tool_choice": choice}
    httpx.post(f"{server.url}/v1/responses", json=body, timeout=20).raise_for_status()
    assert engine.requests[-1].sampling.params.grammar is not None


def test_a_stored_conversation_goes_on_with_its_tools_and_calls(server, say, engine, tokenizer):
    say('<tool_call>\n{"name": "mcp__fs__exec", "arguments": {"input": "ls"}}\n</tool_call>')
    tools = {"type": "additional_tools", "role": "developer", "tools": [FILES]}
    url, body = f"{server.url}/v1/responses", {"model": "tiny/model", "input": [tools, USER]}
    first = httpx.post(url, json=body, timeout=20).raise_for_status().json()
    [call] = first["output"]
    say("done")
    more = [{"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "a.txt"}]
    body = {"model": "tiny/model", "previous_response_id": first["id"], "input": more}
    httpx.post(url, json=body, timeout=20).raise_for_status()
    request = engine.requests[-1]
    text = tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)
    assert '{"name": "mcp__fs__exec", "arguments": {"input": "ls"}}' in text
    assert "a.txt" in text
