"""Flags of the command ``foretoken``: parsers and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from ...core.config import format_size
from ...core.options.settings import SECONDS, SIZE, Setting, settings_of

TWO_MODELS = "MODEL and --model name different models"


def above_zero(text: str) -> float:
    """Return a number above 0, such as a time limit. Raises `argparse.ArgumentTypeError`."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return number


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors and without abbreviated flags.

    With settings, --help shows only the basic flags, and --help-all shows all of them.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(allow_abbrev=False, **options)
        self._rare: list[argparse.Action] = []
        self._titled: dict[str, argparse._ArgumentGroup] = {}

    def parse_args(  # type: ignore[override] # without argparse's overloads
        self, args: Iterable[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the arguments. An unknown flag is an error that names the most similar flag."""
        parsed, unknown = self.parse_known_args(None if args is None else [*args], namespace)
        command: Parser = getattr(parsed, "parser", self)
        for each in unknown:
            if not command.takes_late(each, parsed):
                command.refuse(each.partition("=")[0])
        return parsed

    def takes_late(self, argument: str, parsed: argparse.Namespace) -> bool:
        """Assign a leftover argument to an unfilled positional; return whether there was one.

        argparse matches all positionals when it meets the first, so one that follows a flag is left
        over.
        """
        if argument.startswith("-"):
            return False
        for place in (each for each in self._actions if not each.option_strings):
            value = getattr(parsed, place.dest)
            if place.nargs == "?" and value is None:
                place(self, parsed, argument)
                return True
            if place.nargs == "*":
                setattr(parsed, place.dest, [*value, argument])
                return True
        return False

    def refuse(self, argument: str) -> NoReturn:
        """Print that the command has no such argument, and exit with status 2."""
        if argument.startswith("-"):
            near = nearest(argument, self._option_string_actions)
            self.error(f"unknown flag {argument}{near}")
        self.error(f"unexpected argument {argument!r}; quote a text with spaces")

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def add_settings(self, *kinds: type) -> None:
        """Add a flag for each setting of the dataclasses. A flag that is not given is None."""
        if self.add_help and not self._titled:
            self.add_argument("--help-all", action=_HelpAll, help="show all flags and exit")
        for each in (each for kind in kinds for each in settings_of(kind).values()):
            group = self._group(each.group) if each.group else self
            action = group.add_argument(each.flag, help=help_of(each), **_reading(each))
            if not each.is_basic:
                self._rare.append(action)

    def format_help(self, *, shows_all: bool = False) -> str:
        """Return the help text, of the basic flags or of all flags."""
        hidden = [] if shows_all else [(action, action.help) for action in self._rare]
        try:
            for action, _ in hidden:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            for action, help in hidden:
                action.help = help

    def _group(self, title: str) -> argparse._ArgumentGroup:
        if title not in self._titled:
            self._titled[title] = self.add_argument_group(title)
        return self._titled[title]


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the help of all flags and exit."""
        assert isinstance(parser, Parser)
        print(parser.format_help(shows_all=True), end="")
        parser.exit()


def help_of(each: Setting) -> str:
    """Return the help text, followed by the default with its unit in brackets.

    The default is left out if it is empty, if the flag is a switch, or if a model may replace it.
    """
    from ..types.sampling_params import LeftOut

    if isinstance(each.default, bool | LeftOut) or each.default in (None, "", ()):
        return each.help
    if each.metavar == SIZE and isinstance(each.default, int):
        default = format_size(each.default)
    else:
        default = each.default if isinstance(each.default, str) else f"{each.default:.12g}"
        default += " s" if each.metavar == SECONDS else ""
    return f"{each.help} ({default})"


def _reading(each: Setting) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` that describe the value of a setting's flag."""
    if each.is_switch:
        return {"action": "store_const", "const": each.read("1")}
    action = "extend" if each.is_list else "store"
    return {"action": action, "metavar": each.metavar, "type": _reader(each)}


def _reader(each: Setting) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            return each.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an error message that names the most similar name.

    Returns "" if no name is similar.
    """
    found = get_close_matches(name, [*known], 1)
    return f" (did you mean {found[0]}?)" if found and found[0] != name else ""


def add_verbose(parser: Parser) -> None:
    """Add --verbose."""
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print the seconds of each startup step to standard error",
    )


def add_engine_flags(parser: Parser) -> None:
    """Add a flag for each option of `EngineConfig`."""
    from ...core.config import EngineConfig

    parser.add_settings(EngineConfig)


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options set by flags, without variables and files."""
    from ...core.config import EngineConfig

    given = {name: getattr(parsed, name) for name in EngineConfig.names()}
    return {name: value for name, value in given.items() if value is not None}


def count(text: str) -> int:
    """Read a flag's value that is a number of at least 1, for `argparse`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError("must be a number of at least 1")
    return number
