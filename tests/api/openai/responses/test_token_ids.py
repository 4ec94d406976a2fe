"""Responses that continue a stored one: its answer is in the prompt by its token ids."""

from __future__ import annotations

import pytest

from foretoken.api.dialects.openai.reading import read_handles
from foretoken.api.dialects.responses.answers import MessageItem, OutputText, ResponseBody
from foretoken.api.dialects.responses.bodies import AnswerItem, Item
from foretoken.api.dialects.responses.items import thread_of, to_messages
from foretoken.api.dialects.responses.store import ResponseStore

CALL = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.fixture
def say_oddly(engine, tokenizer):
    """Answer in one token for each character."""

    def tell(text):
        ids = [each for character in text for each in tokenizer.encode_word(character)]
        engine.answers = lambda request: [*ids, tokenizer.vocab["<|im_end|>"]]
        return ids

    return tell


def ask(client, text, **options):
    return client.responses.create(model="tiny/model", input=text, **options)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "tools"),
    [("hello world", []), ("<think>\nhm\n</think>\nhello", []), (f"hello {CALL}", [TOOL])],
)
def test_a_stored_answer_is_rendered_by_its_ids(
    connect, say_oddly, engine, text, tools, is_streamed
):
    client = connect(token_history=False, tool_parser="hermes", reasoning_parser="think")
    ids = say_oddly(text)
    if is_streamed:
        *_, last = ask(client, "hi", tools=tools, stream=True)
        first = last.response
    else:
        first = ask(client, "hi", tools=tools)
    request = engine.requests[-1]
    start = list(request.tokens[: request.prompt_len])
    then = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "1"}
        for item in first.output
        if item.type == "function_call"
    ]
    then.append({"role": "user", "content": "go"})
    second = ask(client, then, tools=tools, previous_response_id=first.id)
    assert list(engine.requests[-1].tokens[: len(start) + len(ids)]) == [*start, *ids]
    assert second.usage.input_tokens_details.spliced_tokens == len(ids)


def test_ids_count_in_the_store_and_come_back_with_the_first_item():
    def body(name):
        item = MessageItem(id=f"msg_{name}", status="completed", content=[OutputText(text="x")])
        return ResponseBody(id=name, output=[item])

    store = ResponseStore()
    store.put(b"me", body("a"), [])
    before = store.num_bytes
    store.put(b"me", body("b"), [], range(1000))
    assert store.num_bytes == 2 * before + 4000
    (item,) = store.history(b"me", "b")
    assert isinstance(item, AnswerItem)
    assert item.answer_ids == [*range(1000)]
    assert not isinstance(store.item(b"me", "msg_b"), AnswerItem)


def test_an_answer_of_two_messages_has_no_ids():
    first = AnswerItem(type="message", role="assistant", content="a", answer_ids=[1])
    second = Item(type="message", role="assistant", content="b")
    user = Item(type="message", role="user", content="c")
    assert not read_handles(to_messages(thread_of([], [first, second, user])))
    (handle,) = read_handles(to_messages(thread_of([], [first, user, second])))
    assert (handle.index, handle.token_ids, handle.is_given) == (0, [1], False)
