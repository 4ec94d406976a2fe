"""A driver for any server with OpenAI's completions or chat completions.

It relies on nothing but the standard. Fields that a server may not know (``ignore_eos``, usage in
each chunk) are tried once before the load and omitted if they are rejected, which the report notes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from .event_stream import EventParser
from .figures import Record, apportion
from .generator import Content, Corpus, Job, Piece
from .http import Failure, Http

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REFUSED = (400, 422)
MAX_RAW_BYTES = 2000  # Bytes of an answer that are kept to show its error message.
DROPS = (  # Fields to drop one by one, in this order, and the note about each.
    ("continuous_usage_stats", "tokens are assigned to chunks by their characters"),
    ("ignore_eos", "answers may end early, so lengths are not exact"),
    ("stream_options", "each chunk counts as one token"),
    ("max_tokens", "max_completion_tokens is sent instead"),
)
Encode = Callable[[str], Awaitable[list[int]]]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        """The generated text, reasoning included."""
        if self.delta is None:
            return self.text or ""
        thought = self.delta.reasoning_content or self.delta.reasoning or ""
        return thought + (self.delta.content or "")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Speculation(msgspec.Struct):
    proposed_tokens: int | None = None
    accepted_tokens: int | None = None
    verify_steps: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    speculation: _Speculation | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Answer:
    """Reads one stream and writes its figures into the record."""

    def __init__(self, record: Record, watch: Callable[[Record], None] | None = None) -> None:
        self.text: list[str] = []
        self.counting: str | None = None  # How the tokens of each chunk were counted.
        self.lens: list[int] = []  # Characters of each chunk.
        self.is_finished = False  # Whether [DONE] or a finish_reason has arrived.
        self.raw = b""  # First bytes of the answer, for errors that are not streams.
        self._record, self._watch = record, watch
        self._parser = EventParser()
        self._num_reported = 0  # Number of tokens in the last usage.
        self._is_counted = True  # Whether the server reported the tokens of every chunk.
        self._usage: _Usage | None = None

    def feed(self, now: float, data: bytes) -> None:
        """Read bytes of the stream. Raises `Failure` for an error in it."""
        if len(self.raw) < MAX_RAW_BYTES:
            self.raw += data
        try:
            events = self._parser.feed(data)
        except ValueError as error:
            raise Failure("unreadable stream", str(error)) from None
        for event in events:
            if event.data == "[DONE]":
                self.is_finished = True
            else:
                self._read(now, event.data)

    def _read(self, now: float, data: str) -> None:
        try:
            chunk = decode_chunk(data)
        except msgspec.DecodeError as error:
            raise Failure("unreadable stream", str(error)) from None
        if bytes(chunk.error) not in (b"", b"null"):
            raise Failure("error in the stream", bytes(chunk.error).decode()[:200])
        words = "".join(choice.words for choice in chunk.choices)
        if words:
            self._add(now, words, chunk.usage)
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._record.finish_reason, self.is_finished = choice.finish_reason, True
        self._usage = chunk.usage or self._usage

    def _add(self, now: float, words: str, usage: _Usage | None) -> None:
        record = self._record
        reported = None if usage is None else usage.completion_tokens
        self._is_counted = self._is_counted and reported is not None
        record.times.append(now)
        record.counts.append(1 if reported is None else max(0, reported - self._num_reported))
        self._num_reported = reported or self._num_reported
        self.text.append(words)
        self.lens.append(len(words))
        if self._watch is not None:
            self._watch(record)

    def finish(self) -> None:
        """Complete the record with usage, and with tokens per chunk if the server reported none."""
        if not self.is_finished:
            raise Failure("connection cut", "the stream ended without a finish_reason")
        record, usage = self._record, self._usage
        if usage is None:
            return
        record.prompt_tokens = usage.prompt_tokens
        details, speculation = usage.prompt_tokens_details, usage.speculation
        record.cached_tokens = None if details is None else details.cached_tokens
        if speculation is not None:
            record.proposed_tokens = speculation.proposed_tokens
            record.accepted_tokens = speculation.accepted_tokens
            record.verify_steps = speculation.verify_steps
        if self._is_counted:
            self.counting = "reported by the server for each chunk"
        elif usage.completion_tokens is not None:
            record.counts[:] = apportion(usage.completion_tokens, self.lens)
            self.counting = "final usage, assigned to chunks by their characters"


class OpenAIDriver:
    """Sends jobs to one endpoint of one server."""

    def __init__(
        self,
        http: Http,
        model: str,
        endpoint: str,
        *,
        temperature: float = 0.0,
        timeout: float = 600.0,
        corpus: Corpus,
        encode: Encode | None = None,
    ) -> None:
        """Set the driver up.

        ``encode`` turns answers into token ids; by default, corpus text replaces them.
        """
        self.http = http
        self.path = PATHS[endpoint]
        self.notes: list[str] = []
        self.num_stand_ins = 0
        self.countings: Counter[str] = Counter()  # Number of answers by `Answer.counting`.
        self._uncounted: list[tuple[Record, Answer]] = []
        self._corpus = corpus
        self._is_chat = endpoint == "chat"
        self._encode = encode
        self._timeout = timeout
        self._body: dict[str, object] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "temperature": temperature,
            "ignore_eos": True,
        }
        self._length_field = "max_tokens"

    async def ask(self, job: Job, record: Record) -> Content:
        """Stream one answer. Raises `Failure`."""
        answer = Answer(record, job.watch)
        body = msgspec.json.encode(self._request(job))
        try:
            async with asyncio.timeout(self._timeout):
                status = await self.http.post(self.path, body, answer.feed)
        except TimeoutError:
            raise Failure("timeout", f"no complete answer after {self._timeout:g} s") from None
        except asyncio.CancelledError:
            self._uncounted.append((record, answer))
            raise
        if status != 200:
            raise Failure(f"HTTP {status}", answer.raw.decode("utf-8", "replace")[:200])
        answer.finish()
        if answer.counting is None:
            self._uncounted.append((record, answer))
        else:
            self.countings[answer.counting] += 1
        return await self._content("".join(answer.text), record)

    async def settle(self) -> None:
        """Count the tokens of answers without usage, if possible by tokenising their text."""
        for record, answer in self._uncounted:
            if self._encode is not None and answer.text:
                count = len(await self._encode("".join(answer.text)))
                record.counts[:] = apportion(count, answer.lens)
        if self._uncounted:
            how = "one per chunk" if self._encode is None else "counted by tokenising the text"
            self.countings[f"no usage, or cut by the client: {how}"] += len(self._uncounted)
        self._uncounted.clear()

    async def probe(self, job: Job) -> None:
        """Find the fields that the server accepts.

        Raises `Failure` if it serves no request at all.
        """
        drops = iter(DROPS)
        while True:
            try:
                await self.ask(job, Record("probe", 0.0, times=[], counts=[]))
                return
            except Failure as failure:
                if failure.kind not in [f"HTTP {status}" for status in REFUSED]:
                    raise
                drop = next(drops, None)
                if drop is None:
                    raise
                self._drop(*drop)

    def _drop(self, name: str, what_then: str) -> None:
        self.notes.append(f"{name} was rejected by the server: {what_then}")
        if name == "continuous_usage_stats":
            self._body["stream_options"] = {"include_usage": True}
        elif name == "max_tokens":
            self._length_field = "max_completion_tokens"
        else:
            del self._body[name]

    def _request(self, job: Job) -> dict[str, object]:
        body = {**self._body, self._length_field: job.output_len}
        if job.speculation is not None:
            body["speculation"] = job.speculation
        if self._is_chat:
            return {**body, "messages": messages(job.prompt)}
        return {**body, "prompt": joined(job.prompt)}

    async def _content(self, text: str, record: Record) -> Content:
        if self._is_chat:
            return text
        if self._encode is not None:
            return await self._encode(text)
        self.num_stand_ins += 1
        return self._corpus.cut(("answer", self.num_stand_ins), record.num_tokens)


def joined(prompt: Sequence[Piece]) -> Content:
    """Join the pieces of a prompt, which are all text or all token ids."""
    if all(isinstance(piece.content, list) for piece in prompt):
        return [token_id for piece in prompt for token_id in piece.content]  # type: ignore[misc]
    return "".join(piece.content for piece in prompt)  # type: ignore[misc]


def messages(prompt: Sequence[Piece]) -> list[dict[str, object]]:
    """Return the messages of a chat; adjacent ones of one role are merged, as templates require."""
    found: list[dict[str, object]] = []
    for piece in prompt:
        if found and found[-1]["role"] == piece.role:
            found[-1]["content"] = f"{found[-1]['content']}\n{piece.content}"
        else:
            found.append({"role": piece.role, "content": piece.content})
    return found
