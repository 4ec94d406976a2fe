"""Settings: dataclass fields that are also flags, environment variables and keys of a file.

`setting` makes such a field, with the help, the range and the unit of its flag; its type is the
annotation. `check_settings` refuses a value of another type or out of range, wherever it comes
from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import InvalidRequest, shown

T = TypeVar("T")
HIGHEST = 2**40  # upper limit of a number for which no limit is declared
SIZE = "SIZE"  # metavar of a number of bytes, which may have a unit
SECONDS = "S"  # metavar of a time in seconds
_UNITS = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}  # fmt: skip
_SWITCHES = {"1": True, "true": True, "0": False, "false": False}
_KINDS: Mapping[type, str] = {
    bool: "true or false", dict: "a JSON object", list: "a list of strings", int: "an integer",
    float: "a number", str: "a string",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting: its name, its allowed values and its help."""

    name: str  # flag name, with underscores
    field: str = ""  # name of the dataclass's field
    default: Any
    help: str
    metavar: str
    least: float
    most: float
    choices: tuple[str, ...]  # allowed texts
    kinds: frozenset[type] = frozenset()  # allowed types: the keys of `_KINDS`, and NoneType
    group: str  # heading in the help
    separator: str | None  # separator of several values in one text
    is_basic: bool  # shown by --help, not only by --help-all
    is_secret: bool  # never shown in errors

    @property
    def flag(self) -> str:
        """The flag as it is written: ``--max-running`` for the name ``max_running``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_switch(self) -> bool:
        """Whether the setting's flag has no value."""
        return bool in self.kinds

    @property
    def is_list(self) -> bool:
        """Whether the setting's flag may be repeated."""
        return list in self.kinds

    def read(self, text: str) -> Any:  # noqa: ANN401 - of one of `kinds`
        """Convert a text from the command line or the environment to a value.

        Raises `ValueError`, which says what the value must be.
        """
        if self.is_list:
            if self.separator is None:
                return (text,)
            return tuple(part for each in text.split(self.separator) if (part := each.strip()))
        if self.is_switch:
            if text.lower() not in _SWITCHES:
                raise ValueError(f"must be 1, 0, true or false{self._not(text)}")
            return self._switched(_SWITCHES[text.lower()])
        for kind in (int, float):
            if kind in self.kinds and self.metavar != SIZE and text not in self.choices:
                try:
                    return kind(text)
                except ValueError:
                    continue
        return self.convert(text)

    def convert(self, value: object) -> Any:  # noqa: ANN401 - of one of `kinds`
        """Convert an item of a file to a value.

        Raises `ValueError`, which says what the value must be.
        """
        if self.is_list and isinstance(value, str):
            return self.read(value)
        if self.metavar == SIZE and isinstance(value, str):
            return parse_size(value)
        self._check_kind(value)
        if isinstance(value, bool):
            return self._switched(value)
        return tuple(value) if isinstance(value, list) else value

    def check(self, value: object) -> None:
        """Raise `ValueError` for a value of a wrong type, outside the choices, or out of range."""
        self._check_kind(value)
        if isinstance(value, str) or not isinstance(value, int | float):
            return
        if not value >= self.least:  # refuses NaN, too
            raise ValueError(f"must be at least {self.least:.12g}{self._not(value)}")
        if value > self.most:
            raise ValueError(f"must be at most {self.most:.12g}{self._not(value)}")

    def _check_kind(self, value: object) -> None:
        if isinstance(value, str):
            if self.metavar == SIZE:
                parse_size(value)
            fits = value in self.choices if self.choices else str in self.kinds
        elif isinstance(value, list | tuple):
            fits = self.is_list and {*map(type, value)} <= {str}
        elif isinstance(value, Mapping):
            fits = dict in self.kinds
        elif isinstance(value, int) and not isinstance(value, bool):
            fits = bool(self.kinds & {int, float})
        else:
            fits = type(value) in self.kinds
        if not fits:
            raise ValueError(f"must be {self._expected}{self._not(value)}")

    @property
    def _expected(self) -> str:
        """Names of the accepted types and choices, for errors."""
        if self.metavar == SIZE:
            return "a size such as 4GiB"
        name = next(name for kind, name in _KINDS.items() if kind in self.kinds or kind is str)
        if not self.choices:
            return name
        texts = ", ".join(self.choices)
        return f"{texts} or {name}" if self.kinds & {int, float} else f"one of {texts}"

    def _switched(self, value: bool) -> bool:
        """Return the field's value if its flag has ``value``: negated if the default is True."""
        return value != (self.default is True)

    def _not(self, value: object) -> str:
        return "" if self.is_secret else f", not {shown(value)}"


def setting(
    default: T,
    help: str,
    metavar: str = "",
    *,
    least: float = 0,
    most: float = HIGHEST,
    choices: Sequence[str] = (),
    flag: str = "",
    group: str = "",
    separator: str | None = None,
    is_basic: bool = False,
    is_secret: bool = False,
) -> T:
    """Return a dataclass field that is a setting; the arguments are attributes of `Setting`.

    ``flag``: the flag's name; by default the field's name, or ``no_NAME`` for a switch that is True
    by default. ``group`` also applies to the fields that follow.
    """
    made = Setting(
        name=flag,
        default=default,
        help=help,
        metavar=metavar,
        least=least,
        most=most,
        choices=tuple(choices),
        group=group,
        separator=separator,
        is_basic=is_basic,
        is_secret=is_secret,
    )
    return field(default=default, repr=not is_secret, metadata={"setting": made})


def settings_of(owner: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by the names of their flags, in order."""
    return _settings_of(owner)


@cache
def _settings_of(owner: type) -> Mapping[str, Setting]:
    hints, group, found = get_type_hints(owner), "", {}
    for each in fields(owner):
        made: Setting | None = each.metadata.get("setting")
        if made is None:
            continue
        group = made.group or group
        name = made.name or (f"no_{each.name}" if each.default is True else each.name)
        own = replace(made, name=name, field=each.name, group=group)
        found[name] = _typed(own, hints[each.name])
    return found


def _typed(made: Setting, hint: Any) -> Setting:  # noqa: ANN401 - an annotation
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [part for part in parts if get_origin(part) is Literal]
    kinds = frozenset(_kind(part) for part in parts if part not in literals)
    choices = made.choices or tuple(text for part in literals for text in get_args(part))
    metavar = made.metavar or "|".join(choices) or ("N" if int in kinds else "X")
    return replace(made, kinds=kinds, choices=choices, metavar=metavar)


def _kind(part: Any) -> type:  # noqa: ANN401 - an annotation
    kind: type = get_origin(part) or part
    if kind in (*_KINDS, NoneType):
        return kind
    return dict if issubclass(kind, Mapping) else list


def check_settings(owner: object) -> None:
    """Raise `InvalidRequest` for the first invalid setting of a dataclass, which it names."""
    for each in settings_of(type(owner)).values():
        try:
            each.check(getattr(owner, each.field))
        except ValueError as error:
            raise InvalidRequest(f"{each.name} {error}", param=each.name) from None


def parse_size(text: str | int) -> int:
    """Return the number of bytes of a size such as 4GiB, 512MB or 1000000. Raises `ValueError`."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,6})?)\s*([KMGT]I?)?B?\s*", str(text).upper())
    size = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if size <= 0:
        raise ValueError(f"must be a size such as 4GiB, not {shown(text)}")
    return size
