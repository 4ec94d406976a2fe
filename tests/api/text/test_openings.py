"""Openings: the token ids that a chat template writes for the model to answer."""

from __future__ import annotations

import asyncio

from foretoken.api.build.model_files import BUILTIN
from foretoken.api.text.openings import find_openings
from foretoken.api.text.tokenizer import Tokenizer

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = PLAIN.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}",
)


def openings(template: str, *expected: str) -> bool:
    """Whether the openings of a template are the tokens of these texts."""
    tokenizer = Tokenizer.load(BUILTIN / "target", max_model_len=512)
    tokenizer.use_template(template, {})
    try:
        found = asyncio.run(find_openings(tokenizer))
        return [list(ids) for ids in found] == [tokenizer.encode_word(text) for text in expected]
    finally:
        tokenizer.close()


def test_an_opening_is_what_the_template_adds_to_a_conversation() -> None:
    assert openings(PLAIN, "<|im_start|>assistant\n")


def test_openings_with_and_without_thoughts_come_the_longest_first() -> None:
    opening = "<|im_start|>assistant\n"
    assert openings(THINKS, f"{opening}<think></think>", opening)


def test_a_template_that_adds_nothing_has_none() -> None:
    assert openings("{% for m in messages %}{{ m.content }}{% endfor %}")


def test_a_template_that_fails_has_none() -> None:
    assert openings("{{ raise_exception('no') }}")


def test_a_template_that_changes_what_stands_before_has_none() -> None:
    assert openings("{{ 'open' if add_generation_prompt else 'closed' }}")
