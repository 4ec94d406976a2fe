"""An engine without a model, at the seam that the api package builds on.

It says what it is told to say, as many tokens a step as it is told, and steps by itself or by hand.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from foretoken.api.build.built import Built
from foretoken.api.runtime.serving_engine import ServingEngine
from foretoken.core.engine.inbox import TokenStream
from foretoken.core.errors import EngineDead, ForetokenError, InvalidRequest, PromptTooLong
from foretoken.core.interface.output import TokenLogprob
from foretoken.core.interface.request import Delta, FinishReason, Request
from foretoken.core.model.pooling import PoolingSpec
from foretoken.core.telemetry.observers import EngineObserver
from foretoken.core.telemetry.overview import RecentRequest
from foretoken.core.telemetry.spec_decode_stats import Load

MAX_MODEL_LEN = 256


def echo(request: Request) -> Iterable[int]:
    """The prompt, turned by the seed, again and again: siblings differ, and it never ends."""
    prompt = [i for i in request.tokens[: request.prompt_len] if i not in request.stop_ids]
    return itertools.islice(itertools.cycle(prompt), request.sampling.seed % len(prompt), None)


@dataclass
class Live:
    request: Request
    stream: TokenStream
    tokens: Iterator[int]


@dataclass
class FakeLimits:
    max_running: int = 8
    max_queued: int = 32


@dataclass
class FakeMetrics:
    observers: list[EngineObserver] = field(default_factory=list)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    async def refresh(self) -> None:
        pass

    def render(self) -> tuple[bytes, str]:
        return b"foretoken:x 1\n", "text/plain"


class FakeEngine:
    """A `ServingEngine`: serves requests as `core.engine.engine.Engine` does."""

    def __init__(self, answers: Callable[[Request], Iterable[int]] = echo) -> None:
        self.answers = answers
        self.tokens_per_step = 1
        self.sources = ["fake"]  # who drafts
        self.by_hand = False  # no step but by `step`
        self.refusal: ForetokenError | None = None  # raised by `submit`
        self.row_error: str | ForetokenError | None = None  # ends each request at its second step
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.fetched: list[Request] = []
        self.submitted = threading.Semaphore(0)
        self.was_aborted = threading.Semaphore(0)
        self.dumped: list[dict[str, object]] = []
        self.flushed: list[tuple[str | None, ...]] = []
        self.ended_sessions: list[str] = []
        self.expected: list[tuple[str, str, str | None]] = []
        self.failure: BaseException | None = None
        self.draining = False
        self.alive = False
        self.hung = False
        self.readiness: str | None = None
        self.metrics = FakeMetrics()
        self.limits = FakeLimits()
        self.max_model_len = MAX_MODEL_LEN
        self.page_size, self.num_pages = 1, 10
        self._live: dict[str, Live] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def now(self) -> float:
        return time.monotonic()

    @property
    def load(self) -> Load:
        return Load(num_running=len(self._live), kv_usage=0.5)

    async def start(self) -> None:
        self.alive = True
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        self.draining = True
        try:
            async with asyncio.timeout(drain_seconds):
                while self._live:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        self.alive = False
        if self._task is not None:
            self._task.cancel()
        for live in self._live.values():
            live.stream.push(Delta(error=EngineDead("the engine was closed")))
        self._live.clear()

    def die(self) -> None:
        """Stop as after steps that failed."""
        self.alive, self.failure = False, RuntimeError("secret")
        for live in self._live.values():
            live.stream.push(Delta(error=EngineDead("steps failed; the engine stopped")))
        self._live.clear()

    def fetch(self, request: Request) -> None:
        self.fetched.append(request)

    def submit(self, request: Request) -> TokenStream:
        if self.draining or not self.alive:
            raise EngineDead("the engine is not running")
        self.check(request)
        if self.refusal is not None:
            raise self.refusal
        if request.request_id in self._live:
            raise InvalidRequest(f"request_id {request.request_id} is in use", param="request_id")
        request.usage.prompt_tokens = request.prompt_len
        wanted = request.sampling.params.max_tokens
        most = self.max_model_len if wanted is None else request.prompt_len + wanted
        request.max_len = min(most, self.max_model_len)
        stream = TokenStream(request)
        tokens = iter(self.answers(request))
        self._live[request.request_id] = Live(request, stream, tokens)
        self.requests.append(request)
        self.submitted.release()
        self._work.set()
        return stream

    def check(self, request: Request) -> None:
        if not request.tokens:
            raise InvalidRequest("prompt must have at least one token", param="prompt")
        if request.prompt_len >= self.max_model_len:
            raise PromptTooLong(request.prompt_len, self.max_model_len - 1)

    def abort(self, request_id: str) -> None:
        """Takes effect between two steps, as the real one's."""
        if request_id in self._live:
            asyncio.get_running_loop().call_soon(self._end, request_id)

    def _end(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            live.stream.push(Delta(finish_reason=FinishReason.ABORT))
            self.aborted.append(request_id)
            self.was_aborted.release()

    async def audit(self) -> dict[str, object]:
        return {"ok": True, "pages": {"total": 10}, "requests": {"running": len(self._live)}}

    def report(self, reason: str) -> dict[str, object]:
        return {"reason": reason}

    def dump(self, report: dict[str, object]) -> None:
        self.dumped.append(report)

    async def flush_cache(self, *namespaces: str | None) -> int:
        self.flushed.append(namespaces)
        return 3

    async def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:
        self.flushed.append((namespace,))
        return 2

    async def end_session(self, session: str) -> bool:
        self.ended_sessions.append(session)
        return len(self.ended_sessions) == 1

    def expect_turn(self, session: str, label: str, namespace: str | None = None) -> None:
        self.expected.append((session, label, namespace))

    async def room_for(self, request: Request) -> int:
        return 999

    async def cache_info(self, namespace: str | None = None) -> dict[str, object]:
        return {"total_pages": 10, "free_pages": 999, "evictable_pages": 0}

    async def overview(self, finished: Iterable[RecentRequest] = ()) -> dict[str, object]:
        return {"running": len(self._live), "requests": [each.request_id for each in finished]}

    async def _run(self) -> None:
        while True:
            if not self._live or self.by_hand:
                self._work.clear()
                await self._work.wait()
            if not self.by_hand:
                self.step()
            await asyncio.sleep(0)

    def step(self) -> None:
        """One step of all requests."""
        for request_id, live in list(self._live.items()):
            delta = self._feed(live)
            if delta.terminal:
                del self._live[request_id]
            live.stream.push(delta)

    def _feed(self, live: Live) -> Delta:
        request, delta = live.request, Delta()
        if request.sampling.pooling is not None:
            numbers = array("f", map(float, request.tokens[-2:]))
            return Delta(pooled=numbers, finish_reason=FinishReason.STOP)
        params = request.sampling.params
        if params.prompt_logprobs is not None and request.num_output == 0:
            ids = request.tokens[1 : request.prompt_len]
            delta.prompt_logprobs = [_logprob(i, params.prompt_logprobs) for i in ids]
        if not request.sampling.generates:
            delta.finish_reason = FinishReason.LENGTH
            return delta
        if self.row_error is not None and request.num_output:
            error = self.row_error
            return Delta(
                error=error if isinstance(error, ForetokenError) else ForetokenError(error)
            )
        for token_id in itertools.islice(live.tokens, self.tokens_per_step):
            request.tokens.append(token_id)
            delta.token_ids.append(token_id)
            if params.logprobs is not None:
                delta.logprobs.append(_logprob(token_id, params.logprobs))
            self._end_at(request, token_id, delta)
            if delta.terminal:
                break
        self._count(request, delta)
        return delta

    def _count(self, request: Request, delta: Delta) -> None:
        """All tokens of a step but its last were drafted, by each source in turn."""
        usage, proposed = request.usage, self.tokens_per_step - 1
        names = [*itertools.islice(itertools.cycle(self.sources), proposed)]
        accepted = names[: max(0, len(delta.token_ids) - 1)]
        delta.num_proposed, delta.proposed_sources = proposed, names
        delta.accepted_sources = accepted
        delta.token_sources = [*accepted, ""][: len(delta.token_ids)]
        usage.completion_tokens += len(delta.token_ids)
        usage.verify_steps += 1
        usage.draft_steps += bool(proposed)
        usage.proposed_tokens += proposed
        usage.accepted_tokens += len(accepted)
        steps, served = usage.steps_by_accepted, len(accepted)
        steps[served] = steps.get(served, 0) + 1
        for counts, sources in (
            (usage.proposed_by_source, names),
            (usage.accepted_by_source, accepted),
        ):
            for source in sources:
                counts[source] = counts.get(source, 0) + 1

    @staticmethod
    def _end_at(request: Request, token_id: int, delta: Delta) -> None:
        if token_id in request.stop_ids:
            delta.finish_reason = FinishReason.STOP
            explicit = token_id in request.sampling.params.stop_token_ids
            delta.stop_reason = token_id if explicit else None
        elif stop := request.on_token and request.on_token(token_id):
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, stop
        elif len(request.tokens) >= request.max_len:
            delta.finish_reason = FinishReason.LENGTH


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = tuple((token_id + k, -0.25 - k) for k in range(num_top))
    return TokenLogprob(token_id, -0.25, top)


def ends_of(vocab: Mapping[str, int]) -> list[int]:
    """The tokens of a test's vocabulary that end an answer."""
    return [vocab[name] for name in ("<|im_end|>", "<|endoftext|>") if name in vocab]


_Built = msgspec.defstruct("_Built", [(name, Any) for name in Built.__struct_fields__])


def make_built(engine: ServingEngine, folder: Path, *eos: int, vocab_size: int) -> Any:
    """Make the result of `api.build.engine_builder.build`, without importing torch.

    It has all fields of a `Built`, and tests may change them.
    """
    built = Built(
        engine=engine,
        path=folder,
        name="tiny/model",
        aliases=frozenset({folder.name}),
        vocab_size=vocab_size,
        max_model_len=MAX_MODEL_LEN,
        drafters=("radix",),
        pooling=PoolingSpec(dimensions=2, embeds=True),
        eos_token_ids=frozenset(eos),
        settings={"draft": "auto,/models/head", "dump_dir": "/dumps", "kv_tokens": 4096},
    )
    return _Built(*msgspec.structs.astuple(built))
