"""A front by hand: it talks to a replica over a link in memory, or over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretoken.api.cluster.wire.forms import WireError, ids_form, params_form
from foretoken.api.cluster.wire.messages import (
    Abort,
    Answer,
    Beat,
    Call,
    FromFront,
    FromReplica,
    Hello,
    Leaving,
    Question,
    Step,
    Submit,
    encode,
    from_front,
    from_replica,
    page_keys,
)
from foretoken.api.runtime.preprocess import children
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.interface.request import Delta, Usage
from foretoken.core.interface.sampling import Pooling

SECONDS = 60.0


def submit(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    output: Sequence[int] = (),
    index: int = 0,
    limit: int | None = None,
    num_prompt_logprobs: int = 0,
    prediction: Sequence[int] = (),
    deadline: float | None = None,
    pooling: Pooling | None = None,
) -> Submit:
    """The message of one choice of a request, as a front sends it."""
    own, seed = list(children(params))[index]
    return Submit(
        request_id=request_id,
        prompt=ids_form(prompt),
        output=ids_form(output),
        params=params_form(own),
        seed=seed,
        limit=limit,
        prediction=ids_form(prediction) if prediction else None,
        deadline=deadline,
        pooling=pooling,
        num_prompt_logprobs=num_prompt_logprobs,
    )


class MemoryLink:
    """A `FrontLink` without a socket; what passes is encoded all the same."""

    def __init__(self) -> None:
        self.is_full = self.is_closed = False
        self._to_replica: asyncio.Queue[FromFront | WireError | None] = asyncio.Queue()
        self._to_front: asyncio.Queue[FromReplica | None] = asyncio.Queue()

    async def receive(self) -> FromFront | WireError | None:
        return await self._to_replica.get()

    def send(self, message: FromReplica) -> bool:
        if not self.is_full:
            self._to_front.put_nowait(from_replica(encode(message)))
        return not self.is_full

    def close(self) -> None:
        self.is_closed = True
        self._to_front.put_nowait(None)

    def say(self, message: FromFront) -> None:
        self._to_replica.put_nowait(from_front(encode(message)))

    def fail(self, error: WireError | None) -> None:
        """Bytes that are no message, or None: the connection is closed."""
        self._to_replica.put_nowait(error)

    async def hear(self) -> FromReplica | None:
        return await self._to_front.get()


@dataclass
class Heard:
    """All that came of one request."""

    deltas: list[Delta] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for each in self.deltas for token_id in each.token_ids]

    @property
    def logprobs(self) -> list[object]:
        return [each for delta in self.deltas for each in delta.logprobs]

    @property
    def prompt_logprobs(self) -> list[object]:
        return [each for delta in self.deltas for each in delta.prompt_logprobs]

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def has_ended(self) -> bool:
        return bool(self.deltas) and self.last.terminal

    @property
    def closed_early(self) -> bool:
        return any(each.closed_early for each in self.usages)


class HandFront:
    """Keeps what a replica says; all its methods are called on one event loop."""

    def __init__(self, say: Callable[[FromFront], object]) -> None:
        self.say = say
        self.hello: Hello | None = None
        self.messages: list[FromReplica] = []
        self.heard: dict[str, Heard] = {}
        self.pages: set[bytes] = set()
        self.answers: dict[int, Answer] = {}
        self.left: str | None = None
        self.has_failed = False
        self.is_closed = False
        self._changed = asyncio.Condition()

    async def take(self, message: FromReplica | None) -> None:
        """Take a message of the replica; None: the connection is closed."""
        match message:
            case None:
                self.is_closed = True
            case Hello():
                self.hello = message
            case Step():
                self._take_step(message)
            case Answer():
                self.answers[message.call_id] = message
            case Leaving():
                self.left, self.has_failed = message.reason, message.has_failed
        if message is not None:
            self.messages.append(message)
        async with self._changed:
            self._changed.notify_all()

    def _take_step(self, step: Step) -> None:
        for request_id, delta in step.deltas:
            self.heard[request_id].deltas.append(delta)
        for request_id, usage in step.usages.items():
            self.heard[request_id].usages.append(usage)
        for news in step.pages:
            if news.is_stored:
                self.pages |= {*page_keys(news)}
            else:
                assert self.pages >= {*page_keys(news)}, "a page was dropped that was not stored"
                self.pages -= {*page_keys(news)}

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until it holds."""
        async with asyncio.timeout(SECONDS), self._changed:
            await self._changed.wait_for(holds)

    def begin(self, message: Submit) -> Heard:
        """Send a request."""
        heard = self.heard[message.request_id] = Heard()
        self.say(message)
        return heard

    async def serve(self, message: Submit) -> Heard:
        """Send a request and wait for its end."""
        heard = self.begin(message)
        await self.until(lambda: heard.has_ended)
        return heard

    def abort(self, request_id: str) -> None:
        self.say(Abort(request_id=request_id))

    async def ask(self, question: Question) -> Answer:
        """The answer to a question."""
        call_id = len(self.answers) + 1
        self.say(Call(call_id=call_id, question=question))
        await self.until(lambda: call_id in self.answers)
        return self.answers[call_id]

    def beat(self) -> None:
        self.say(Beat())
