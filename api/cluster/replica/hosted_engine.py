"""HostedEngine: a replica's engine, whose requests are made from a front's messages."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from ....core.interface.extras.request_extras import Transfer
from ....core.interface.extras.transfers import PageOffer
from ....core.interface.request import Delta, Request
from ....core.telemetry.overview import MAX_REQUESTS, RecentRequest
from ....radix_cache import HeldPages
from ...build.adapter_loader import AdapterFolder
from ...build.built import Built
from ...runtime.serving_engine import ServingEngine
from ...structured.compiler import Grammars
from ...structured.matcher import GrammarMatcher
from ...text.detokenizer import AnswerText
from ...text.tokenizer import Tokenizer
from ...types.sampling_params import SamplingParams
from ..wire.forms import WireError, ids_of, params_of
from ..wire.greeting import hello_of
from ..wire.messages import (
    Audit,
    CacheInfo,
    EndSession,
    FlushCache,
    FlushPrefix,
    Hello,
    Load,
    LoadAdapter,
    Metrics,
    Overview,
    Question,
    Report,
    Submit,
    UnloadAdapter,
    body_form,
    body_of,
    facts_form,
    request_of,
)
from .hosted_adapters import HostedAdapters
from .page_log import PageLog

TOKENS_AT_ONCE = 256  # output tokens that are read before other tasks run
PART_TOKENS = 256  # least number of newly computed prompt tokens that another replica reads at once
USAGE_PERIOD = 32  # deltas of a request after which its usage is sent again


class EngineLoad(Protocol):
    """An engine's current load."""

    @property
    def num_running(self) -> int:
        """Number of requests that the engine's steps compute."""

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that running requests hold."""


class LocalEngine(ServingEngine, Protocol):
    """An engine in this process."""

    @property
    def load(self) -> EngineLoad:
        """The engine's current load. Cheap."""

    def fetch(self, request: Request) -> None:
        """Load the pages offered to a request into the prefix cache; compute nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class HostedRequest:
    """A request of a front, and the state of its messages."""

    request: Request
    text: AnswerText  # watches for stop strings
    num_deltas: int = 0
    closed_early: bool = False  # the value that the front knows
    part: HeldPages | None = None  # latest part of the prompt held for another replica
    num_parted: int = 0  # computed prompt tokens at the last attempt to hold a part

    def needs_usage(self, delta: Delta) -> bool:
        """Whether to send the request's usage with this delta. Counts the delta.

        The usage is sent with the first and the last delta, when ``closed_early`` changes, and
        every `USAGE_PERIOD` deltas, because the client may leave before the last one.
        """
        usage, constraint = self.request.usage, self.request.sampling.constraint
        if isinstance(constraint, GrammarMatcher):
            usage.closed_early = constraint.closed_early(self.request.num_output)
        is_news = usage.closed_early != self.closed_early
        is_due = self.num_deltas % USAGE_PERIOD == 0
        self.num_deltas, self.closed_early = self.num_deltas + 1, usage.closed_early
        return is_due or is_news or delta.terminal


@dataclass(kw_only=True, eq=False)
class HostedEngine:
    """An engine with its model's tokenizer and grammars.

    ``pages`` logs the changes of the engine's prefix cache.
    """

    built: Built[LocalEngine]
    tokenizer: Tokenizer
    grammars: Grammars
    pages: PageLog
    finished: deque[RecentRequest] = field(default_factory=lambda: deque(maxlen=MAX_REQUESTS))

    @property
    def engine(self) -> LocalEngine:
        """The engine in this process."""
        return self.built.engine

    @property
    def load(self) -> Load:
        """The engine's current load, as a message."""
        load = self.engine.load
        return Load(running=load.num_running, waiting=load.num_waiting, kv_usage=load.kv_usage)

    @cached_property
    def hello(self) -> Hello:
        """The replica's greeting, whose tokenizer hash the front compares with its own."""
        return hello_of(self.built, tokenizer=self.tokenizer.fingerprint(), pid=os.getpid())

    @cached_property
    def adapters(self) -> HostedAdapters:
        """Adapters that were loaded for the front."""
        return HostedAdapters(self.built.adapters)

    # -- requests -------------------------------------------------------------------------------

    async def make(self, submit: Submit) -> HostedRequest:
        """Return the request of a message, with its output so far.

        Raises `WireError` for a message that no front sends, and the errors of compiling a grammar.
        """
        params = params_of(submit.params)
        grammar = await self.grammars.compile(params)
        await self.tokenizer.prepare_stops(params.stop)
        prompt, output = ids_of(submit.prompt), ids_of(submit.output)
        text = AnswerText(
            self.tokenizer.detokenizer(prompt, submit.shown_ids),
            stops=tuple(params.stop),
            min_tokens=params.min_tokens,
        )
        request = request_of(
            submit,
            params,
            eos_token_ids=self.built.eos_token_ids,
            grammar=grammar,
            on_token=text.add_token if text.watches else None,
            adapter=self.adapters.find(submit.adapter),
        )
        if output and not request.sampling.compares:  # a recorded answer may be any output
            self._check_incomplete(request, params)
            if text.watches and await _stops(text, output):
                raise WireError("the request's output already contains a stop string")
        return HostedRequest(request=request, text=text)

    def offer_of(self, submit: Submit) -> PageOffer | None:
        """Return another replica's pages that a message offers, or None.

        The offer must be taken or ended. Raises `WireError` for a message that no front sends.
        """
        transfers = self.built.transfers
        if transfers is None or submit.transfer is None:
            return None
        return transfers.read(body_of(submit.transfer)).offer

    def hand_over(self, submit: Submit, request: Request, offer: PageOffer | None) -> None:
        """Let the engine hold the prompt's pages for another replica, or read them from one."""
        transfers = self.built.transfers
        if transfers is None:
            return
        if offer is not None and not transfers.check(offer, len(request.tokens)):
            offer = None
        request.transfer = Transfer(hands_over=submit.hands_over, offer=offer)

    async def fetch(self, submit: Submit, offer: PageOffer) -> None:
        """Read the pages of a prompt that another replica still computes.

        Raises `WireError`, and the errors of compiling a grammar; the caller must then call
        `end_offer`.
        """
        request = (await self.make(submit)).request
        self.hand_over(submit, request, offer)
        if request.transfer.offer is not None:
            self.engine.fetch(request)

    def part(self, hosted: HostedRequest) -> bytes | None:
        """Hold the prompt's pages computed so far; return the parameters for reading them.

        Returns None if there are too few new tokens, if an earlier part is still being read, or if
        there is no room.
        """
        transfers, request = self.built.transfers, hosted.request
        is_worth_it = request.num_computed - hosted.num_parted >= PART_TOKENS
        if transfers is None or not (request.transfer.hands_over and is_worth_it):
            return None
        if request.num_computed >= request.prompt_len or request.transfer.handed is not None:
            return None  # the engine soon holds the whole prompt
        if hosted.part is not None and transfers.is_held(hosted.part):
            return None  # the earlier part is still being read
        hosted.num_parted = request.num_computed  # if there is no room, try again later
        hosted.part = transfers.hold_part(request)
        return None if hosted.part is None else body_form(transfers.write(request, hosted.part))

    def end_offer(self, offer: PageOffer | None) -> None:
        """Let the other replica free offered pages that the engine did not take."""
        if self.built.transfers is not None and offer is not None:
            self.built.transfers.end(offer)

    def drop(self, name: str) -> None:
        """Free held pages of a prompt that no other replica will read."""
        if self.built.transfers is not None:
            self.built.transfers.release(name)

    def handed(self, request: Request) -> bytes | None:
        """Return the parameters for reading a held prompt, as JSON; None if it is not held."""
        transfers = self.built.transfers
        if transfers is None or request.transfer.handed is None:
            return None
        return body_form(transfers.write(request))

    def _check_incomplete(self, request: Request, params: SamplingParams) -> None:
        """Raise `WireError` unless a further token may follow the request's output so far."""
        if request.sampling.pooling is not None:
            raise WireError("the request has an output but generates nothing")
        room = self.built.max_model_len - request.prompt_len
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        if request.num_output >= most or request.tokens[-1] in request.stop_ids:
            raise WireError("the request's output is already complete")

    def note_end(self, request: Request) -> None:
        """Record a request that has ended, for `Overview`."""
        self.finished.append(RecentRequest.of(request))

    # -- questions ------------------------------------------------------------------------------

    async def answer(self, question: Question) -> int | bytes:
        """Return the answer to a question. Raises the engine's errors, and `WireError`."""
        engine = self.engine
        match question:
            case FlushCache():
                return await engine.flush_cache(*question.namespaces)
            case FlushPrefix():
                return await engine.flush_prefix(ids_of(question.tokens), question.namespace)
            case EndSession(session=session):
                return int(await engine.end_session(session))
            case CacheInfo():
                return body_form(await engine.cache_info(question.namespace))
            case Overview():
                return body_form(await engine.overview(self.finished))
            case Audit():
                return body_form(await engine.audit())
            case Metrics():
                return engine.metrics.render()[0]
            case Report():
                return body_form(engine.report(question.reason))
            case LoadAdapter(name=name, number=number, path=path, below=below):
                folder = AdapterFolder(Path(path), None if below is None else Path(below))
                return facts_form(await self.adapters.load(name, number, folder))
            case UnloadAdapter(number=number):
                self.adapters.unload(number)
                return 0


async def _stops(text: AnswerText, output: array[int]) -> bool:
    """Pass an output to ``text``, and return whether a stop string ends it.

    Other tasks run after every `TOKENS_AT_ONCE` tokens.
    """
    for start in range(0, len(output), TOKENS_AT_ONCE):
        if _add_tokens(text, output[start : start + TOKENS_AT_ONCE]):
            return True
        await asyncio.sleep(0)
    return False


def _add_tokens(text: AnswerText, token_ids: Iterable[int]) -> bool:
    stopped = any(text.add_token(token_id) is not None for token_id in token_ids)
    text.take()
    return stopped
