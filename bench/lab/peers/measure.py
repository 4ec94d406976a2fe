"""One figure of one engine: which calls it takes, and what is made of their times."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .pictures import write_picture
from .rows import Row
from .wire import Answer, Call, Tokens

Ask = Callable[[Call], Answer]


class WrongAnswerError(Exception):
    """An answer that cannot be a result."""


@dataclass(slots=True)
class Prompts:
    """Prompts that no engine has seen yet; the same ones for every engine.

    ``text``: what to cut them from, at random places; without it they are random token ids.
    ``tasks``: whole prompts for a row of text, each of which is asked once.
    """

    row: Row
    vocab_size: int
    turn: int
    text: Sequence[int] = ()
    tasks: Sequence[Sequence[int]] = ()
    num_calls: int = 0
    pictures: Path = Path()  # a folder for them

    def picture(self) -> str:
        """The file of a picture of this row and turn alone."""
        name = f"{self.row.name}-{self.turn}"
        return str(write_picture(self.pictures / f"{name}.png", zlib.crc32(name.encode())))

    def next(self, batch: int | None = None) -> Tokens:
        """Make ``batch`` prompts (default: the row's batch); their beginning is shared."""
        self.num_calls += 1
        if self.row.task:
            return self._take_tasks(batch or self.row.batch)
        key = f"{self.row.setting.shape} {self.row.name} {self.turn} {self.num_calls}"
        rng = random.Random(zlib.crc32(key.encode()))
        shared = self._cut(rng, self.row.num_shared)
        own_len = self.row.prompt_len - self.row.num_shared
        return [shared + self._cut(rng, own_len) for _ in range(batch or self.row.batch)]

    def _take_tasks(self, batch: int) -> Tokens:
        """The turn's own ones; the last are for warming up."""
        each = self.row.num_calls * self.row.batch
        first = self.turn * each + (self.num_calls - 1) * batch
        last = len(self.tasks) - self.row.batch
        if self.turn < 0:
            first, last = last, len(self.tasks)
        if first + batch > last:
            raise WrongAnswerError("no prompt is left that was never asked")
        return [list(task) for task in self.tasks[first : first + batch]]

    def _cut(self, rng: random.Random, num_tokens: int) -> list[int]:
        if not self.text:
            return [rng.randrange(self.vocab_size) for _ in range(num_tokens)]
        start = rng.randrange(len(self.text) - num_tokens)
        return list(self.text[start : start + num_tokens])


WARM_PROMPT = 256  # tokens of a prompt that is long in a conversation


def measure(row: Row, ask: Ask, prompts: Prompts) -> float:
    """One figure of one engine, in the row's unit. Raises `WrongAnswerError`."""
    if row.kind == "decode":
        adapters = list(row.adapters)
        first = _timed(ask, Call(prompts.next(), 1, adapters=adapters))
        whole = _timed(ask, Call(prompts.next(), row.num_new, adapters=adapters))
        if whole <= first:
            raise WrongAnswerError(f"{row.num_new} tokens took no longer than one")
        return row.batch * (row.num_new - 1) / (whole - first)
    if row.kind == "text":
        calls = [Call(prompts.next(), row.num_new) for _ in range(row.num_calls)]
        whole = sum(_timed(ask, call) for call in calls)
        return row.num_calls * row.batch * row.num_new / whole
    if row.kind in ("image", "again"):
        return _behind_picture(row, ask, prompts)
    if row.kind in ("embed", "score"):
        task = Call(prompts.next(), row.num_new, row.num_shared, task=row.kind)
        seconds = _timed(ask, task)
        return row.batch * row.prompt_len / seconds if row.is_rate else seconds
    if row.kind == "turn":
        return _second_turn(row, ask, prompts)
    call = Call(prompts.next(), row.num_new, row.num_shared)
    seconds = _timed(ask, call)
    if row.kind == "warm":
        seconds = _timed(ask, call)
    return row.batch * row.prompt_len / seconds if row.kind == "prefill" else seconds


def _behind_picture(row: Row, ask: Ask, prompts: Prompts) -> float:
    """Seconds to the first token; again: to that of a second turn behind the first one's answer."""
    picture, (prompt,) = prompts.picture(), prompts.next()
    first = Call([prompt], row.num_new, image=picture)
    if row.kind == "image":
        return _timed(ask, first)
    answer = _asked(ask, first).tokens[0]
    (question,) = prompts.next()
    return _timed(ask, Call([prompt + answer + question], 1, image=picture))


def _second_turn(row: Row, ask: Ask, prompts: Prompts) -> float:
    """Half of the first answer is taken for thinking, which no template renders again."""
    (first,), num_thought = prompts.next(1), row.num_new // 2
    (said,) = _asked(ask, Call([first], row.num_new)).tokens
    (more,) = prompts.next(1)
    return _timed(ask, Call([first + said[num_thought:] + more[:num_thought]], 1))


def warm_up(row: Row, ask: Ask, prompts: Prompts) -> None:
    """The same in small: what is compiled or allocated on first use is not measured."""
    if row.kind in ("image", "again"):
        _behind_picture(row, ask, prompts)
        return
    batch = 2 if row.num_shared or row.kind == "embed" else row.batch
    made = prompts.next(batch)
    if row.kind == "turn":
        made = [prompt[:WARM_PROMPT] for prompt in made]
    call = Call(
        made,
        min(row.num_new, 4),
        row.num_shared,
        task=row.kind if row.kind in ("embed", "score") else "",
        adapters=list(row.adapters),
    )
    _timed(ask, call)


def _timed(ask: Ask, call: Call) -> float:
    return _asked(ask, call).seconds


def _asked(ask: Ask, call: Call) -> Answer:
    """Ask, and check the answer. Raises `WrongAnswerError`."""
    answer = ask(call)
    if answer.error:
        raise WrongAnswerError(answer.error)
    if call.task:
        if len(answer.numbers) != len(call.prompts):
            message = f"wanted {len(call.prompts)} results, got {len(answer.numbers)}"
            raise WrongAnswerError(message)
        return answer
    wrong = {len(tokens) for tokens in answer.tokens} - {call.num_new}
    if wrong or len(answer.tokens) != len(call.prompts):
        raise WrongAnswerError(f"wanted {call.num_new} tokens each, got {sorted(wrong) or 'fewer'}")
    return answer
