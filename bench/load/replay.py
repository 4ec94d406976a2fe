"""Replays recorded sessions of agents: how many tokens of each turn a server computes again.

The *possible* hits of a turn are the prompt tokens that the session has computed before: the prompt
of the turn that it continues, and that turn's answer except for its last token, in whole pages of
the server's cache. The *share* is the part of them that the server read from its cache; it is 1 if
nothing is computed again. The *expected* time to a first token is the time of the turn's other
prompt tokens at the session's prefill rate, plus one step. The rate is measured on the session's
first request, which finds an empty cache: each session has a cache salt of its own.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any
from uuid import uuid4

import msgspec

from .event_stream import EventParser
from .http import Failure, Http
from .recording import Call, Item, Request, Said, Step, steps, with_answers
from .workloads import Lengths

MAX_RAW_BYTES = 2000  # Bytes of an answer that are kept to show its error message.
LENGTHS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
LEFT_OUT = ("max_tokens", "max_completion_tokens", "thinking", "output_config", "reasoning")
"""Fields of the answer's length, which the replay sets itself."""


class Turn(msgspec.Struct, kw_only=True):
    """One request of a session as it was served.

    ``goes_on_from``: index of the request that this one continues; None without such a request.
    """

    request: int
    goes_on_from: int | None
    prompt_tokens: int
    cached_tokens: int
    spliced_tokens: int
    output_tokens: int
    possible_tokens: int | None
    share: float | None
    ttft_ms: float
    step_ms: float | None  # Median gap between parts of the answer.
    expected_ttft_ms: float | None = None


class Session(msgspec.Struct, kw_only=True):
    """A session; ``error`` is the reason why it ended early."""

    name: str
    requests: int
    turns: list[Turn]
    prefill_tokens_per_s: float | None = None
    error: str | None = None

    @property
    def possible(self) -> int:
        """Prompt tokens that could have been read from the cache."""
        return sum(turn.possible_tokens or 0 for turn in self.turns)

    @property
    def hit(self) -> int:
        """Prompt tokens that could have been read from the cache and were."""
        return sum(min(turn.cached_tokens, turn.possible_tokens or 0) for turn in self.turns)

    @property
    def most_missed(self) -> int:
        """Maximum number of tokens that a turn computed but could have read from the cache."""
        missed = [(turn.possible_tokens or 0) - turn.cached_tokens for turn in self.turns]
        return max([0, *missed])


class Replay:
    """Sends sessions to one server.

    ``temperature``: None keeps the recorded one. ``page_size``: tokens of a page of the server's
    cache.
    """

    def __init__(
        self,
        http: Http,
        model: str,
        *,
        output_len: Lengths,
        temperature: float | None,
        timeout: float,
        seed: int,
        page_size: int,
    ) -> None:
        self._http, self._model, self._page_size = http, model, page_size
        self._output_len, self._temperature = output_len, temperature
        self._timeout, self._seed = timeout, seed

    async def warm_up(self, count: int) -> None:
        """Send short requests, so that the first prefill is not measured on a cold process."""
        for _ in range(count):
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
            request = Request(path="/v1/chat/completions", body=body)
            try:
                await self._ask(request.path, self._body(Step(request, None, {}), {}, 8, "warm-up"))
            except Failure as failure:
                raise SystemExit(
                    f"the warm-up request to {request.path} failed: {failure}"
                ) from None

    async def session(self, name: str, requests: Sequence[Request]) -> Session:
        """Send one session, one request after another, until one fails."""
        rng, salt = Random(f"{self._seed}/{name}"), f"{name}-{uuid4().hex}"
        found = Session(name=name, requests=len(requests), turns=[])
        said: dict[int, Said] = {}
        for index, step in enumerate(steps(requests)):
            body = self._body(step, said, self._output_len.draw(rng), salt)
            try:
                heard = await self._ask(step.request.path, body)
            except Failure as failure:
                found.error = f"request {index + 1}: {failure}"
                break
            said[index] = heard.said
            before = None if step.parent is None else found.turns[step.parent]
            found.turns.append(turn_of(index, step, heard, before, self._page_size))
        _expect(found)
        return found

    def _body(self, step: Step, said: Mapping[int, Said], output_len: int, salt: str) -> Item:
        path = step.request.path
        body = {k: v for k, v in step.request.body.items() if k not in LEFT_OUT}
        body |= {"model": self._model, "stream": True, "cache_salt": salt}
        body[LENGTHS[path]] = output_len
        body["input" if path == "/v1/responses" else "messages"] = with_answers(step, said)
        if path == "/v1/chat/completions":
            body["stream_options"] = {"include_usage": True}
        if step.calls:  # The recorded model called a tool, so this one has to.
            body["tool_choice"] = {"type": "any"} if path == "/v1/messages" else "required"
        if self._temperature is not None:
            body["temperature"] = self._temperature
        return body

    async def _ask(self, path: str, body: Item) -> Heard:
        heard = Heard(READERS[path])
        try:
            async with asyncio.timeout(self._timeout):
                status = await self._http.post(path, msgspec.json.encode(body), heard.feed)
        except TimeoutError:
            raise Failure("timeout", f"no complete answer after {self._timeout:g} s") from None
        if status != 200:
            raise Failure(f"HTTP {status}", heard.raw.decode("utf-8", "replace")[:300])
        if not heard.times:
            raise Failure("no answer", "the stream ended without any content")
        return heard


