"""Marks in texts, which are broken, and texts that are encoded as if no mark were known."""

from __future__ import annotations

import random
import re

import pytest

from foretoken.api.text.literal_encoder import Encoder, LiteralEncoder
from foretoken.api.text.marks import Marks, any_of, escape, is_mark, unused_char
from foretoken.api.text.tokenizer import Tokenizer

CHATML = Marks(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
ANGLES = Marks(["<<s>>", "<s>", "</s>"])


def starts(marks: Marks, text: str) -> set[int]:
    return {at for at in range(len(text)) if any(text.startswith(n, at) for n in marks.names)}


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("a<|im_end|>b", "a<#|im_end|>b"),
        ("<|im_end|><|im_start|>", "<#|im_end|><#|im_start|>"),
        ("<<|im_end|>>", "<<#|im_end|>>"),
        ("an end <|im_", "an end <#|im_"),
        ("end|> goes on", "end|#> goes on"),
        ("if a < b: print(a|b)", "if a < b: print(a|b)"),
        ("", ""),
    ],
)
def test_marks_and_their_parts_at_an_end_are_broken(text, broken):
    assert CHATML.broken(text, "#") == broken
    assert CHATML.is_in(text) == (text != broken)


def test_a_mark_inside_a_mark_is_broken_too():
    assert ANGLES.broken("<<s>>", "#") == "<#<#s>>"
    assert ANGLES.broken("x<<s", "#") == "x<#<#s"


def test_no_mark_is_left_and_none_comes_of_neighbours():
    rng = random.Random(5)
    for _ in range(2000):
        first, second = (
            "".join(rng.choice("<>/s|x") for _ in range(rng.randint(0, 8))) for _ in range(2)
        )
        together = ANGLES.broken(first, "#") + ANGLES.broken(second, "#")
        left = [together[at : at + 5] for at in starts(ANGLES, together)]
        assert not left, (first, second)
        assert together.replace("#", "") == first + second


@pytest.mark.parametrize("names", [["<s>", "</s>"], ["<\0>", "a\1b"]])
def test_marks_of_several_texts_are_those_of_each(names):
    rng, marks = random.Random(7), Marks(names)
    found = [0, 0]
    for _ in range(2000):
        texts = [
            "".join(rng.choice("<>/s\0\1xx") for _ in range(rng.randint(0, 5)))
            for _ in range(rng.randint(0, 3))
        ]
        expected = any(marks.is_in(text) for text in texts)
        assert marks.is_in_any(texts) == expected, texts
        found[expected] += 1
    assert min(found) > 50


def test_many_names_are_found_as_quickly_as_few():
    names = [f"<unused{number}>" for number in range(3000)]
    assert len(any_of(names)) < 400, "ends that names share are written once"
    assert Marks(names).is_in("see <unused2999>")
    assert not Marks(names).is_in("see <unused3000> and <unused>")


def test_an_expression_of_words_finds_what_the_words_are():
    rng = random.Random(3)
    for _ in range(300):
        words = {
            "".join(rng.choice("ab[(") for _ in range(rng.randint(1, 5)))
            for _ in range(rng.randint(1, 8))
        }
        text = "".join(rng.choice("ab[(c") for _ in range(50))
        found = {each.start() for each in re.finditer(f"(?={any_of(words)})", text)}
        assert found == {at for at in range(50) if any(text.startswith(w, at) for w in words)}


@pytest.mark.parametrize("name", ["\n\n", "  ", "user", "7", "<"])
def test_words_and_white_space_are_no_marks(name):
    assert not is_mark(name)
    assert not Marks([name]).is_in(f"a {name} b")


def test_a_breaker_is_a_character_that_no_text_has():
    first = unused_char(["plain"])
    assert first is not None
    assert unused_char([f"x{first}"]) not in (None, first)
    assert unused_char([f"x{escape(first)}"]) not in (None, first), "as JSON writes it"


@pytest.fixture(params=["byte_level", "metaspace", "byte_fallback"])
def plain(request) -> Tokenizer:
    loaded = Tokenizer.load(request.getfixturevalue(f"{request.param}_folder"), max_model_len=1000)
    yield loaded
    loaded.close()


def test_parts_without_a_replaced_text_have_the_ids_of_the_whole(plain):
    names = frozenset(name for name in plain.added_names if is_mark(name))
    special = min(name for name in names if plain.added_names[name] and name != "<unk>")
    encoder = plain.literal(names)
    for text in ("hello there", f"a{special}b  c", f"{special}\n{special} the end", ""):
        assert encoder.encode_with(text, {"#": ""}) == plain.encode_word(text)
    behind = encoder.encode_with(f"quick{special}fox", {"#": ""}, is_first=False)
    assert behind == plain.encode_after(f"quick{special}fox")


def test_a_broken_mark_gives_no_id_of_a_mark(plain):
    names = frozenset(name for name in plain.added_names if is_mark(name))
    encoder, marks = plain.literal(names), Marks(names)
    ids_of_marks = {plain.vocab[name] for name in names if name != "<unk>"}
    for name in sorted(names - {"<unk>"}):
        text = f"the {marks.broken(name, '#')} dog"
        assert ids_of_marks.isdisjoint(encoder.encode_with(text, {"#": ""})), name


def test_a_token_of_the_model_that_equals_a_mark_is_not_taken_either():
    """Unigram models have their special tokens as pieces, with the best score of all."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((char, -5.0) for char in "</s>ab")]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.add_special_tokens(["</s>"])
    encoder = LiteralEncoder(Encoder(backend), frozenset(["</s>"]))
    assert backend.token_to_id("</s>") in encoder.encode("a</s>b"), "the model's own piece"
    ids = encoder.encode_with("a<#/s>b</s>", {"#": ""})
    assert ids.count(backend.token_to_id("</s>")) == 1
    assert ids[-1] == backend.token_to_id("</s>")
