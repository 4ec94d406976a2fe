"""ReplicaLink: a front's state of one replica, and checks of the replica's messages."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field

from ....core.errors import EngineDead
from ....core.interface.extras.adapter import Adapter
from ....core.interface.extras.token_comparison import WIDTH
from ....core.interface.output import TokenLogprob
from ....core.interface.request import Delta, FinishReason, Request
from ...types.results import Body
from ..wire.forms import WireError
from ..wire.messages import Answer, Call, FromFront, Hello, Load, Question
from .live_request import LiveRequest

CALL_SECONDS = 30.0  # timeout of a call; an audit waits for the end of a step
NUM_ENDED = 4096  # ended requests whose late deltas are still accepted
MAX_REASON = 200  # characters of a replica's text in the front's log
NO_LOAD = Load(running=0, waiting=0, kv_usage=0.0)


@dataclass(slots=True, eq=False)
class ReplicaLink:
    """The front's state of one replica, from the replica's greeting to its loss.

    ``requests`` are the requests that the replica serves now; `Dispatcher` maintains them.
    """

    peer: bytes
    number: int  # numbered in the order of arrival; never reused
    hello: Hello
    since: float  # time of arrival on the front's clock
    role: str | None = None  # prefill, decode or both; None: it transfers no KV
    load: Load = NO_LOAD
    unready: str | None = None  # why it takes no requests, by its own report
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    adapters: set[Adapter] = field(default_factory=set)  # adapters that it has loaded
    num_served: int = 0  # requests that ended at this replica
    num_silent_beats: int = 0  # beats sent since the replica's last message
    _ended: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_ENDED))
    _calls: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    _call_ids: itertools.count[int] = field(default_factory=itertools.count)
    _num_calls: int = 0

    def __str__(self) -> str:
        return f"replica {self.number} (pid {self.hello.pid})"

    @property
    def capacity(self) -> int:
        """Number of requests that the replica accepts, running and waiting ones together."""
        return self.hello.max_running + self.hello.max_queued

    def takes(self, request: Request) -> bool:
        """Whether the replica has room for another request, and has the request's adapter."""
        adapter = request.extras.adapter
        has_adapter = adapter is None or adapter in self.adapters
        return has_adapter and len(self.requests) < self.capacity

    def describe(self, now: float, owed: int) -> Body:
        """Return a row for lists of replicas.

        ``owed``: number of tokens left to compute for its requests.
        """
        return {
            "number": self.number,
            "pid": self.hello.pid,
            "model": self.hello.name,
            "release": self.hello.release,
            "kernels": self.hello.kernels,
            "state": self.unready or "ready",
            "seconds": round(now - self.since, 3),
            "requests": len(self.requests),
            "served": self.num_served,
            "running": self.load.running,
            "waiting": self.load.waiting,
            "kv_usage": self.load.kv_usage,
            "owed_tokens": owed,
            "max_running": self.hello.max_running,
            "max_queued": self.hello.max_queued,
            "total_pages": self.hello.num_pages,
        }

    # -- messages of the replica ----------------------------------------------------------------

    def request_of(self, request_id: str) -> LiveRequest | None:
        """Return the request of a delta, or None if the request has ended.

        Raises `WireError` for an unknown request.
        """
        live = self.requests.get(request_id)
        if live is None and request_id not in self._ended:
            raise WireError("the replica sent tokens for a request that it does not serve")
        return live

    def check_tokens(self, delta: Delta, live: LiveRequest) -> None:
        """Raise `WireError` for impossible tokens, log-probabilities or pooled numbers."""
        num_tokens, vocab = len(delta.token_ids), self.hello.vocab_size
        logprobs = (*delta.logprobs, *delta.prompt_logprobs)
        if max((*delta.token_ids, *map(_highest, logprobs)), default=0) >= vocab:
            raise WireError(f"the replica sent a token id outside the vocabulary of {vocab}")
        if len(live.request.tokens) + num_tokens > live.request.max_len:
            raise WireError("the replica sent more tokens than the request may have")
        asked = live.request.sampling.params.logprobs is not None
        if len(delta.logprobs) != num_tokens * asked or len(delta.token_sources) != num_tokens:
            raise WireError(
                "the replica sent log-probabilities or draft sources that do not match its tokens"
            )
        _check_pooled(delta, live, self.hello.pooling.dimensions)

    def forget(self, request_id: str) -> None:
        """Remove a request; later deltas of this request are ignored."""
        if (live := self.requests.pop(request_id, None)) is not None:
            self._ended.append(request_id)
            self.num_served += not live.request.extras.is_idle_prefill

    # -- calls ----------------------------------------------------------------------------------

    def ask(self, question: Question) -> tuple[FromFront, asyncio.Future[Answer]]:
        """Return a message that asks a question, and the future of its answer."""
        call_id = self._num_calls = next(self._call_ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        future.add_done_callback(lambda _: self._calls.pop(call_id, None))
        return Call(call_id=call_id, question=question), future

    def answered(self, answer: Answer) -> None:
        """Pass an answer to its caller, or drop it if the caller no longer waits.

        Raises `WireError` for an answer to a call that was not made.
        """
        if answer.call_id > self._num_calls:
            raise WireError("the replica sent an answer to a call that was not made")
        future = self._calls.get(answer.call_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail_calls(self) -> None:
        """Fail all open calls with `EngineDead`."""
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(EngineDead(f"{self} is lost"))


def _check_pooled(delta: Delta, live: LiveRequest, dimensions: int) -> None:
    """Raise `WireError` unless the delta has the pooled numbers that the request wants."""
    pooling = live.request.sampling.pooling
    has_stopped = pooling is not None and delta.finish_reason is FinishReason.STOP
    may_pool = pooling is not None and (has_stopped or pooling.compares)
    is_wrong = delta.pooled is not None and not may_pool
    if is_wrong or (has_stopped and delta.pooled is None) or (pooling and delta.token_ids):
        raise WireError("the replica sent tokens or pooled values that the request does not want")
    if pooling is not None and pooling.compares and len(delta.pooled or ()) % WIDTH:
        raise WireError("the replica sent an incomplete comparison of a token")
    if pooling is not None and delta.pooled is not None and not pooling.compares:
        wanted = sum(map(len, pooling.rows)) or dimensions
        if len(delta.pooled) != wanted:
            raise WireError(f"the replica sent {len(delta.pooled)} pooled values, not {wanted}")


def _highest(logprob: TokenLogprob) -> int:
    return max((logprob.token_id, *(token_id for token_id, _ in logprob.top)))
