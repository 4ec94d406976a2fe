"""The recorded streams that drafts are measured on."""

from __future__ import annotations

import re
import zlib

import pytest

from support.recorded_streams import KINDS, MAX_TOKENS, streams


def by_word(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) for word in re.findall(r"\w+|\W", text)]


@pytest.mark.parametrize("kind", KINDS)
def test_streams_fit_the_context_and_depend_on_the_seed_alone(kind) -> None:
    made = streams(kind, 3, by_word)
    assert made == streams(kind, 3, by_word)
    assert made != streams(kind, 4, by_word)
    assert all(prompt and output for prompt, output in made)
    assert all(len(prompt) + len(output) <= MAX_TOKENS for prompt, output in made)


def test_all_streams_share_the_system_prompt() -> None:
    prompts = [prompt for kind in KINDS for prompt, _ in streams(kind, 0, by_word)]
    assert all(prompt[:100] == prompts[0][:100] for prompt in prompts)


def test_a_retry_is_the_same_stream_twice() -> None:
    made = streams("identical retry", 0, by_word)
    assert made[::2] == made[1::2]
    assert len({tuple(prompt) for prompt, _ in made}) == len(made) // 2


def test_an_agent_sees_the_file_that_it_wrote_last() -> None:
    (first, output), (second, _) = streams("agent edit", 0, by_word)[:2]
    assert second[: len(first)] == first
    assert second[len(first) :][: len(output)] == output


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown kind of stream 'x': agent edit"):
        streams("x", 0, by_word)
