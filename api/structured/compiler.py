"""Compile json_schema, regex, grammar or choice to a grammar, in a thread.

A caller's grammar may be expensive on purpose, so its text, its compilation and each matching step
are limited. If a grammar exceeds a limit, only its request fails.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ...core.errors import EngineDead, InvalidRequest, QueueFull
from ..text.executor import Worker
from ..text.tokenizer import Tokenizer
from ..types.sampling_params import SamplingParams
from .distinct_keys import DistinctKeysMatcher
from .ends.closer import Closer
from .ends.growth import growth_of
from .ends.hints import HintFinder
from .ends.protocols import Matcher
from .ends.token_table import TokenTable
from .grammar_text import guidance_text, json_form, source_text
from .matcher import Grammar, error_text
from .rewinding import RewindingMatcher, named_tokens
from .schemas.preparing import Preparer
from .vocabulary import Vocabulary

T = TypeVar("T")
SECONDS = 5.0  # time limit for one grammar, from the start of its compilation
MAX_PENDING = 32  # maximum number of grammars waiting to be compiled
NUM_GRAMMARS = 128  # maximum number of cached grammars
KEPT_SECONDS = 4.0  # maximum compile time of all cached grammars together
STACK_BYTES = 256 * 2**20  # large, since llguidance follows chains of rules by recursion
LIMITS = {  # limits of llguidance; matcher.py also limits the time of each grammar
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 32_768,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class _Job:
    """A grammar that is compiled once for all requests that wait for it."""

    def __init__(self, compile: Callable[[], Grammar]) -> None:
        self.future: asyncio.Future[Grammar]
        self._compile = compile
        self._began = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_begun = False
        self._num_waiting = 0

    def run(self) -> Grammar:
        """Compile the grammar, in the thread."""
        self._is_begun = True
        self._loop.call_soon_threadsafe(self._began.set)
        return self._compile()

    @property
    def is_lost(self) -> bool:
        """Whether the job ended without a grammar."""
        done = self.future.done()
        return done and (self.future.cancelled() or self.future.exception() is not None)

    async def wait(self) -> Grammar:
        """Wait for the grammar and return it.

        Raises TimeoutError if the compilation takes longer than `SECONDS`, not counting the time in
        the queue. A job that has not begun is cancelled when no request waits for it any more.
        """
        self._num_waiting += 1
        began = asyncio.create_task(self._began.wait())
        either: list[asyncio.Future[Any]] = [began, self.future]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(SECONDS):
                return await asyncio.shield(self.future)
        finally:
            began.cancel()
            self._num_waiting -= 1
            if not self._num_waiting and not self._is_begun:
                self.future.cancel()


class Grammars:
    """Compiles and caches the grammars of one model. Belongs to an event loop; uses one thread.

    The first grammar waits for the vocabulary to be read, which takes up to a second.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._model = (tokenizer, vocab_size, eos_token_ids)
        self._thread = Worker("foretoken-grammar", stack_bytes=STACK_BYTES)
        self._closed = False
        self._vocabulary: asyncio.Future[_Compiler] | None = None
        self._grammars: OrderedDict[tuple[str, str], _Job] = OrderedDict()

    def close(self) -> None:
        """Refuse the waiting jobs. The running job may finish."""
        self._closed = True
        self._thread.close()

    async def compile(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar that the answer must follow; None if the request has none.

        Raises `InvalidRequest`, which names the field, for a grammar that is invalid, too big or
        too slow, and `QueueFull` if too many grammars are waiting.
        """
        if (field := params.structured_field) is None:
            return None
        source = source_text(field, getattr(params, field))
        if self._vocabulary is None:
            self._vocabulary = self._work(self._read_vocabulary)
        compiler = await asyncio.shield(self._vocabulary)
        try:
            return await self._job(field, source, compiler).wait()
        except TimeoutError:
            raise InvalidRequest(
                f"{field} took longer than {SECONDS:g} s to compile: simplify it", param=field
            ) from None
        except asyncio.CancelledError:
            self._check_open()  # if the thread was closed, raises the error of a closed engine
            raise

    def _job(self, field: str, source: str, compiler: _Compiler) -> _Job:
        """Return the job of a grammar, which may be compiled, pending or new.

        The least recently used grammars are evicted.
        """
        key = (field, source)
        known = self._grammars.get(key)
        if known is None or known.is_lost:
            self._check_room()
            known = _Job(partial(compiler.compile, field, source))
            known.future = self._work(known.run)
            self._grammars[key] = known
        self._grammars.move_to_end(key)
        self._forget_some()
        return known

    def _forget_some(self) -> None:
        """Evict the least recently used grammars, by number and by their total compile time.

        Grammars that are slow to compile are big, so fewer of them are kept.
        """
        ended = [job.future for job in self._grammars.values() if job.future.done()]
        grammars = [each.result() for each in ended if not (each.cancelled() or each.exception())]
        seconds = sum(grammar.seconds for grammar in grammars)
        while len(self._grammars) > NUM_GRAMMARS or (seconds > KEPT_SECONDS and self._grammars):
            _, job = self._grammars.popitem(last=False)
            if job.future in ended and not (job.future.cancelled() or job.future.exception()):
                seconds -= job.future.result().seconds

    def _check_room(self) -> None:
        num_pending = sum(not job.future.done() for job in self._grammars.values())
        if num_pending >= MAX_PENDING:
            raise QueueFull(
                f"{num_pending} grammars are already waiting to be compiled; retry later"
            )

    def _read_vocabulary(self) -> _Compiler:
        return _Compiler(Vocabulary(*self._model))

    # -- the thread -----------------------------------------------------------------------------

    def _work(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Submit a job to the thread.

        It continues if its caller gives up, since other requests may need the result.
        """
        self._check_open()
        future = asyncio.wrap_future(self._thread.submit(job))
        # marks the exception as retrieved
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM is closed") from None


class _Compiler:
    """A compiler of grammars for one vocabulary. Creating it takes up to a second."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = LLTokenizer(cast(TokenizerWrapper, vocabulary))
        self._table = TokenTable(vocabulary)
        self._hints = HintFinder(vocabulary, self._table, self._tokenizer, LIMITS)
        self._preparer = Preparer(self._problem, json_form)

    def compile(self, field: str, source: str) -> Grammar:
        """Compile a grammar and find its shortest answer. Measure the compile time."""
        source, counts_keys = self._prepared(field, source)
        compile_anew = partial(self._matcher, field, source, counts_keys=counts_keys)
        began = perf_counter()
        prototype = compile_anew()
        seconds = perf_counter() - began
        hints = self._hints.hints(field, source)
        growth = growth_of(field, source, lambda leaf: len(self._hints.short_text(leaf)))
        closer = Closer(self._vocabulary, self._table, hints, growth)
        shortest = closer.shortest(prototype.deep_copy())
        return Grammar(prototype, self._vocabulary, compile_anew, closer, seconds, shortest)

    def _matcher(self, field: str, source: str, *, counts_keys: bool) -> Matcher:
        matcher = compile_grammar(field, source, self._tokenizer)
        if counts_keys and field == "json_schema":
            return DistinctKeysMatcher(matcher, self._vocabulary.texts)
        named = named_tokens(source) if field == "grammar" else frozenset()
        uncounted = named.difference(self._vocabulary.special_token_ids.tolist())
        return RewindingMatcher(matcher, uncounted) if uncounted else matcher

    def _prepared(self, field: str, source: str) -> tuple[str, bool]:
        """Return the source with its schemas prepared, and whether keys must be distinct.

        A matcher must reject duplicate keys if a schema requires a number of properties.
        """
        if field == "json_schema":
            prepared = self._preparer.prepare(json.loads(source), field)
            return json.dumps(prepared.schema), prepared.counts_keys
        return self._preparer.grammar(source, field) if field == "grammar" else (source, False)

    def _problem(self, schema: object) -> str | None:
        """Return why a JSON schema does not compile; None if it does."""
        whole = schema if isinstance(schema, Mapping) else {"anyOf": [schema]}
        text = guidance_text("json_schema", json.dumps(whole))
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))  # type: ignore[arg-type]
        if not matcher.is_error():
            matcher.compute_bitmask()
        return error_text(matcher) if matcher.is_error() else None


def compile_grammar(field: str, source: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile the text of a grammar. Raises `InvalidRequest`.

    The first two masks are computed as well, so that grammars without a match are detected and
    copies of the matcher start with warm caches.
    """
    try:
        text = guidance_text(field, source)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from None
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))  # type: ignore[arg-type]
    trial = matcher.deep_copy()
    if not trial.is_error():
        _try(trial)
    if trial.is_error():
        raise InvalidRequest(f"{field}: {error_text(trial)}", param=field)
    return matcher


def _try(matcher: LLMatcher) -> None:
    """Compute the first mask, and the mask after one token."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    for token_id in allowed.tolist():
        if matcher.is_error() or matcher.is_stopped():
            return
        if matcher.try_consume_tokens([token_id]):
            matcher.compute_bitmask()
            return
