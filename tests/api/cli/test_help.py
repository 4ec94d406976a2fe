"""Help texts are read by people who look for a flag: each says at once what the flag is or does."""

from __future__ import annotations

import argparse
import re

import pytest

from foretoken.api.cli.commands import _parser

FUNCTION_WORDS = frozenset(
    """a an and any are as at auto be because before behind beside beyond but by can every for from
    had has have how if in into is it its many may much none of off on only or over so such than
    that the their them these they this those to under until what when where which while who whose
    why with within without you your""".split()  # noqa: SIM905
)
"""Words that begin neither a noun nor a verb: what follows them must be read twice."""


def flags() -> list[tuple[str, argparse.Action]]:
    """All flags and arguments of all commands."""
    parser = _parser()
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [
        (f"{name} {action.option_strings[-1] if action.option_strings else action.dest}", action)
        for name, command in commands.choices.items()
        for action in command._actions
        if not isinstance(action, argparse._HelpAction)
    ]


def opening(text: str) -> str:
    """The first word."""
    return re.split(r"[^\w-]", text, maxsplit=1)[0]


@pytest.mark.parametrize(("name", "action"), flags(), ids=[name for name, _ in flags()])
def test_a_help_text_begins_with_a_noun_or_a_verb(name: str, action: argparse.Action) -> None:
    assert action.help, f"{name} says nothing"
    word = opening(action.help)
    assert word.isalpha() or "-" in word, action.help
    assert word.lower() not in FUNCTION_WORDS, action.help
    assert not action.help.endswith("."), action.help


def test_commands_say_what_they_do() -> None:
    parser = _parser()
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for choice in commands._choices_actions:
        assert opening(choice.help or "").lower() not in {*FUNCTION_WORDS, ""}, choice.dest
