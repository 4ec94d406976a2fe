"""Names of functions in a call, and the text between name and arguments."""

from __future__ import annotations

import re

from ..output_parser import Cut, Malformed, Reading, Source

NAME = re.compile(r"[\w.:-]+")


def expect_arguments(source: Source) -> Reading[None]:
    """Raise `Malformed` unless arguments come next, without a delimiter before them."""
    at = yield from source.after_white()
    if (yield from source.char(at)) not in ("{", "`"):
        raise Malformed


def skip_to(source: Source, mark: str) -> Reading[None]:
    """Take white space if ``mark`` follows it."""
    at = yield from source.after_white()
    if (yield from source.ahead(mark, at)):
        source.take(at)


def read_name(source: Source) -> Reading[str]:
    name = yield from source.run(NAME)
    if not name and not (yield from source.peek()):
        raise Cut
    return name
