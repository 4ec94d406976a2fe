"""Detokenisers and stop strings: what is streamed adds up to the whole, however it is cut."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.api.text.detokenizer import (
    REPLACEMENT,
    AnswerText,
    ByteDetokenizer,
    StopStrings,
    WindowDetokenizer,
)
from foretoken.api.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def metaspace(metaspace_folder):
    return Tokenizer.load(metaspace_folder, max_model_len=256)


@pytest.fixture(scope="session")
def fallback(byte_fallback_folder):
    return Tokenizer.load(byte_fallback_folder, max_model_len=256)


def spell(detokenizer, ids):
    return "".join(map(detokenizer.decode, ids)) + detokenizer.finish()


def random_ids(seed, size):
    rng = random.Random(seed)
    top = rng.choice([size, min(size, 262)])  # sometimes bytes alone
    return [rng.randrange(top) for _ in range(rng.randrange(40))]


def spell_at_once(detokenizer, ids):
    return detokenizer.decode_all(ids) + detokenizer.finish()


def test_random_tokens_of_a_byte_level_vocabulary_spell_what_decode_says(tokenizer):
    assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)
    for seed in range(200):
        ids = random_ids(seed, len(tokenizer.vocab))
        assert spell(tokenizer.detokenizer(), ids) == tokenizer.decode(ids), seed
        assert spell_at_once(tokenizer.detokenizer(), ids) == tokenizer.decode(ids), seed


def test_random_tokens_of_a_metaspace_vocabulary_spell_what_decode_says(metaspace):
    assert isinstance(metaspace.detokenizer(), WindowDetokenizer)
    for seed in range(100):
        ids = random_ids(seed, len(metaspace.vocab))
        assert spell(metaspace.detokenizer(), ids) == metaspace.decode(ids), seed
        assert spell_at_once(metaspace.detokenizer(), ids) == metaspace.decode(ids), seed


def test_an_answer_keeps_the_space_between_it_and_its_prompt(metaspace):
    for seed in range(100):
        ids = random_ids(seed, len(metaspace.vocab))
        cut = len(ids) // 2
        whole, prompt = metaspace.decode(ids), metaspace.decode(ids[:cut])
        assert prompt + spell(metaspace.detokenizer(ids[:cut]), ids[cut:]) == whole, seed


@pytest.mark.parametrize("text", ["ab cd", "a 東京 b", "é", "😀😀 ab", " x", "naïve  ef"])
def test_byte_tokens_are_put_together_to_characters(fallback, text):
    ids = fallback.encode_word(text)
    pieces = [fallback.detokenizer().decode(token_id) for token_id in ids]
    assert any(not piece for piece in pieces) or text == "ab cd"
    assert spell(fallback.detokenizer(), ids) == text == fallback.decode(ids)


def test_invalid_bytes_neither_grow_nor_change_what_was_sent(fallback):
    detokenizer = fallback.detokenizer()
    byte = {value: token_id for token_id, value in fallback._byte_values.items()}
    ids = [byte[value] for value in "€".encode()] + [byte[0xFF]] * 50
    sent = [detokenizer.decode(token_id) for token_id in ids]
    assert "".join(sent) == "€" + REPLACEMENT * 50
    assert detokenizer.finish() == ""


def test_a_window_waits_for_the_rest_of_a_character_but_not_for_ever():
    detokenizer = WindowDetokenizer(
        lambda ids: bytes(ids).decode("utf-8", "replace"),
        context_ids=(),
        skipped=frozenset(),
        byte_values={},
    )
    assert [detokenizer.decode(value) for value in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert "".join(detokenizer.decode(0xFF) for _ in range(8)) == REPLACEMENT * 8
    assert detokenizer.decode(0xE2) + detokenizer.finish() == REPLACEMENT


def test_an_incomplete_character_is_held_back_and_shown_as_one_mark_at_the_end(tokenizer):
    detokenizer = tokenizer.detokenizer()
    by_bytes = {tokenizer.token_bytes(i): i for i in range(len(tokenizer.vocab))}
    first, second, *_ = "東".encode()
    assert detokenizer.decode(by_bytes[bytes([first])]) == ""
    assert detokenizer.decode(by_bytes[bytes([second])]) == ""
    assert detokenizer.finish() == REPLACEMENT


def test_special_tokens_are_not_text_and_ids_without_a_token_are_nothing(tokenizer):
    hello = tokenizer.encode_word("hello")
    ids = [tokenizer.vocab["<|im_start|>"], *hello, tokenizer.vocab["<|im_end|>"], 10**6]
    assert spell(tokenizer.detokenizer(), ids) == "hello"


def test_an_added_word_that_is_text_is_text(tokenizer):
    assert spell(tokenizer.detokenizer(), [tokenizer.vocab["<think> é"]]) == "<think> é"


# -- stop strings -----------------------------------------------------------------------------


def naive(text, stops):
    """The match that completes first, of those the longest, by looking at every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


