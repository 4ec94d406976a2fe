"""Real tasks for a chat model, made of texts that every Python installation has.

There are four kinds, which differ in how much of the answer stands in the prompt: ``edit`` (rename
a function and return the code), ``agent`` (repeat the JSON output of a tool), ``quote`` (repeat a
passage) and ``chat`` (open questions). Each list has two halves: priors and constants are fitted on
``tune``, and published figures are measured on ``show``. The fifth kind, ``adversarial``, is not a
task but random tokens, in which lookups almost always find a match that is seldom right.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import random
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

Half: TypeAlias = Literal["tune", "show"]
KINDS = ("edit", "quote", "agent", "chat")
ADVERSARIAL = "adversarial"
PER_HALF = 16  # Prompts of one kind in each half.

_MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "cmd", "codecs", "collections", "colorsys",
    "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime", "difflib", "dis",
    "doctest", "filecmp", "fileinput", "fnmatch", "fractions", "ftplib", "functools", "getopt",
    "gettext", "glob", "graphlib", "gzip", "heapq", "hmac", "html", "imaplib", "inspect", "json",
    "linecache", "locale", "mailbox", "mimetypes", "netrc", "ntpath", "numbers", "operator",
    "optparse", "os", "pathlib", "pdb", "pickle", "pickletools", "platform", "plistlib", "poplib",
    "posixpath", "pprint", "profile", "pstats", "queue", "random", "reprlib", "sched", "secrets",
    "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "token",
    "tokenize", "trace", "traceback", "types", "typing", "unittest", "uuid", "wave", "weakref",
    "webbrowser", "zipapp", "zipfile",
)  # fmt: skip
_EDITS = (
    "Rename the function `{old}` to `{new}` and answer with the whole code only.\n\n"
    "```python\n{code}```",
    "```python\n{code}```\n\nIn this code the function `{old}` should be called `{new}`. Write the "
    "complete code again with that change.",
    "Change the name of `{old}` to `{new}` in the code below. Answer with nothing but the code.\n\n"
    "{code}",
)
_QUOTES = (
    "Repeat the following passage exactly, word for word.\n\n{text}",
    'Passage: "{text}"\n\nCopy the passage above word by word.',
    "Say this text again without any change:\n\n{text}",
)
_AGENTS = (
    "The tool `list_functions` returned this JSON:\n\n```json\n{text}\n```\n\nWrite the same JSON "
    "again, exactly as it is.",
    "Tool output:\n{text}\n\nRepeat the tool output as JSON, unchanged.",
    "Copy this JSON word for word:\n\n```json\n{text}\n```",
)
_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain how rainbows form.",
    "How does a bicycle stay upright?",
    "Give me five tips for learning a new language.",
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "What should I cook with rice, eggs and tomatoes?",
    "Explain recursion to a child.",
    "What are the advantages of renewable energy?",
    "How do vaccines work?",
    "Describe a walk through an old forest in autumn.",
    "What is the difference between a virus and a bacterium?",
    "How can I sleep better at night?",
    "Tell me about the history of the printing press.",
    "What makes a good leader?",
    "Explain what a black hole is.",
    "Plan a weekend in a small town by the sea.",
    "Why do leaves change colour in autumn?",
    "How does a computer store numbers?",
    "Write a poem about winter.",
    "What are the main causes of inflation?",
    "How do I start a vegetable garden?",
    "Explain photosynthesis in simple words.",
    "What is the best way to save money every month?",
    "Describe how an airplane flies.",
    "What happened during the Industrial Revolution?",
    "Give me an idea for a birthday party for ten children.",
    "How do glaciers shape mountains?",
    "What is machine learning?",
    "Write a letter to a friend who has moved away.",
    "Why is exercise good for the brain?",
    "What are the rules of chess?",
)


@cache
def prompts(kind: str, half: Half) -> tuple[str, ...]:
    """Return the `PER_HALF` user messages of a kind. Raises ValueError for an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of task {kind!r}; use one of {', '.join(KINDS)}")
    made = list(_MAKE[kind]())[: 2 * PER_HALF]
    if len(made) < 2 * PER_HALF:
        raise RuntimeError(
            f"the standard library of this Python has texts for only {len(made)} prompts of {kind}"
        )
    return tuple(made[("tune", "show").index(half) :: 2])


def adversarial(
    num_streams: int, prompt_len: int, answer_len: int, vocab_size: int
) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers that repeat five tokens in random order.

    Lookups almost always find a match, but the token after it is right only one time in five.
    """
    rng = random.Random(7)
    few = [rng.randrange(5, vocab_size) for _ in range(5)]
    return [
        (rng.choices(few, k=prompt_len), rng.choices(few, k=answer_len)) for _ in range(num_streams)
    ]


def _edits() -> Iterator[str]:
    for index, (name, code) in enumerate(_functions()):
        new = f"{name.rstrip('_').split('_')[-1]}_{'value' if index % 2 else 'result'}"
        yield _EDITS[index % 3].format(old=name, new=new, code=code)


def _quotes() -> Iterator[str]:
    for index, text in enumerate(_passages()):
        yield _QUOTES[index % 3].format(text=text)


def _agents() -> Iterator[str]:
    for index, (module, tree) in enumerate(_trees()):
        found = [
            {"name": node.name, "line": node.lineno, "args": [arg.arg for arg in node.args.args]}
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
        ]
        if len(found) >= 5:
            report = {"module": module, "functions": found[:5]}
            yield _AGENTS[index % 3].format(text=json.dumps(report, indent=1 + index % 2))


def _chats() -> Iterator[str]:
    return iter(_QUESTIONS)


_MAKE = {"edit": _edits, "quote": _quotes, "agent": _agents, "chat": _chats}


# -- texts of the standard library ----------------------------------------------------------------


def _functions() -> Iterator[tuple[str, str]]:
    """Yield the name and code of one function of 12 to 28 lines for each module."""
    for _, tree in _trees():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                code = ast.unparse(node) + "\n"
                if 12 <= code.count("\n") <= 28 and len(code) < 1400:
                    yield node.name, code
                    break


def _passages() -> Iterator[str]:
    """Yield a passage of 60 to 110 words from the docstrings of each module."""
    for _, tree in _trees():
        for text in _docs(tree):
            for part in text.split("\n\n"):
                words = part.split()
                if 60 <= len(words) <= 110 and part[0].isalpha() and ">>>" not in part:
                    yield " ".join(words)
                    break
            else:
                continue
            break


def _docs(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                yield textwrap.dedent(doc)


@cache
def _trees() -> Sequence[tuple[str, ast.Module]]:
    """Return parsed modules in a fixed pseudo-random order."""
    found = []
    for name in sorted(_MODULES, key=lambda name: hashlib.sha256(name.encode()).digest()):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            source = Path(spec.origin).read_text(encoding="utf-8")
            found.append((name, ast.parse(source)))
    return found
