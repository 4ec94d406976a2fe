"""From json_schema, regex, grammar or choice to a compiled grammar, off the event loop.

JSON is written without free white space: a model can never loop on blanks. What comes from a caller
may be made to be expensive, so there are limits on the text, on the work of compiling it and on
the work of each step behind it; what exceeds them fails that request alone.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from ..core.errors import EngineDead, InvalidRequest
from ..core.params import FORMS, MAX_GRAMMAR_CHARS, SamplingParams
from .matcher import Grammar, Vocabulary, error_text
from .tokenizer import Tokenizer

T = TypeVar("T")
SECONDS = 5.0  # for one grammar
NUM_GRAMMARS = 128  # compiled ones that are kept
STACK_BYTES = (
    256 * 2**20
)  # address space of the thread: long chains of rules are walked by recursion
JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
LIMITS = {  # about 10 ms a step at worst, and some 60 MB of lexer states
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_items_in_row": 5_000,
    "max_lexer_states": 32_768,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class Grammars:
    """Compiles and keeps the grammars of one model. Belongs to an event loop; one thread works.

    The first grammar waits until the vocabulary is read, which takes up to a second.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._model = (tokenizer, vocab_size, eos_token_ids)
        self._thread = ThreadPoolExecutor(1, "foretoken-grammar")
        self._is_started = False
        self._closed = False
        self._vocabulary: asyncio.Future[tuple[Vocabulary, LLTokenizer]] | None = None
        self._grammars: OrderedDict[tuple[str, str], asyncio.Future[Grammar]] = OrderedDict()

    def close(self) -> None:
        """Stop the thread; what it works on is finished first, what waits for it is refused."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def compile(self, params: SamplingParams) -> Grammar | None:
        """The grammar that the answer must follow, if any.

        Raises `InvalidRequest` naming the field for one that is wrong, too big or too slow.
        """
        field = next((name for name in FORMS if getattr(params, name) is not None), None)
        if field is None:
            return None
        source = _source(field, getattr(params, field))
        if self._vocabulary is None:
            self._vocabulary = self._work(self._read_vocabulary)
        vocabulary, tokenizer = await self._wait(self._vocabulary, None)
        return await self._wait(self._grammar(field, source, vocabulary, tokenizer), field)

    def _grammar(
        self, field: str, source: str, vocabulary: Vocabulary, tokenizer: LLTokenizer
    ) -> asyncio.Future[Grammar]:
        """One that is there or under way, else a new one; those not used for longest go."""
        key = (field, source)
        known = self._grammars.get(key)
        if known is None or (known.done() and (known.cancelled() or known.exception())):
            job = partial(compile_grammar, field, source, tokenizer)
            known = self._work(lambda: Grammar(job(), vocabulary))
            self._grammars[key] = known
        self._grammars.move_to_end(key)
        while len(self._grammars) > NUM_GRAMMARS:
            self._grammars.popitem(last=False)
        return known

    def _read_vocabulary(self) -> tuple[Vocabulary, LLTokenizer]:
        vocabulary = Vocabulary(*self._model)
        return vocabulary, LLTokenizer(cast(TokenizerWrapper, vocabulary))

    # -- the thread -----------------------------------------------------------------------------

    def _work(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Begin a job; it goes on when its caller gives up, for others may want the result."""
        self._check_open()
        if not self._is_started:
            self._is_started = True
            self._start()
        future = asyncio.get_running_loop().run_in_executor(self._thread, job)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
        return future

    def _start(self) -> None:
        """The stack of a thread is fixed when it begins; others begin as they always did."""
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread.submit(int)
        finally:
            threading.stack_size(before)

    async def _wait(self, future: asyncio.Future[T], field: str | None) -> T:
        try:
            async with asyncio.timeout(None if field is None else SECONDS):
                return await asyncio.shield(future)
        except TimeoutError:
            raise InvalidRequest(f"{field} took too long to compile", param=field) from None
        except asyncio.CancelledError:
            if future.cancelled():  # and not its caller
                self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM is closed") from None


def json_rule(schema: Mapping[str, object] | str) -> str:
    """The text that stands for JSON of this schema inside a Lark ``grammar``.

    Raises `InvalidRequest` for what is no JSON object.
    """
    text = _json_text("json_schema", schema)
    value = json.loads(text)
    if not isinstance(value, dict):
        value = {"anyOf": [value]}
    return f"%json {json.dumps({**value, 'x-guidance': JSON_FORM})}"


def lark_rules(grammar: str) -> str:
    """A ``grammar`` as Lark, whichever way it was written. Raises `InvalidRequest`."""
    try:
        return _lark(grammar)
    except ValueError as error:
        raise InvalidRequest(f"grammar: {error}", param="grammar") from None


def lark_text(text: str) -> str:
    """A string literal of a Lark ``grammar``."""
    return json.dumps(text, ensure_ascii=False)


# -- source texts ---------------------------------------------------------------------------------


def _source(field: str, value: object) -> str:
    """One text that says it all, of bounded length: what a compiled grammar is known by."""
    if field == "json_schema":
        text = _json_text(field, value)
    elif field == "choice":
        text = json.dumps(value)
    else:
        text = str(value)
    if len(text) > MAX_GRAMMAR_CHARS:
        message = f"{field} takes at most {MAX_GRAMMAR_CHARS} characters"
        raise InvalidRequest(message, param=field)
    return text


def _json_text(field: str, schema: object) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequest(f"{field} is not JSON, or nested too deeply", param=field) from None
    if not isinstance(value, Mapping | bool):
        raise InvalidRequest(f"{field} must be a JSON object", param=field)
    return text


def _guidance(field: str, source: str) -> str:
    """The source as llguidance takes it. Raises ValueError."""
    if field == "json_schema":
        return LLMatcher.grammar_from_json_schema(source, overrides=JSON_FORM)  # type: ignore[arg-type]
    if field == "regex":
        return LLMatcher.grammar_from_regex(_ESCAPE.sub(_ascii_digit, source))
    if field == "choice":
        texts = " | ".join(map(lark_text, json.loads(source)))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    return LLMatcher.grammar_from_lark(_lark(source))


def _ascii_digit(escape: re.Match[str]) -> str:
    """Digits are those of ASCII, as callers mean them; Rust's regexes know hundreds."""
    return {"\\d": "[0-9]", "\\D": "[^0-9]"}.get(escape[0], escape[0])


def _lark(source: str) -> str:
    if not _GBNF_RULE.search(source):
        return source
    try:
        return gbnf_to_lark(source)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:
        raise ValueError(f"not GBNF: {error}") from None


def compile_grammar(field: str, source: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile the text of a form. Raises `InvalidRequest`.

    Also asks for the first mask: so an impossible grammar shows, and copies begin warm.
    """
    try:
        text = _guidance(field, source)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from None
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))  # type: ignore[arg-type]
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidRequest(f"{field}: {error_text(matcher)}", param=field)
    return matcher