few = st.text("ab", min_size=1, max_size=4)


@given(st.text("abc", max_size=30), st.lists(few, min_size=1, max_size=4), st.data())
def test_stop_strings_are_found_however_the_text_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    automaton, seen, found = StopStrings(stops), 0, None
    for start, stop in pairwise([0, *cuts, len(text)]):
        found = automaton.feed(text[start:stop])
        if found:
            seen += found[1]
            break
        seen = stop
        assert automaton.held == max(
            n for n in range(5) if any(s.startswith(text[seen - n : seen]) for s in stops)
            and n <= min(seen, max(map(len, stops)))
        )  # fmt: skip
    expected = naive(text, stops)
    assert (found and (found[0], seen)) == expected


class Letters:
    """Each token is a text."""

    def __init__(self, texts):
        self._texts = texts

    def decode(self, token_id):
        return self._texts[token_id]

    def finish(self):
        return "!"


def first_stop(texts, stops, min_tokens):
    """Text and stop string, by looking at every end that a token which counts brings."""
    whole = ""
    for num_tokens, text in enumerate(texts, 1):
        for end in range(len(whole) + 1, len(whole) + len(text) + 1):
            found = [stop for stop in stops if (whole + text)[:end].endswith(stop)]
            if found and num_tokens >= min_tokens:
                stop = max(found, key=len)
                return (whole + text)[: end - len(stop)], stop
        whole += text
    return whole + "!", None


@given(
    st.lists(st.text("abc", max_size=3), max_size=15),
    st.lists(few, max_size=3),
    st.integers(0, 10),
    st.randoms(use_true_random=False),
)
def test_what_is_taken_adds_up_to_the_whole_text_cut_at_the_stop(texts, stops, min_tokens, rng):
    answer = AnswerText(Letters(texts), stops=stops, min_tokens=min_tokens)
    taken, stopped = [], None
    for token_id in range(len(texts)):
        stopped = answer.add_token(token_id)
        if stopped:
            break
        if rng.random() < 0.6:
            taken.append(answer.take())
    expected = first_stop(texts, stops, min_tokens)
    assert ("".join(taken) + answer.take(final=True), stopped) == expected


def test_what_may_become_a_stop_string_is_held_back_and_then_shown():
    answer = AnswerText(Letters(["x</", "st", "ay"]), stops=["</stop>"])
    assert answer.add_token(0) is None
    assert answer.take() == "x"
    assert answer.add_token(1) is None
    assert answer.take() == ""
    assert answer.add_token(2) is None
    assert answer.take() == "</stay"


def test_the_longest_of_the_stop_strings_that_complete_together_wins():
    answer = AnswerText(Letters(["xab"]), stops=["b", "ab"])
    assert answer.add_token(0) == "ab"
    assert answer.take(final=True) == "x"


def test_stop_strings_do_not_count_before_min_tokens():
    answer = AnswerText(Letters(["a.", "b.", "c.", "d."]), stops=["."], min_tokens=3)
    assert [answer.add_token(i) for i in range(3)] == [None, None, "."]
    assert answer.take(final=True) == "a.b.c"


def test_a_stop_string_never_costs_more_than_constant_time_per_character():
    class Counting(dict):
        num_lookups = 0

        def get(self, key):
            self.num_lookups += 1
            return super().get(key)

    automaton = StopStrings(["a" * 255 + "b", *(f"{'a' * 100}{number}" for number in range(1000))])
    automaton._table._edges = edges = Counting(automaton._table._edges)
    for _ in range(1000):
        automaton.feed("aaaa")
    assert edges.num_lookups <= 2 * 4000
    assert automaton.held == 255
