"""Readers of a text that consists of calls alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ..output_parser import Cut, Malformed, Reading, Source
from ..reading.call_state import CallReader, CallState, followed
from ..reading.offers import Offers


def calls_alone(read: CallReader, offers: Offers) -> Callable[[Source], Reading[None]]:
    """Return a reader of calls that drops text after the calls, and text without any call."""

    def reader(source: Source) -> Reading[None]:
        source.keep()
        with suppress(Malformed, Cut):
            yield from followed(CallState(source, offers), read)
        source.release()
        while not source.is_ended:
            source.take_all()
            yield None

    return reader
