"""From what data holds to what is learnt: answers are the target's own words, where they can be."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from ....core.errors import InvalidRequest
from .answers import AnswerBook, Asking, answer_prompts
from .conversations import Conversation
from .making import Target
from .records import Record

Regenerate: TypeAlias = Literal["auto", "on", "off"]
BOOK = "answers.jsonl"
TEXT_PROMPT = 64  # tokens of a text that stand for a prompt, if texts are answered, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """How answers come about.

    ``regenerate``: auto answers chats anew, and leaves recorded traffic and texts as they are; on
    answers all; off takes the answers that are there. ``minutes``: after so long what has no answer
    yet is left out.
    """

    regenerate: Regenerate = "auto"
    minutes: float | None = None
    asking: Asking = field(default_factory=Asking)


def gather(
    found: Sequence[Conversation], target: Target, folder: Path, how: Gathering
) -> list[Conversation]:
    """Conversations with answers to learn from.

    Answers lie in ``folder``/training: a run that is started again does not ask again. Raises
    `InvalidRequest` if prompts without answers are all there is and none may be asked, and for
    token ids that the target does not have.
    """
    vocab_size = target.config.vocab_size
    if any(max(talk.tokens, default=0) >= vocab_size for talk in found):
        message = f"data holds token ids of another model: the target has {vocab_size} tokens"
        raise InvalidRequest(message, param="data")
    asked = [_prompt(talk) for talk in found if _is_asked(talk, how.regenerate)]
    kept = [talk for talk in found if not _is_asked(talk, how.regenerate)]
    if asked:
        kept += _ask(asked, target, folder, how)
    kept = [talk for talk in kept if len(talk) > max(talk.prompt_len, 1)]
    if not kept:
        message = "data holds prompts alone, and regenerate is off"
        raise InvalidRequest(message, param="regenerate")
    return kept


def _is_asked(talk: Conversation, regenerate: Regenerate) -> bool:
    if regenerate == "on":
        return True
    return regenerate == "auto" and talk.origin == "chat"


def _prompt(talk: Conversation) -> Conversation:
    """The part that is asked: of a text, its beginning."""
    count = talk.prompt_len or min(TEXT_PROMPT, len(talk))
    return replace(talk, tokens=talk.tokens[:count], prompt_len=count)


def _ask(
    asked: Sequence[Conversation], target: Target, folder: Path, how: Gathering
) -> list[Conversation]:
    work = folder / "training"
    work.mkdir(parents=True, exist_ok=True)
    book = AnswerBook(work / BOOK)
    prompts = [talk.tokens for talk in asked]
    limit = None if how.minutes is None else time.monotonic() + 60 * how.minutes
    with _bar(len(prompts), len(book)) as show:

        def goes_on(record: Record) -> bool:
            show(record)
            return limit is None or time.monotonic() < limit

        answer_prompts(target.decoder, prompts, book, how.asking, goes_on)
    records = (book.find(prompt, t) for prompt, t in how.asking.pairs(prompts))
    return [
        Conversation.of(record, talk.origin)
        for record, talk in zip(records, asked, strict=True)
        if record is not None
    ]


@contextmanager
def _bar(total: int, done: int) -> Iterator[Callable[[Record], None]]:
    """On a terminal a progress bar."""
    if not sys.stderr.isatty():
        yield lambda record: None  # noqa: ARG005 - nothing to show it on
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, initial=min(done, total), unit="answer", desc="answering") as bar:
        began, count = time.monotonic(), 0

        def show(record: Record) -> None:
            nonlocal count
            count += record.num_answer_tokens
            bar.update()
            bar.set_postfix_str(f"{count / max(time.monotonic() - began, 1e-9):.0f} tokens/s")

        yield show
