"""The server as its clients know it: where it is, what its answers must be, how it is doing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from .answers import Stream, Told, read_whole
from .book import Book
from .requests import Known, Texts, canaries, featured, plain, wordy
from .wire import OK, Address, Link, OnBody, Reply, ask, request_bytes

Phase = Literal["up", "draining", "killed"]
LIMIT = 120.0  # seconds after which an answer without an end is a hang
TOO_MANY, UNAVAILABLE = 429, 503
MAX_IDLE_LINKS = 16
Actor = Callable[["World", random.Random], Awaitable[None]]


@dataclass(slots=True)
class World:
    """World of a soak: the state that all clients share."""

    address: Address
    key: str
    book: Book
    texts: Texts
    phase: Phase = "up"
    until: float = 0.0  # the wave's end, on the loop's clock
    solo: dict[str, Told] = field(default_factory=dict)  # by name
    canaries: list[Known] = field(default_factory=list)
    plain: list[Known] = field(default_factory=list)
    wordy: list[Known] = field(default_factory=list)
    featured: list[Known] = field(default_factory=list)
    _links: list[Link] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The requests that are known follow from the texts."""
        self.canaries, self.plain = canaries(self.texts), plain(self.texts)
        self.wordy, self.featured = wordy(self.texts), featured(self.texts)

    @property
    def left(self) -> float:
        """Seconds of the wave."""
        return max(0.0, self.until - asyncio.get_running_loop().time())

    # -- asking ---------------------------------------------------------------------------------

    def request(self, method: str, path: str, body: object = None) -> bytes:
        """With the key."""
        return request_bytes(method, path, body, key=self.key)

    async def send(
        self, request: bytes, *, on_body: OnBody | None = None, link: Link | None = None
    ) -> Reply:
        """A request on a connection of its own, or on a kept one."""
        keep = self._links.append if len(self._links) < MAX_IDLE_LINKS else None
        return await ask(self.address, request, limit=LIMIT, link=link, on_body=on_body, keep=keep)

    def kept_link(self) -> Link | None:
        """A connection that served before, if there is one."""
        return self._links.pop() if self._links else None

    def drop_links(self) -> None:
        """Close the idle ones."""
        for link in self._links:
            link.close()
        self._links.clear()

    async def get(self, path: str) -> Reply:
        """A small answer, on a connection of its own."""
        return await ask(self.address, self.request("GET", path), limit=LIMIT)

    async def learn(self) -> None:
        """Learn what each known request says alone; raises SystemExit if it says nothing."""
        for known in [*self.canaries, *self.plain, *self.wordy, *self.featured]:
            stream = Stream(known.dialect)
            request = self.request("POST", known.path, known.cold())
            reply = await self.send(request, on_body=stream.feed)
            if reply.status != OK or stream.told.fault() or stream.told.error:
                why = f"{reply.status} {reply.ended} {reply.body[:300]!r} {stream.told.fault()}"
                raise SystemExit(f"the idle server does not answer {known.name}: {why}")
            self.solo[known.name] = stream.told

    async def ask_known(
        self,
        who: str,
        known: Known,
        rng: random.Random,
        *,
        stream: bool | None = None,
    ) -> tuple[Reply, Told | None]:
        """Ask one of the known requests in some way; everything about the answer is checked."""
        stream, began = rng.random() < 0.75 if stream is None else stream, self.phase
        reader = Stream(known.dialect) if stream else None
        reply = await self.send(
            self.request("POST", known.path, known.varied(rng, stream=stream)),
            on_body=None if reader is None else reader.feed,
            link=self.kept_link() if rng.random() < 0.5 else None,
        )
        self.judge(who, reply, began)
        told = _told(known, reply, reader)
        if told is not None:
            self.judge_end(who, known, reply, told)
            if reply.ended == "whole" and told.error is None:
                self.judge_words(who, known, told)
        return reply, told

    # -- judging --------------------------------------------------------------------------------

    def judge(self, who: str, reply: Reply, began: Phase, *allowed: int) -> bool:
        """Check the status of any answer; whether it is a 200."""
        status, book, up = reply.status, self.book, began == self.phase == "up"
        book.answer(who, str(status) if reply.ended == "whole" else f"{reply.ended} {status or ''}")
        told = f"{who}: {reply.ended} {status}, {reply.why or reply.body[:300]!r}"
        book.check("hang", reply.ended != "hang", told)
        if reply.ended == "refused" or (reply.ended == "cut" and not status):
            book.check("there", not up, told)
        elif status == TOO_MANY:
            book.check("retry-after", _has_retry_after(reply), f"{told} {reply.fields}")
        elif status == UNAVAILABLE:
            is_fine = (not up or status in allowed) and _has_retry_after(reply)
            book.check("5xx", is_fine, f"{told} {reply.fields}")
        elif reply.ended != "hang":
            book.check("5xx", status < 500, told)
            book.check("status", status >= 500 or status in (OK, *allowed), told)
        return status == OK

    def judge_end(self, who: str, known: Known, reply: Reply, told: Told) -> None:
        """I4: one terminal, unless the server was killed in the middle."""
        was_killed = self.phase == "killed" and reply.ended == "cut"
        fault = None if was_killed or reply.ended == "hang" else told.fault()
        if fault is None and reply.ended == "cut" and not was_killed:
            fault = "the connection was cut"
        self.book.check("I4", fault is None, f"{who}, {known.name}: {fault}")
        is_expected = told.error is None or self.phase != "up" or "deadline" in told.error
        self.book.check("5xx", is_expected, f"{who}, {known.name}: in the stream: {told.error}")

    def judge_words(self, who: str, known: Known, told: Told) -> None:
        """I5 to I8: the words are those of the idle server."""
        book, solo = self.book, self.solo[known.name]
        same = told.same_as(solo)
        what = f"{who}, {known.name}: {_difference(solo, told)}"
        book.check("I5", same, what)
        if told.proposed_tokens:
            book.check("I6", same, what)
        if told.cached_tokens:
            book.check("I7", same, what)
        self.judge_length(who, known, told)

    def judge_length(self, who: str, known: Known, told: Told) -> None:
        """I8: not a token too many, nothing after a stop."""
        most = known.max_tokens * known.num_choices
        is_short = told.completion_tokens <= most
        self.book.check("I8", is_short, f"{who}, {known.name}: {told.completion_tokens} > {most}")
        beyond = [stop for stop in known.stops if stop in told.text]
        self.book.check("I8", not beyond, f"{who}, {known.name}: {beyond} in {told.text!r}")

    def judge_beginning(self, who: str, known: Known, told: Told) -> None:
        """I5 of an answer that was cut short: what came of it is right."""
        whole = self.solo[known.name].text
        is_right = whole.startswith(told.text)
        self.book.check("I5", is_right, f"{who}, {known.name}: {told.text!r} begins not {whole!r}")


def _told(known: Known, reply: Reply, reader: Stream | None) -> Told | None:
    """Return the content of a whole answer with status 200; None of any other."""
    if reply.status != OK:
        return None
    if reader is not None:
        return reader.told
    return read_whole(known.dialect, reply.body) if reply.ended == "whole" else None


def _has_retry_after(reply: Reply) -> bool:
    seconds = reply.fields.get("retry-after", "")
    return seconds.isdigit() and 1 <= int(seconds) <= 60


def _difference(solo: Told, told: Told) -> str:
    return (
        f"alone {dict(solo.texts)!r} {solo.reasons}, now {dict(told.texts)!r} {told.reasons},"
        f" {told.cached_tokens} tokens cached, {told.proposed_tokens} proposed"
    )
