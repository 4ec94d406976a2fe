"""Gathers training conversations, whose answers the target generates if the options allow it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from ...core.errors import InvalidRequest
from .answers import AnswerOptions, AnswerStore, answer_prompts
from .conversations import Conversation
from .new_drafts import Target
from .records import Record
from .status_line import status_line

Regenerate: TypeAlias = Literal["auto", "on", "off"]
ANSWERS = "answers.jsonl"
TEXT_PROMPT = 64  # number of leading tokens of a text that serve as a prompt if it is answered


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherOptions:
    """Options for the answers to learn from.

    ``regenerate``: "auto" generates new answers to chats and keeps recorded traffic and texts; "on"
    generates all answers; "off" keeps all answers of the data. ``minutes``: time limit for
    generating answers. Prompts that are not answered within this time are left out.
    """

    regenerate: Regenerate = "auto"
    minutes: float | None = None
    answers: AnswerOptions = field(default_factory=AnswerOptions)


def gather(
    found: Sequence[Conversation], target: Target, folder: Path, options: GatherOptions
) -> list[Conversation]:
    """Return conversations with answers to learn from.

    Generated answers are stored in ``folder``/training, so a run that is started again does not
    generate them again. Raises `InvalidRequest` if no conversation has an answer, and for token ids
    beyond the target's vocabulary.
    """
    vocab_size = target.config.vocab_size
    if any(max(conversation.tokens, default=0) >= vocab_size for conversation in found):
        message = f"data contains token ids beyond the target's vocabulary of {vocab_size} tokens"
        raise InvalidRequest(message, param="data")
    asked = [_prompt(each) for each in found if _needs_answer(each, options.regenerate)]
    kept = [each for each in found if not _needs_answer(each, options.regenerate)]
    if asked:
        kept += _generate(asked, target, folder, options)
    kept = [each for each in kept if len(each) > max(each.prompt_len, 1)]
    if not kept:
        message = "data contains prompts without answers: set regenerate to auto or on"
        raise InvalidRequest(message, param="regenerate")
    return kept


def _needs_answer(conversation: Conversation, regenerate: Regenerate) -> bool:
    if regenerate == "on":
        return True
    return regenerate == "auto" and conversation.origin == "chat"


def _prompt(conversation: Conversation) -> Conversation:
    """Return the prompt of a conversation, or the first tokens of a text."""
    count = conversation.prompt_len or min(TEXT_PROMPT, len(conversation))
    return replace(conversation, tokens=conversation.tokens[:count], prompt_len=count)


def _generate(
    asked: Sequence[Conversation], target: Target, folder: Path, options: GatherOptions
) -> list[Conversation]:
    work = folder / "training"
    work.mkdir(parents=True, exist_ok=True)
    store = AnswerStore(work / ANSWERS)
    prompts = [conversation.tokens for conversation in asked]
    limit = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    with _showing(len(prompts), len(store)) as show:

        def goes_on(record: Record) -> bool:
            show(record)
            return limit is None or time.monotonic() < limit

        answer_prompts(target.decoder, prompts, store, options.answers, goes_on)
    records = (store.find(prompt, t) for prompt, t in options.answers.pairs(prompts))
    return [
        Conversation.of(record, conversation.origin)
        for record, conversation in zip(records, asked, strict=True)
        if record is not None
    ]


@contextmanager
def _showing(total: int, done: int) -> Iterator[Callable[[Record], None]]:
    """Show on a terminal how many of ``total`` prompts are answered.

    ``done``: number of prompts that have an answer at the start.
    """
    with status_line() as show:
        began, count = time.monotonic(), 0

        def note(record: Record) -> None:
            nonlocal count, done
            count += record.num_answer_tokens
            done += 1
            rate = count / max(time.monotonic() - began, 1e-9)
            show(f"{min(done, total)} of {total} answers, {rate:.0f} tokens/s")

        yield note
