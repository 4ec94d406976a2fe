"""Responses that are kept, and conversations that go on from them."""

from __future__ import annotations

import openai
import pytest

from foretoken.api.dialects.responses.answers import MessageItem, OutputText, ResponseBody
from foretoken.api.dialects.responses.bodies import Item, ItemPart
from foretoken.api.dialects.responses.store import ResponseStore
from foretoken.api.serving.errors import ApiError

USER = Item(
    type="message", id="msg_1", role="user", content=[ItemPart(type="input_text", text="hi")]
)


def ask(client, input="hi", **options):
    return client.responses.create(model="tiny/model", input=input, **options)


def body(response_id, previous_id=None, text="a"):
    item = MessageItem(id=f"msg_{response_id}", status="completed", content=[OutputText(text=text)])
    return ResponseBody(id=response_id, previous_response_id=previous_id, output=[item])


def test_a_conversation_goes_on_from_a_kept_answer(client, say, prompt_of):
    say("hello")
    first = ask(client, "who", instructions="be brief", store=True)
    assert first.store is True
    second = ask(client, "what", previous_response_id=first.id, store=True)
    assert second.previous_response_id == first.id
    turns = ["user\nwho", "assistant\nhello", "user\nwhat", "assistant\n"]
    expected = "<|im_end|>".join(f"<|im_start|>{turn}" for turn in turns)
    assert prompt_of() == expected, "the instructions were of the first turn alone"
    ask(client, "why", previous_response_id=second.id, instructions="shout")
    turns = ["system\nshout", *turns[:3], "assistant\nhello", "user\nwhy", "assistant\n"]
    assert prompt_of() == "<|im_end|>".join(f"<|im_start|>{turn}" for turn in turns)


def test_a_streamed_answer_is_kept_before_its_last_event(client, say, prompt_of):
    say("hello")
    for event in ask(client, stream=True, store=True):
        if event.type == "response.completed":
            assert ask(client, "more", previous_response_id=event.response.id).output
    assert "hello" in prompt_of()


@pytest.mark.parametrize("store", [True, None, openai.omit])
def test_an_answer_is_kept_without_being_asked(client, say, store):
    say("hello")
    answer = ask(client, store=store)
    assert answer.store is True
    assert ask(client, previous_response_id=answer.id).previous_response_id == answer.id


def test_nothing_is_kept_where_store_is_false(client, say):
    say("hello")
    answer = ask(client, store=False)
    assert answer.store is False
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_kept_answer_is_retrieved_as_it_was_and_deleted(client, say):
    say("hello")
    answer = ask(client, store=True)
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(answer.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)


def test_a_failed_answer_is_not_kept(client, engine):
    engine.row_error = "a row went bad"
    failed = list(ask(client, stream=True, store=True))[-1].response
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(failed.id)


@pytest.mark.parametrize("salt", [{"cache_salt": "a"}, {"nvext": {"cache_salt": "a"}}])
def test_nobody_reads_what_another_key_or_salt_has_kept(server, client, say, salt):
    say("hello")
    mine = ask(client, store=True)
    salted = ask(client, store=True, extra_body=salt)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0) as other:
        for response in (mine, salted):
            with pytest.raises(openai.NotFoundError):
                other.responses.retrieve(response.id)
            with pytest.raises(openai.BadRequestError):
                ask(other, previous_response_id=response.id)
            with pytest.raises(openai.BadRequestError):
                ask(other, [{"type": "item_reference", "id": response.output[0].id}])
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(salted.id)
    query = {"cache_salt": "a"}
    assert client.responses.retrieve(salted.id, extra_query=query).id == salted.id