def turn_of(index: int, step: Step, heard: Heard, before: Turn | None, page_size: int) -> Turn:
    """Return the turn of a served request; ``before`` is the turn that it continues."""
    possible = None
    # An answer's last token has no KV, and a prompt's last token is computed for its logits.
    if before is not None:
        known = min(before.prompt_tokens + before.output_tokens, heard.prompt_tokens) - 1
        possible = known // page_size * page_size
    gaps = [later - earlier for earlier, later in zip(heard.times, heard.times[1:], strict=False)]
    return Turn(
        request=index,
        goes_on_from=step.parent,
        prompt_tokens=heard.prompt_tokens,
        cached_tokens=heard.cached_tokens,
        spliced_tokens=heard.spliced_tokens,
        output_tokens=heard.output_tokens,
        possible_tokens=possible,
        share=min(heard.cached_tokens, possible) / possible if possible else None,
        ttft_ms=1e3 * (heard.times[0] - heard.sent),
        step_ms=1e3 * statistics.median(gaps) if gaps else None,
    )


def _expect(session: Session) -> None:
    """Set the expected times of first tokens."""
    gaps = [turn.step_ms for turn in session.turns if turn.step_ms is not None]
    if not gaps:
        return
    step, first = statistics.median(gaps), session.turns[0]
    seconds = (first.ttft_ms - step) / 1e3
    if seconds <= 0:
        return
    session.prefill_tokens_per_s = rate = (first.prompt_tokens - first.cached_tokens) / seconds
    for turn in session.turns:
        if turn.possible_tokens is not None and rate:
            new = turn.prompt_tokens - turn.possible_tokens
            turn.expected_ttft_ms = 1e3 * new / rate + step


# -- answers ------------------------------------------------------------------------------------


