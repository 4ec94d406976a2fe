"""Prompts for training SmolLM2's head, made of texts and names that every Python has.

Open questions about subjects (pictographs that `unicodedata` names, cities of `zoneinfo`, modules
and topics of `pydoc`, a list of everyday subjects), and work on texts of the standard library:
code to explain and to edit, passages to repeat and to sum up, JSON of a tool to answer with.

No prompt of `bench.real_tasks` is among them: its questions' own words are no subjects here, and
texts come from other modules than its texts do. One seed gives one file:

    python -m foretoken.bench.lab.head_prompts --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import pydoc_data.topics
import random
import re
import sys
import sysconfig
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .. import real_tasks

OPEN_SHARE = 0.75  # of the prompts; the others are work on a text
_PICTOGRAPHS = (
    *range(0x1F300, 0x1F550), *range(0x1F680, 0x1F6D0), *range(0x1F900, 0x1FA00),
    *range(0x1FA70, 0x1FAFF),
)  # fmt: skip
_NO_SUBJECT = re.compile(
    r"FACE|SYMBOL|SIGN|ARROW|HAND|FINGER|FITZPATRICK|COMPONENT|CLOCK|BUTTON|CIRCLE|SQUARE|SHAPE"
    r"|HEAD|WITH|BLACK|WHITE|MOON|INPUT|SHADOW|KEYCAP|REVERSED|BOX TRAY|MARK|SEX|NO |ONCOMING"
)
_CITIES = (
    "Amsterdam Athens Baghdad Bangkok Berlin Bogota Brussels Bucharest Budapest Cairo Caracas "
    "Casablanca Chicago Copenhagen Dakar Damascus Denver Dubai Dublin Havana Helsinki Istanbul "
    "Jakarta Jerusalem Johannesburg Kabul Karachi Kathmandu Kolkata Lagos Lima Lisbon London "
    "Madrid Manila Melbourne Montevideo Moscow Nairobi Oslo Panama Prague Riga Rome Santiago "
    "Seoul Shanghai Singapore Stockholm Sydney Tallinn Tehran Tokyo Toronto Tunis Vancouver "
    "Vienna Vilnius Warsaw Zurich"
).split()  # of zoneinfo's keys
_SUBJECTS = (
    "gravity, magnetism, electricity, sound waves, the water cycle, tides, earthquakes, hurricanes, "
    "lightning, fog, deserts, coral reefs, rivers, the ozone layer, plate tectonics, fossils, "
    "dinosaurs, evolution, genetics, DNA, cells, the immune system, the human heart, digestion, "
    "the nervous system, muscles, bones, eyesight, hearing, memory, dreams, stress, anxiety, "
    "friendship, loneliness, honesty, courage, patience, creativity, curiosity, teamwork, "
    "negotiation, public speaking, time management, procrastination, habits, motivation, "
    "job interviews, remote work, starting a business, marketing, customer service, accounting, "
    "taxes, insurance, mortgages, the stock market, interest rates, supply and demand, trade, "
    "unemployment, globalisation, democracy, elections, human rights, the United Nations, "
    "the Roman Empire, ancient Egypt, ancient Greece, the Middle Ages, the Renaissance, "
    "the French Revolution, the First World War, the Cold War, the space race, the Silk Road, "
    "the Vikings, pyramids, castles, bridges, skyscrapers, canals, railways, steam engines, "
    "electric cars, batteries, solar panels, wind turbines, nuclear power, recycling, compost, "
    "bees, butterflies, ants, spiders, whales, sharks, penguins, elephants, wolves, horses, "
    "cats, dogs, parrots, mushrooms, mosses, roses, oak trees, rice farming, cheese making, "
    "bread baking, soup, pasta, salads, pancakes, coffee, tea, chocolate, olive oil, spices, "
    "healthy breakfasts, vegetarian cooking, food storage, table manners, yoga, running, "
    "swimming, hiking, cycling tours, football, basketball, tennis, skiing, climbing, camping, "
    "fishing, knitting, painting, photography, pottery, calligraphy, origami, board games, "
    "crossword puzzles, juggling, magic tricks, the piano, the guitar, the violin, opera, jazz, "
    "folk songs, film making, theatre, poetry, novels, fairy tales, journalism, libraries, "
    "museums, schools, homework, exams, essays, note taking, dictionaries, grammar, punctuation, "
    "mathematics, fractions, percentages, prime numbers, triangles, probability, statistics, "
    "logic, algorithms, sorting, databases, the internet, email, passwords, encryption, "
    "computer viruses, search engines, robots, artificial intelligence, 3D printing, telescopes, "
    "microscopes, satellites, comets, planets, stars, galaxies, the speed of light, time zones, "
    "calendars, maps, compasses, navigation, lifeguards, firefighters, nurses, carpenters, "
    "plumbers, electricians, farmers, pilots, astronauts, teachers, judges, translators, "
    "first aid, colds, headaches, allergies, vitamins, drinking water, posture, teeth, sunburn, "
    "babies, teenagers, grandparents, weddings, holidays, neighbours, moving house, cleaning, "
    "laundry, gardening tools, houseplants, bird watching, road trips, airports, hotels, packing"
).split(", ")

_ABOUT = (
    "What is {x}?", "What can you tell me about {x}?", "Tell me about {x}.",
    "Explain {x} in simple words.", "Explain {x} to a ten year old.", "Explain {x} in detail.",
    "Why is {x} important?", "How does {x} affect our lives?", "What is the history of {x}?",
    "Give me five facts about {x}.", "Give me ten facts about {x}.", "List the main ideas behind {x}.",
    "What are common mistakes people make with {x}?", "What should a beginner know about {x}?",
    "Give me some tips about {x}.", "Give me three tips concerning {x}.",
    "Write a short paragraph about {x}.", "Write an essay about {x}.", "Write a blog post about {x}.",
    "Write a short introduction to {x}.", "Summarise what is known about {x}.",
    "What are the pros and cons of {x}?", "What are the benefits of {x}?",
    "What are some myths about {x}?", "What questions should I ask an expert on {x}?",
    "Make a lesson plan about {x} for a school class.", "Make a quiz with four questions about {x}.",
    "Write a dialogue between two friends about {x}.", "Describe {x} to someone who has never heard of it.",
    "How has {x} changed over the last hundred years?", "What will {x} look like in the future?",
    "Can you help me to understand {x}?", "I have to give a talk about {x}. What should I say?",
    "What is the difference between {x} and {y}?", "Compare {x} and {y}.",
    "How are {x} and {y} related?", "Which is more interesting, {x} or {y}, and why?",
)  # fmt: skip
_THINGS = (
    "Write a short story about a {x}.", "Write a story in which a {x} and a {y} meet.",
    "Write a funny story about a {x}.", "Write a poem about a {x}.", "Write a haiku about a {x}.",
    "Write a song about a {x} and a {y}.", "Describe a {x}.", "What is a {x} used for?",
    "Who invented the {x}?", "How is a {x} made?", "What does a {x} look like?",
    "Where can I find a {x}?", "How much does a {x} cost?", "Describe the {x} for an encyclopedia.",
    "Write an advertisement for a {x}.", "Write a product review of a {x}.",
    "How do I take care of a {x}?", "What could a {x} stand for in a dream?",
    "Write a letter in which you ask for a {x}.", "Write an email to a shop that sold me a broken {x}.",
    "Tell me a joke about a {x}.", "Write a riddle whose answer is {x}.",
    "What would happen if there were no {x}?", "Name ten things that go well with a {x}.",
    "Give me an idea for a drawing with a {x} and a {y}.", "Use the words {x} and {y} in three sentences.",
)  # fmt: skip
_TRAVEL = (
    "What should I see in {x}?", "Plan three days in {x}.", "What is the weather like in {x}?",
    "Tell me about the history of {x}.", "What do people eat in {x}?", "How do I get from {x} to {y}?",
    "Write a postcard from {x}.", "Compare {x} with {y}.", "Describe a morning in {x}.",
    "What is {x} famous for?", "Is {x} a good place to live? Why?", "Write a travel guide to {x}.",
)  # fmt: skip
_PYTHON = (
    "What is the Python module {x} for?", "How do I use {x} in Python?",
    "Write a Python example that uses {x}.", "Explain the Python module {x} with an example.",
    "When would I use {x} rather than {y} in Python?", "Write a tutorial about {x} in Python.",
    "What are alternatives to {x} in Python?", "Write a small Python program with {x} and {y}.",
)  # fmt: skip
_LANGUAGE = (
    "Explain {x} in Python.", "What should I know about {x} in a programming language?",
    "Give me an example of {x} in Python.", "How does {x} work in Python, and when is it useful?",
)  # fmt: skip
_TASKS = (
    "Write a Python function that {x}.", "Write a function that {x}, with a docstring.",
    "How do I write a program that {x}?", "Write a Python class that {x}. Add comments.",
    "Write Python code that {x}, and explain it step by step.",
)  # fmt: skip
_JOBS = (
    "adds two numbers", "reverses a string", "counts the words of a file", "finds the largest number",
    "sorts a list of names", "removes duplicates from a list", "checks whether a word is a palindrome",
    "computes the factorial of a number", "prints the Fibonacci numbers", "finds prime numbers",
    "reads a CSV file", "writes a JSON file", "downloads a web page", "sends an email",
    "converts Celsius to Fahrenheit", "computes the mean and the median", "merges two dictionaries",
    "flattens a nested list", "finds the longest word", "counts vowels", "validates an email address",
    "generates a random password", "simulates a dice", "implements a stack", "implements a queue",
    "implements a linked list", "searches a sorted list", "sorts with bubble sort", "rotates a matrix",
    "transposes a table", "parses a date", "prints a calendar", "counts down from ten",
    "splits a text into sentences", "encrypts a text with a Caesar cipher", "draws a triangle of stars",
    "computes compound interest", "converts binary to decimal", "finds anagrams", "zips two lists",
    "caches results", "times another function", "retries a call that fails", "renames files in a folder",
    "groups items by their first letter", "computes the distance between two points", "makes a to-do list",
    "keeps a bank account", "represents a rectangle", "models a library of books", "plays tic-tac-toe",
)  # fmt: skip
_OPENERS = ("", "", "", "", "", "Please help me. ", "Hi! ", "Hello. ", "I am curious. ", "Quick question: ")
_CLOSERS = (
    "", "", "", "", "", "", " Keep it short.", " Answer in one paragraph.", " Use bullet points.",
    " Explain step by step.", " Answer in two sentences.", " Give examples.",
)  # fmt: skip

_CODE = (
    "Explain what this code does.\n\n```python\n{text}```", "What does this function return?\n\n{text}",
    "Write a docstring for this function.\n\n```python\n{text}```",
    "Add comments to this code.\n\n```python\n{text}```",
    "Rename the variable `{old}` to `{new}` in this code and write it again.\n\n```python\n{text}```",
    "```python\n{text}```\n\nWrite the whole code again, with `{new}` in place of `{old}`.",
    "Here is some code.\n\n{text}\nReplace `{old}` by `{new}` and answer with the code only.",
    "Add type hints to this function and answer with the code.\n\n```python\n{text}```",
)  # fmt: skip
_PASSAGE = (
    "Summarise this text.\n\n{text}", "Explain this passage in your own words:\n\n{text}",
    "Repeat this paragraph exactly as it is.\n\n{text}", "Quote the following text word by word:\n\n{text}",
    'Text: "{text}"\n\nWrite the text above again without changes.', "Correct the mistakes in this text:\n\n{text}",
    "Write three questions about this text.\n\n{text}", "Continue this text:\n\n{text}",
)  # fmt: skip
_TOOL = (
    "The tool answered with this JSON:\n\n```json\n{text}\n```\n\nRepeat it unchanged.",
    "Tool result:\n{text}\n\nAnswer with exactly this JSON.",
    "Here is JSON:\n\n{text}\n\nDescribe in words what it holds.",
    "```json\n{text}\n```\n\nWrite this JSON again.",
)  # fmt: skip
_WORDS = re.compile(r"[a-z]{4,}")


def prompts(seed: int = 0) -> Iterator[str]:
    """Messages of a user, without end and without one twice, in an order that the seed decides."""
    rng = random.Random(seed)
    subjects = Subjects()
    texts = _Texts()
    seen: set[str] = set()
    while True:
        make = subjects.draw if rng.random() < OPEN_SHARE else texts.draw
        prompt = make(rng)
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


# -- open questions -------------------------------------------------------------------------------


class Subjects:
    """What open questions are about."""

    def __init__(self) -> None:
        taken = set(_WORDS.findall(" ".join(real_tasks._QUESTIONS).lower())) - _COMMON

        def free(names: Sequence[str]) -> list[str]:
            return [name for name in names if taken.isdisjoint(_WORDS.findall(name.lower()))]

        topics = [topic.replace("-", " ") for topic in sorted(pydoc_data.topics.topics)]
        self._kinds: list[tuple[int, Sequence[str], list[str]]] = [
            (8, _ABOUT, free(_SUBJECTS)),
            (4, _THINGS, free(_things())),
            (1, _TRAVEL, free(_CITIES)),
            (1, _PYTHON, free(_modules())),
            (1, _LANGUAGE, free(topics)),
            (1, _TASKS, free(_JOBS)),
        ]

    def draw(self, rng: random.Random) -> str:
        """One question."""
        weights = [weight for weight, _, _ in self._kinds]
        _, templates, names = rng.choices(self._kinds, weights)[0]
        x, y = rng.sample(names, 2)
        question = rng.choice(templates).format(x=x, y=y)
        return rng.choice(_OPENERS) + question + rng.choice(_CLOSERS)


_COMMON = frozenset(
    "what when where which does that this with from known explain give write short have should "
    "tell about history best describe make main simple words happened during start idea "
    "difference between work ways good time every month children mean much five tips story "
    "learning language advantages rules used like into over more how's people".split()
)


def _things() -> list[str]:
    """Pictographs that are things: "camera", "hot pepper", ..."""
    names = (unicodedata.name(chr(code), "") for code in _PICTOGRAPHS)
    return sorted(
        name.lower()
        for name in names
        if name and not _NO_SUBJECT.search(name) and 1 <= len(name.split()) <= 2
    )


def _modules() -> list[str]:
    """Public modules of the standard library."""
    return sorted(name for name in sys.stdlib_module_names if name[0] != "_" and len(name) > 2)


# -- work on a text -------------------------------------------------------------------------------


class _Texts:
    """Functions, passages and outlines of modules that `real_tasks` does not use."""

    def __init__(self) -> None:
        self._code: list[tuple[str, str]] = []  # and a name that stands in it
        self._passages: list[str] = []
        self._reports: list[str] = []
        for name, tree in _trees():
            self._add(name, tree)

    def _add(self, name: str, tree: ast.Module) -> None:
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in functions:
            code = ast.unparse(node) + "\n"
            if 4 <= code.count("\n") <= 24 and len(code) < 1100 and node.args.args:
                self._code.append((code, node.args.args[-1].arg))
        for node in (tree, *functions):
            for part in textwrap.dedent(ast.get_docstring(node) or "").split("\n\n"):
                if 30 <= len(part.split()) <= 110 and part[:1].isalpha() and ">>>" not in part:
                    self._passages.append(" ".join(part.split()))
        for at in range(0, len(functions) - 4, 5):
            found = [
                {"name": f.name, "line": f.lineno, "args": [a.arg for a in f.args.args]}
                for f in functions[at : at + 4]
            ]
            self._reports.append(json.dumps({"file": f"{name}.py", "found": found}, indent=1))

    def draw(self, rng: random.Random) -> str:
        """One text and what to do with it."""
        make: Callable[[random.Random], str] = rng.choice(
            (self._about_code, self._about_passage, self._about_report)
        )
        return make(rng)

    def _about_code(self, rng: random.Random) -> str:
        code, old = rng.choice(self._code)
        new = f"{old}_{rng.choice(('item', 'new', 'name', 'data', 'one'))}"
        return rng.choice(_CODE).format(text=code, old=old, new=new)

    def _about_passage(self, rng: random.Random) -> str:
        return rng.choice(_PASSAGE).format(text=rng.choice(self._passages))

    def _about_report(self, rng: random.Random) -> str:
        return rng.choice(_TOOL).format(text=rng.choice(self._reports))


def _trees() -> Iterator[tuple[str, ast.Module]]:
    """Modules outside the list of `real_tasks`, packages and tests left out, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        skipped = {"test", "tests", "encodings", "idlelib", "pydoc_data", "site-packages", "lib2to3"}
        if skipped.isdisjoint(parts) and not set(parts) & set(real_tasks._MODULES):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) < 300_000:
                yield ".".join(parts), ast.parse(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Write chat JSONL without answers: `foretoken train-draft --regenerate on` asks for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--number", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    made = prompts(args.seed)
    with args.out.open("w", encoding="utf-8") as out:
        for _ in range(args.number):
            message = {"role": "user", "content": next(made)}
            out.write(json.dumps({"messages": [message]}) + "\n")


if __name__ == "__main__":
    main()
