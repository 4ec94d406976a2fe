"""Recorded token streams to measure drafts on, made of the Python standard library's sources.

Nothing is downloaded and nothing is generated: the prompts are tasks for a coding agent, the
outputs what it would write. Each kind repeats itself in another way, one not at all.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from foretoken.api.build.model_files import BUILTIN

Stream = tuple[list[int], list[int]]
"""The token ids of a prompt and of its output."""
Tokenize = Callable[[str], list[int]]
Texts = Iterator[tuple[str, str]]

MAX_TOKENS = 4096  # of a prompt and its output: the context of the built-in pair
FILE_CHARS = 2600  # that one task works on
NUM_TASKS = 8
RULES = (
    "You are a coding agent in a repository of Python files. Read the file that you are given,"
    " then answer with nothing but the whole file as it should be. Keep to the style of the code"
    " that is there: names, quotes, the order of imports. Do not explain what you changed.\n"
    "Tools: read_file(path), write_file(path, text), run_tests(pattern), search(text).\n"
    "Rules:\n"
    "1. Never delete a test to make it pass.\n"
    "2. Every public function has a docstring of one line.\n"
    "3. Prefer the standard library to a new dependency.\n"
    "4. Ask when a task can be read in two ways.\n"
    "5. Leave a file that you were not asked to change as it is, its white space included.\n"
    "6. A test that fails for another reason than your change is reported, not repaired.\n\n"
)


def streams(kind: str, seed: int = 0, tokenize: Tokenize | None = None) -> list[Stream]:
    """Prompts and outputs in the order in which they are served; the same for the same seed.

    Outputs are cut where prompt and output reach `MAX_TOKENS`; prompts that leave no room for one
    are left out. Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of stream '{kind}': {', '.join(KINDS)}")
    tokenize = tokenize or builtin_tokenizer()
    made = []
    for prompt, output in KINDS[kind](random.Random(seed)):
        prompt_ids = tokenize(RULES + prompt)
        if len(prompt_ids) < MAX_TOKENS:
            made.append((prompt_ids, tokenize(output)[: MAX_TOKENS - len(prompt_ids)]))
    return made


def builtin_tokenizer() -> Tokenize:
    """The tokenizer of the pair that ships with foretoken, without its special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUILTIN / "target")

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    return tokenize


# -- the kinds ----------------------------------------------------------------------------------


def _agent_edit(rng: random.Random) -> Texts:
    """A file is written again with small changes, three times in one growing conversation."""
    for lines in _files(rng, NUM_TASKS):
        context, current = f"Fix this file:\n{_text(lines)}", lines
        for _ in range(3):
            current = _edited(current, rng, 0.08)
            yield context, _text(current)
            context += f"{_text(current)}\nTests failed, edit the file again:\n"


def _best_of_4(rng: random.Random) -> Texts:
    """Four answers to one prompt that agree in most of their lines."""
    for lines in _files(rng, NUM_TASKS):
        for _ in range(4):
            yield _task(lines), _text(_edited(lines, rng, 0.25))


def _identical_retry(rng: random.Random) -> Texts:
    """The same prompt is answered twice, in the same words."""
    for lines in _files(rng, NUM_TASKS):
        yield from [(_task(lines), _text(lines))] * 2


def _multi_turn(rng: random.Random) -> Texts:
    """Each answer comes back to some lines of the conversation and goes on with new ones."""
    for lines in _files(rng, NUM_TASKS):
        context, step = _task(lines), len(lines) // 4
        for start in range(0, 4 * step, step):
            back = rng.randrange(start + 1)
            answer = lines[start : start + step]
            if start:
                answer = _edited(lines[back : back + step // 2], rng, 0.1) + answer
            yield context, _text(answer)
            context += f"{_text(answer)}\nGood. Now the next part, and show again what changes.\n"


def _fresh_code(rng: random.Random) -> Texts:
    """Files that have nothing to do with one another."""
    for lines in _files(rng, NUM_TASKS):
        yield _task(lines), _text(lines)


KINDS: dict[str, Callable[[random.Random], Texts]] = {
    "agent edit": _agent_edit,
    "best of 4": _best_of_4,
    "identical retry": _identical_retry,
    "multi-turn": _multi_turn,
    "fresh code": _fresh_code,
}


# -- files --------------------------------------------------------------------------------------


def _files(rng: random.Random, number: int) -> Iterator[list[str]]:
    """The lines of pieces of `FILE_CHARS`, each from the middle of another file."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    for path in rng.sample([p for p in paths if p.stat().st_size > 4 * FILE_CHARS], number):
        text = path.read_text(encoding="utf-8")
        middle = len(text) // 2
        yield text[middle : middle + FILE_CHARS].splitlines()[1:]


def _task(lines: Sequence[str]) -> str:
    """A prompt that tells which file is meant, by its first lines."""
    return f"Write the module that contains these lines:\n{_text(lines[:4])}\n"


def _edited(lines: Sequence[str], rng: random.Random, rate: float) -> list[str]:
    """Half of the changed lines have a name changed; the others are dropped, or written twice."""
    edited = []
    for line in lines:
        draw = rng.random() / rate
        if draw < 0.5:
            edited.append(_renamed(line, rng))
        elif draw < 0.75:
            edited += [line, _renamed(rng.choice(lines), rng)]
        elif draw >= 1:
            edited.append(line)
    return edited


def _renamed(line: str, rng: random.Random) -> str:
    """A line with one of its longer names changed."""
    names = re.findall(r"\b[a-z_]{4,}\b", line)
    return line.replace(name := rng.choice(names), f"{name}_{rng.randrange(10)}") if names else line


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
