"""Twenty tools, three questions for each, and what a real model answered to them.

The texts are those of Qwen2.5-Coder-1.5B-Instruct (4 bits), at temperatures 0 and 0.7: its chat
template offers tools in the form of Hermes, and it writes calls in forms of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

from foretoken.api.parsing.reading.offers import Offers
from foretoken.api.types.results import Tool

FOLDER = Path(__file__).resolve().parents[1] / "api" / "parsing" / "kit"
KIT = json.loads((FOLDER / "tools.json").read_text("utf-8"))
NUM_TOGETHER = 5  # tools that a question is asked with
TOOLS = [
    Tool(name=each["name"], description=each["description"], parameters=each["parameters"])
    for each in KIT
]
QUESTIONS = [(each["name"], question) for each in KIT for question in each["questions"]]


def offered(name: str) -> list[Tool]:
    """The tools that are offered with the questions for one of them."""
    index = [tool.name for tool in TOOLS].index(name) // NUM_TOGETHER * NUM_TOGETHER
    return TOOLS[index : index + NUM_TOGETHER]


def recorded(kind: str = "") -> list[dict]:
    """The answers: temperature, tool that was asked for, text.

    With "-other", answers to other questions that call no tool that is offered.
    """
    lines = (FOLDER / f"qwen2.5-coder-1.5b{kind}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def is_usable(name: str, calls: list[tuple[str, str]]) -> bool:
    """Whether an answer calls tools, each with arguments that it takes."""
    offers = Offers(offered(name))
    return bool(calls) and all(offers.fit(called, arguments) for called, arguments in calls)
