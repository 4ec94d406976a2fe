"""The memory of answers: bounded, by owner, flushed by salt."""

from __future__ import annotations

from foretoken.api.runtime.conversation.token_history import (
    OVERHEAD,
    PrefixDigest,
    TokenHistory,
    message_digest,
)

ME, YOU = b"me", b"you"


def fill(history: TokenHistory, owner: bytes, count: int, num_ids: int = 100) -> None:
    for index in range(count):
        history.put(owner, "salt", b"%d" % index, b"prefix", range(num_ids))


def test_a_flood_stays_within_its_bytes_and_leaves_others_their_share():
    history = TokenHistory(max_bytes=20 * (OVERHEAD + 400))
    fill(history, ME, 4)
    fill(history, YOU, 10_000)
    assert history.num_bytes <= 20 * (OVERHEAD + 400)
    assert all(history.ids_by_prefix(ME, b"%d" % index) for index in range(4))
    assert not history.ids_by_prefix(YOU, b"0")
    assert history.ids_by_prefix(YOU, b"9999")


def test_an_answer_beyond_the_bytes_is_not_kept():
    history = TokenHistory(max_bytes=OVERHEAD + 10)
    fill(history, ME, 1)
    assert (history.num_bytes, history.has_any(ME)) == (0, False)


def test_an_answer_that_was_used_stays_longer():
    history = TokenHistory(max_bytes=2 * (OVERHEAD + 400))
    fill(history, ME, 2)
    history.touch((ME, b"0", b"prefix"))
    history.touch((ME, b"none", b"prefix"))
    history.put(ME, "salt", b"new", b"prefix", range(100))
    assert history.ids_by_prefix(ME, b"0")
    assert not history.ids_by_prefix(ME, b"1")


def test_the_same_answer_in_the_same_place_is_kept_once():
    history = TokenHistory()
    fill(history, ME, 1)
    fill(history, ME, 1)
    assert history.num_bytes == OVERHEAD + 400


def test_a_flush_forgets_the_answers_of_a_salt():
    history = TokenHistory()
    for owner, salt in ((ME, "a"), (YOU, "b"), (b"nobody", None)):
        history.put(owner, salt, b"digest", b"prefix", [1])
    history.flush("a")
    assert [history.has_any(each) for each in (ME, YOU, b"nobody")] == [False, True, True]
    history.flush(None)
    assert [history.has_any(each) for each in (YOU, b"nobody")] == [True, False]
    history.flush()
    assert (history.has_any(YOU), history.num_bytes) == (False, 0)


def test_a_prefix_digest_covers_all_ids_before_it():
    prefix = PrefixDigest([1, 2])
    prefix.add([3])
    assert (
        prefix.after([4])
        == PrefixDigest([1, 2, 3, 4]).after([])
        == PrefixDigest().after([1, 2, 3, 4])
    )
    assert prefix.after([4]) != prefix.after([5])


def test_what_a_message_says_is_its_content_thoughts_and_calls():
    call = {"id": "x", "function": {"name": "f", "arguments": {"a": 1, "b": 2}}}
    same = {"id": "y", "function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}}
    assert message_digest({"content": None}) == message_digest({"content": "", "tool_calls": []})
    assert message_digest({"tool_calls": [call]}) == message_digest(
        {"content": "\n", "tool_calls": [same]}
    )
    texts = [
        {"content": "a"},
        {"content": "a "},
        {"content": "a", "reasoning_content": "b"},
        {"content": "a", "tool_calls": [call]},
        {"content": "a", "tool_calls": [call, call]},
        {"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    ]
    assert len({message_digest(each) for each in texts}) == len(texts)
    assert message_digest({"content": [{"type": "text", "text": "a"}]}) is None
