"""Colours of drafts: they are put around the text and change none of it."""

from __future__ import annotations

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from foretoken.api.cli.terminal.terminal import COLOURS, Painter, Palette
from foretoken.api.text.detokenizer import AnswerText
from foretoken.api.types.results import TextDelta

SOURCES = ["", "ngram", "model", "mtp"]


class Letters:
    """Each token is a text; two of them make one character, as byte tokens do."""

    def __init__(self, texts):
        self._texts = texts
        self._half = False

    def decode(self, token_id):
        if self._texts[token_id] != "half":
            return self._texts[token_id]
        self._half = not self._half
        return "" if self._half else "é"

    def finish(self):
        return "\ufffd" if self._half else ""


def answer_in_steps(texts, sources, stops, rng):
    """The deltas of an answer that is cut into steps anywhere."""
    answer = AnswerText(Letters(texts), stops=stops)
    ids, start, stopped = range(len(texts)), 0, None
    while start < len(ids) and not stopped:
        step = ids[start : start + rng.randint(1, 4)]
        taken = []
        for token_id in step:
            taken.append(token_id)
            if stopped := answer.add_token(token_id):
                break
        start += len(taken)
        last = bool(stopped) or start == len(ids)
        yield TextDelta(
            text=answer.take(final=last), token_ids=taken, sources=[sources[i] for i in taken]
        )


def painted(deltas, texts, *, coloured):
    painter = Painter(Palette(coloured=coloured), Letters(texts).decode)
    return "".join(map(painter.paint, deltas)), painter


token = st.sampled_from(["", "a", "b", "ab", "c\n", "ba", "half"])


@given(
    st.lists(st.tuples(token, st.sampled_from(SOURCES)), max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 99),
)
def test_without_its_escapes_a_painted_text_is_the_text(tokens, stops, seed):
    texts, sources = [text for text, _ in tokens], [source for _, source in tokens]
    deltas = list(answer_in_steps(texts, sources, stops, random.Random(seed)))
    plain = "".join(delta.text for delta in deltas)
    shown, painter = painted(deltas, texts, coloured=True)
    assert re.sub(r"\x1b\[\d+m", "", shown) == plain
    assert painted(deltas, texts, coloured=False)[0] == plain
    counted = map(int, re.findall(r": (\d+)", painter.legend()))
    assert sum(counted) == sum(len(delta.token_ids) for delta in deltas)


@given(st.lists(st.tuples(token, st.sampled_from(SOURCES)), max_size=20), st.integers(0, 99))
def test_each_character_has_the_colour_of_the_token_that_completes_it(tokens, seed):
    texts, sources = [text for text, _ in tokens], [source for _, source in tokens]
    deltas = list(answer_in_steps(texts, sources, ["abba"], random.Random(seed)))
    shown, painter = painted(deltas, texts, coloured=True)
    letters = Letters(texts)
    expected = [source for i, source in enumerate(sources) for _ in letters.decode(i)]
    colour_of = {str(COLOURS[painter._palette.name(s)]): s for s in SOURCES if s}
    pieces = re.findall(r"\x1b\[(\d+)m(.+?)\x1b\[0m|([^\x1b])", shown, flags=re.DOTALL)
    found = [colour_of[code] if code else "" for code, text, own in pieces for _ in text or own]
    length = min(len(expected), len(found))
    assert found[:length] == expected[:length]
    assert len(found) - length <= 1, "only the mark of an incomplete character is nobody's"


def test_text_that_is_held_back_keeps_the_colour_of_its_token():
    painter = Painter(Palette(coloured=True), ["he", "llo", "!"].__getitem__)
    first = TextDelta(text="h", token_ids=[0, 1], sources=["ngram", "model"])
    second = TextDelta(text="ello!", token_ids=[2], sources=[""])
    assert painter.paint(first) == "\x1b[32mh\x1b[0m"
    assert painter.paint(second) == "\x1b[32me\x1b[0m\x1b[36mllo\x1b[0m!"
    legend = "[tokens by source: ngram = green: 1, model = cyan: 1, the model itself = plain: 1]"
    assert painter.legend() == legend


def test_a_palette_keeps_its_colours_and_starts_again_when_it_runs_out():
    palette = Palette(coloured=True)
    names = [palette.name(str(index)) for index in range(len(COLOURS) + 1)]
    assert names == [*COLOURS, next(iter(COLOURS))]
    assert palette.name("2") == list(COLOURS)[2]
