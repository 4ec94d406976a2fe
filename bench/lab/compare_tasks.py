"""Small tasks for `foretoken compare`, made from a seed: each can be checked without a reader.

`python -m foretoken.bench.lab.compare_tasks --out FILE` writes them as a file of tasks.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ines", "Jonas")
THINGS = ("apples", "books", "coins", "eggs", "letters", "pencils", "plates", "stamps")
WORDS = ("amber", "basket", "candle", "desert", "engine", "forest", "garden", "hammer", "island",
         "jacket", "kettle", "lemon", "market", "needle", "orange", "pepper")  # fmt: skip
CITIES = ("Athens", "Berlin", "Cairo", "Dublin", "Lima", "Madrid", "Oslo", "Paris", "Rome", "Tokyo")
FUNCTIONS = (
    ("double(x) returns x times {n}", "double", ("assert double(3) == 3 * {n}",)),
    ("shifted(xs) returns a list with {n} added to each item of xs", "shifted",
     ("assert shifted([1, 2]) == [1 + {n}, 2 + {n}]", "assert shifted([]) == []")),
    ("longer(words) returns the words of a list that have more than {n} letters", "longer",
     ("assert longer(['a' * {n}, 'b' * ({n} + 1)]) == ['b' * ({n} + 1)]",)),
    ("last(xs) returns a list of the last {n} items of xs", "last",
     ("assert last(list(range(20))) == list(range(20))[-{n}:]",)),
)  # fmt: skip
TOOLS: Sequence[Mapping[str, Any]] = (
    {"name": "get_weather", "description": "weather", "key": "city"},
    {"name": "get_time", "description": "time", "key": "city"},
    {"name": "add_note", "description": "note", "key": "text"},
)
DESCRIBED = {
    "get_weather": "Return the weather of a city. Use it for temperature, rain and wind.",
    "get_time": "Return the local time of a city. Use it for clocks and dates.",
    "add_note": "Save a short text for later. Use it only if the user asks to remember something.",
}


def tools(descriptions: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the three tools of the calling tasks, in OpenAI's form.

    ``descriptions`` by name replaces their descriptions of one word.
    """
    found = []
    for each in TOOLS:
        text = each["description"] if descriptions is None else descriptions[each["name"]]
        schema = {
            "type": "object",
            "properties": {each["key"]: {"type": "string"}},
            "required": [each["key"]],
        }
        function = {"name": each["name"], "description": text, "parameters": schema}
        found.append({"type": "function", "function": function})
    return found


def arithmetic(rng: random.Random) -> dict[str, Any]:
    """Return a story with one or two steps of arithmetic."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    first, second, third = rng.randint(2, 12), rng.randint(2, 12), rng.randint(1, 9)
    text = f"{name} has {first} {thing} and buys {second} more."
    total = first + second
    if rng.random() < 0.5:
        text, total = f"{text} Then {name} finds {third} more.", total + third
    text += f" How many {thing} does {name} have? Answer with the number only."
    return _task(text, "number", total)


def editing(rng: random.Random) -> dict[str, Any]:
    """Return an edit of a short list of words."""
    words = rng.sample(WORDS, 4)
    text, expected = rng.choice((
        ("Write the second word of this list", words[1]),
        ("Write the last word of this list", words[3]),
        ("Write the first word of this list in capital letters", words[0].upper()),
        ("Write the word of this list that comes first in the alphabet", min(words)),
    ))  # fmt: skip
    return _task(f"{text}, and nothing else: {', '.join(words)}", "exact", expected)


def extraction(rng: random.Random) -> dict[str, Any]:
    """Facts of a sentence as JSON."""
    facts = {"name": rng.choice(NAMES), "age": rng.randint(18, 80), "city": rng.choice(CITIES)}
    text = (
        f"{facts['name']}, who lives in {facts['city']}, turned {facts['age']} last week.\n"
        "Write name, age and city of this person as one JSON object, with these keys, on one line."
    )
    return _task(text, "json", facts)


def calling(rng: random.Random) -> dict[str, Any]:
    """Return a request that one of three tools serves."""
    city, word = rng.choice(CITIES), rng.choice(WORDS)
    text, name, arguments = rng.choice((
        (f"Do I need an umbrella in {city}?", "get_weather", {"city": city}),
        (f"Is it late in {city} now?", "get_time", {"city": city}),
        (f"Please remember the word {word}.", "add_note", {"text": word}),
    ))  # fmt: skip
    made = _task(text, "json", {"name": name, "arguments": arguments})
    return {**made, "tools": tools()}


def coding(rng: random.Random) -> dict[str, Any]:
    """Return a small Python function, with its tests."""
    text, name, tests = rng.choice(FUNCTIONS)
    number = rng.randint(2, 9)
    body = "\n".join(f"    {each.format(n=number)}" for each in tests)
    made = _task(f"Write a Python function. {text.format(n=number)}.", "pytest", None)
    return {**made, "tests": f"def test_{name}():\n{body}\n"}


KINDS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "arithmetic": arithmetic, "editing": editing, "extraction": extraction, "calling": calling,
    "coding": coding,
}  # fmt: skip


def make_tasks(kinds: Sequence[str], num: int, seed: int) -> list[dict[str, Any]]:
    """Return ``num`` different tasks of each kind."""
    found = []
    for kind in kinds:
        rng, known = random.Random(f"{seed}/{kind}"), dict[str, dict[str, Any]]()
        while len(known) < num:
            task = KINDS[kind](rng)
            known.setdefault(task["messages"][0]["content"], task)
        found += [{"id": f"{kind}-{at}", **task} for at, task in enumerate(known.values())]
    return found


def _task(text: str, scorer: str, expected: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "scorer": scorer, "expected": expected}


def main(argv: Sequence[str] | None = None) -> None:
    """Write tasks to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS, help="kinds (all)")
    parser.add_argument("--num", type=int, default=40, help="tasks of each kind (40)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the tasks (1)")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(argv)
    lines = map(json.dumps, make_tasks(options.kinds, options.num, options.seed))
    options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