def test_input_items_are_listed_page_by_page(client, say):
    say("hello")
    first = ask(client, "who", store=True)
    second = ask(client, "what", store=True, previous_response_id=first.id)
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in items] == ["who", "hello", "what"]
    assert all(item.id for item in items)
    page = client.responses.input_items.list(second.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["what", "hello"]
    assert page.has_more
    rest = client.responses.input_items.list(second.id, limit=2, after=page.last_id)
    assert [item.content[0].text for item in rest.data] == ["who"]
    assert not rest.has_more


PAGES = [
    ({"order": "up"}, "order"),
    ({"limit": 0}, "limit"),
    ({"limit": 101}, "limit"),
    ({"limit": "1" * 5000}, "limit"),
    ({"after": "msg_0"}, "after"),
]


def test_a_bad_page_is_400(client, say):
    say("hello")
    kept = ask(client, store=True)
    for query, param in PAGES:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_items.list(kept.id, extra_query=query)
        assert caught.value.param == param


def test_kept_items_can_be_named(client, say, prompt_of):
    say("hello")
    [message] = ask(client, store=True).output
    ask(client, [{"type": "item_reference", "id": message.id}, {"role": "user", "content": "x"}])
    assert "<|im_start|>assistant\nhello<|im_end|><|im_start|>user\nx" in prompt_of()


def test_the_store_is_bounded_in_count_and_forgets_what_was_used_least():
    store = ResponseStore(max_responses=2)
    store.put(b"me", body("a"), [USER])
    store.put(b"me", body("b"), [USER])
    assert store.history(b"me", "a")
    store.put(b"me", body("c"), [USER])
    assert [store.get(b"me", each) is None for each in "abc"] == [False, True, False]
    assert len(store) == 2


def test_the_store_is_bounded_in_bytes():
    store = ResponseStore(max_bytes=4000)
    for index in range(100):
        store.put(b"me", body(f"r{index}", text="x" * 500), [USER])
        assert store.num_bytes <= 4000
    assert store.get(b"me", "r99")
    store.put(b"me", body("big", text="x" * 5000), [USER])
    assert len(store) == 1, "the newest is kept by itself"
    store.delete(b"me", "big")
    assert store.num_bytes == 0
    assert store.item(b"me", "msg_big") is None


def test_using_an_answer_uses_those_before_it():
    store = ResponseStore(max_responses=3)
    store.put(b"me", body("a"), [USER])
    store.put(b"me", body("b", "a"), [USER])
    store.put(b"me", body("other"), [USER])
    assert len(store.history(b"me", "b")) == 4
    store.put(b"me", body("new"), [USER])
    assert store.get(b"me", "other") is None
    assert len(store.history(b"me", "b")) == 4


def test_a_conversation_whose_beginning_is_gone_cannot_go_on():
    store = ResponseStore()
    store.put(b"me", body("a"), [USER])
    store.put(b"me", body("b", "a"), [USER])
    store.delete(b"me", "a")
    with pytest.raises(ApiError, match="'a' not found"):
        store.history(b"me", "b")
    assert store.get(b"me", "b") is not None


def test_the_items_that_are_left_are_listed_when_a_turn_before_is_deleted(client, say):
    say("hello")
    first = ask(client, "who", store=True)
    second = ask(client, "what", store=True, previous_response_id=first.id)
    third = ask(client, "why", store=True, previous_response_id=second.id)
    client.responses.delete(first.id)
    items = client.responses.input_items.list(third.id, order="asc")
    assert [item.content[0].text for item in items] == ["what", "hello", "why"]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, previous_response_id=third.id)
    assert caught.value.param == "previous_response_id"


def test_items_that_came_with_one_id_are_told_apart_in_a_listing(client, say):
    say("hello")
    items = [{"type": "message", "id": "msg_x", "role": "user", "content": text} for text in "abc"]
    first = ask(client, items[:2], store=True)
    again = {"type": "item_reference", "id": first.output[0].id}
    second = ask(client, [again, items[2]], store=True, previous_response_id=first.id)
    listed: list[str] = []
    after = openai.omit
    for _ in range(10):
        page = client.responses.input_items.list(second.id, order="asc", limit=1, after=after)
        listed += [item.content[0].text for item in page.data]
        if not page.has_more:
            break
        after = page.last_id
    assert listed == ["a", "b", "hello", "hello", "c"]
    ids = [item.id for item in client.responses.input_items.list(second.id)]
    assert len(set(ids)) == 5
    assert "msg_x" in ids
    renamed = {"type": "item_reference", "id": ids[0]}
    assert ask(client, [renamed]).status == "completed"


def test_ids_of_items_count_as_bytes():
    store = ResponseStore()
    store.put(b"me", body("a"), [USER])
    few = store.num_bytes
    store.delete(b"me", "a")
    assert store.num_bytes == 0
    named = [
        Item(type="message", id=f"msg_{index}", role="user", content="") for index in range(99)
    ]
    store.put(b"me", body("a"), named)
    assert store.num_bytes > few + 99 * 100


def test_who_floods_the_store_drives_out_none_but_its_own():
    store = ResponseStore(max_responses=8)
    store.put(b"quiet", body("a"), [USER])
    store.put(b"quiet", body("b"), [USER])
    for index in range(50):
        store.put(b"loud", body(f"r{index}"), [USER])
    assert store.get(b"quiet", "a") is not None
    assert store.get(b"loud", "r49") is not None
    assert len(store) == 8


def test_what_is_not_used_for_a_while_is_dropped() -> None:
    now = [0.0]
    store = ResponseStore(max_seconds=10, clock=lambda: now[0])
    store.put(b"me", body("r1"), [USER])
    store.put(b"me", body("r2"), [USER])
    now[0] = 6.0
    store.history(b"me", "r1")
    now[0] = 11.0
    assert store.get(b"me", "r1") is not None
    assert store.get(b"me", "r2") is None
    assert store.item(b"me", "msg_r2") is None
    now[0] = 16.0
    with pytest.raises(ApiError):
        store.history(b"me", "r1")
    assert (len(store), store.num_bytes) == (0, 0)
