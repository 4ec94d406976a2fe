"""Openings: the text that a chat template writes after a conversation to open an answer."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping

from ...core.errors import ForetokenError
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)
TALK = ({"role": "user", "content": "Hello."},)
OPTIONS: tuple[Mapping[str, object], ...] = (
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
)


async def find_openings(tokenizer: Tokenizer) -> tuple[array[int], ...]:
    """Return the token ids that open answers under the usual options, the longest first.

    The result is empty if the model has no template or its template rejects the conversation.
    """
    found = set()
    for options in OPTIONS:
        try:
            found.add(await _opening(tokenizer, options))
        except ForetokenError as error:
            logger.debug("the chat template shows no opening: %s", error)
    ordered = sorted(found - {()}, key=lambda ids: (-len(ids), ids))
    return tuple(array("q", ids) for ids in ordered)


async def _opening(tokenizer: Tokenizer, options: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ids that `add_generation_prompt` adds; empty if it changes earlier text."""
    closed, opened = [
        await tokenizer.render_chat(TALK, {**options, "add_generation_prompt": opens})
        for opens in (False, True)
    ]
    if not opened.startswith(closed):
        return ()
    return tuple(await tokenizer.encode(opened[len(closed) :], add_special_tokens=False))