class Heard:
    """An answer while it arrives."""

    def __init__(self, read: Reader) -> None:
        self.said = Said()
        self.sent = time.perf_counter()
        self.times: list[float] = []  # Arrival times of the parts that the model generated.
        self.prompt_tokens = self.cached_tokens = self.spliced_tokens = self.output_tokens = 0
        self.raw = b""
        self._calls: dict[object, Call] = {}
        self._read = read
        self._parser = EventParser()

    def feed(self, now: float, data: bytes) -> None:
        """Read bytes of the stream. Raises `Failure` if it is not a stream of this API."""
        if len(self.raw) < MAX_RAW_BYTES:
            self.raw += data
        try:
            for event in self._parser.feed(data):
                if event.data != "[DONE]" and self._read(self, msgspec.json.decode(event.data)):
                    self.times.append(now)
        except (ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
            raise Failure("unreadable stream", repr(error)) from None

    def call(self, key: object, call_id: str = "", name: str = "") -> Call:
        """Return the tool call with this key; create it at its first use."""
        if key not in self._calls:
            self._calls[key] = Call(call_id, name)
            self.said.calls.append(self._calls[key])
        return self._calls[key]


Reader = Callable[[Heard, dict[str, Any]], bool]
"""Reads one event; returns whether it has generated content."""


def _fail(event: Mapping[str, Any]) -> None:
    if event.get("error"):
        raise Failure("error in the stream", str(event["error"])[:200])


def read_chat(heard: Heard, event: dict[str, Any]) -> bool:
    """Read a chunk of chat completions; return whether it has generated content."""
    _fail(event)
    if usage := event.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        heard.prompt_tokens, heard.output_tokens = (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        heard.cached_tokens = details.get("cached_tokens") or 0
        heard.spliced_tokens = details.get("spliced_tokens") or 0
    is_part = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        heard.said.text += delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        is_part = bool(is_part or delta.get("content") or thought or delta.get("tool_calls"))
        for part in delta.get("tool_calls") or ():
            function = part.get("function") or {}
            call = heard.call(part["index"], part.get("id") or "", function.get("name") or "")
            call.arguments += function.get("arguments") or ""
    return is_part


def read_message(heard: Heard, event: dict[str, Any]) -> bool:
    """Read an event of Anthropic's Messages; return whether it has generated content."""
    _fail(event)
    usage = event.get("usage") or (event.get("message") or {}).get("usage")
    if usage:
        cached = usage.get("cache_read_input_tokens") or 0
        written = usage.get("cache_creation_input_tokens") or 0
        if "input_tokens" in usage:
            heard.prompt_tokens = usage["input_tokens"] + cached + written
            heard.cached_tokens = cached
        heard.output_tokens = usage.get("output_tokens") or heard.output_tokens
        heard.spliced_tokens = usage.get("spliced_tokens") or heard.spliced_tokens
    block = event.get("content_block")
    if block is not None and block["type"] == "tool_use":
        heard.call(event["index"], block["id"], block["name"])
        return True
    delta = event.get("delta") or {}
    heard.said.text += delta.get("text") or ""
    if delta.get("partial_json"):
        heard.call(event["index"]).arguments += delta["partial_json"]
    is_delta: bool = event["type"] == "content_block_delta"
    return is_delta and delta["type"] != "signature_delta"


def read_response(heard: Heard, event: dict[str, Any]) -> bool:
    """Read an event of Responses; the last one has the complete answer.

    Returns whether the event has generated content.
    """
    _fail(event)
    kind: str = event["type"]
    response = event.get("response") or {}
    if kind == "response.failed":
        raise Failure("error in the stream", str(response.get("error"))[:200])
    if kind in ("response.completed", "response.incomplete"):
        usage = response["usage"]
        details = usage.get("input_tokens_details") or {}
        heard.prompt_tokens, heard.output_tokens = usage["input_tokens"], usage["output_tokens"]
        heard.cached_tokens = details.get("cached_tokens") or 0
        heard.spliced_tokens = details.get("spliced_tokens") or 0
        for item in response["output"]:
            _take_item(heard, item)
    return kind.endswith(".delta")


def _take_item(heard: Heard, item: Mapping[str, Any]) -> None:
    if item["type"] == "message":
        heard.said.text += "".join(block.get("text") or "" for block in item["content"])
    elif item["type"] == "function_call":
        heard.call(item["call_id"], item["call_id"], item["name"]).arguments = item["arguments"]


READERS: dict[str, Reader] = {
    "/v1/chat/completions": read_chat,
    "/v1/messages": read_message,
    "/v1/responses": read_response,
}


# -- tables -------------------------------------------------------------------------------------


def session_rows(server: str, sessions: Sequence[Session]) -> list[dict[str, object]]:
    """Return a row for each session."""
    return [
        {
            "session": session.name,
            "server": server,
            "requests": f"{len(session.turns)} of {session.requests}",
            "longest prompt": max((turn.prompt_tokens for turn in session.turns), default=0),
            "hit of possible": _share(session.hit, session.possible),
            "most missed in a turn": session.most_missed,
            **_times(session),
        }
        for session in sessions
    ]


def summary(session: Session) -> dict[str, object]:
    """Return a session for the JSON."""
    share = session.hit / session.possible if session.possible else None
    own = {"possible_tokens": session.possible, "hit_tokens": session.hit, "share": share}
    own["most_missed_tokens"] = session.most_missed
    return {**msgspec.to_builtins(session), **own}


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"


def _times(session: Session) -> dict[str, object]:
    """Return the times to first tokens of continued turns, and how much later than expected."""
    later = [turn for turn in session.turns if turn.expected_ttft_ms is not None]
    if not later:
        return {"first token p50, ms": "-", "over the expected p50, ms": "-", "max, ms": "-"}
    over = [turn.ttft_ms - (turn.expected_ttft_ms or 0.0) for turn in later]
    return {
        "first token p50, ms": f"{statistics.median(turn.ttft_ms for turn in later):.0f}",
        "over the expected p50, ms": f"{statistics.median(over):.0f}",
        "max, ms": f"{max(over):.0f}",
    }
