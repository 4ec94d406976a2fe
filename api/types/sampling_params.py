"""SamplingParams: the options of a request, checked once when they are constructed.

A field that the request leaves out is filled with the value that the model recommends. The defaults
of such fields are instances of `LeftOut`, which distinguishes them from equal values given by the
caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from msgspec import Struct

from ...core.errors import InvalidRequest, shown
from ...core.interface.sampling import RECOMMENDED, TokenSamplingParams
from ...core.options.checks import (
    MAX_INT,
    Bound,
    Bounds,
    as_tuple,
    check_bool,
    check_integer,
    check_number,
    require,
)
from ...core.options.settings import setting

MAX_N = 64
MAX_STOP_BYTES = 2**16  # UTF-8 bytes of all stop strings together
MAX_WORDS = 1024  # entries of bad_words
MAX_WORD_CHARS = 256
MAX_DEPTH = 64  # draft tokens of one request in one step
MAX_PREDICTION_CHARS = 2**17
MAX_PREDICTION_IDS = 2**16
# maximum length of json_schema, regex and grammar each, and of all choices together
MAX_GRAMMAR_CHARS = 2**18
MAX_CHOICES = 4096
NO_TEXTS: tuple[str, ...] = ()
STRUCTURED_FIELDS = ("json_schema", "regex", "grammar", "choice")  # at most one is set
NO_STRUCTURE = (None,) * len(STRUCTURED_FIELDS)
_read_structured = attrgetter(*STRUCTURED_FIELDS)
_read_recommended = attrgetter(*RECOMMENDED)
NO_RECOMMENDATIONS = (None,) * len(RECOMMENDED)


class LeftOut:
    """Mark of a value that the request left out; `SamplingDefaults` may replace it."""

    __slots__ = ()


class LeftOutFloat(LeftOut, float):
    """A float that the request left out."""

    __slots__ = ()


class LeftOutInt(LeftOut, int):
    """An integer that the request left out."""

    __slots__ = ()


_ONE, _ZERO, _OFF = LeftOutFloat(1.0), LeftOutFloat(0.0), LeftOutInt(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(TokenSamplingParams):
    """Parameters of a request. An invalid value raises `InvalidRequest`, which names its field.

    - ``max_tokens``: None means up to the end of the context. ``prompt_only``: compute the prompt,
      and its ``prompt_logprobs`` if requested, but generate no token.
    - ``temperature``: 0 is greedy. ``top_k=0`` and ``top_p=1`` disable these two filters.
    - ``temperature``, ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty``: if left out, the
      model's recommended values, else the defaults of this class.
    - ``seed``: with a seed, the output depends only on the model, the prompt and these parameters.
    - ``logprobs``, ``prompt_logprobs``: number of alternatives to report in addition to the token.
    - ``speculation``: "auto", "off" or a fixed draft depth in tokens; None: the engine's setting.
    - ``json_schema`` (an object or its JSON text), ``regex``, ``grammar`` (Lark or GBNF),
      ``choice``: at most one of them, for structured output. Such an answer ends when it is
      complete, even with ``ignore_eos`` or ``min_tokens``.
    - ``close_early``: near the token limit, allow only tokens after which an answer with a
      ``json_schema`` or a ``choice`` can still be completed. On by default.
    - ``prediction``: the caller's guess of the answer, as text or token ids. It is used as a draft:
      it makes the answer faster and never changes it.
    - ``lora``: the name of a loaded adapter; None: the base model.
    - ``kv_budget``: KV entries to keep for the answer, in tokens, at least 256, if KV eviction is
      enabled (``kv_evict``); None: the engine's setting. Not combinable with ``prompt_logprobs``.
    - ``priority``: lower runs first, within the engine's ``max_priority``.
    - ``deadline``: seconds after which the request is aborted.
    """

    temperature: float = setting(
        _ONE,
        "sampling temperature (the model's, else 1; 0: greedy)",
        "T",
        group="sampling",
        is_basic=True,
    )
    top_p: float = setting(
        _ONE,
        "cumulative probability of the most likely tokens to sample from (the model's, else 1)",
        "P",
        is_basic=True,
    )
    top_k: int = setting(
        _OFF,
        "number of most likely tokens to sample from (the model's, else 0: all)",
        "K",
        is_basic=True,
    )
    min_p: float = setting(
        _ZERO,
        "minimum probability relative to the most likely token (the model's, else 0)",
        "P",
    )
    repetition_penalty: float = setting(
        _ONE,
        "penalty factor for tokens in the prompt or answer (the model's, else 1: none)",
    )
    n: int = 1
    stop: str | Sequence[str] = setting(
        NO_TEXTS, "text that ends the answer; repeatable", "TEXT", is_basic=True
    )
    ignore_eos: bool = setting(False, "continue after an end-of-sequence token")
    seed: int | None = setting(
        None,
        "seed of the sampling; the same request with the same seed gets the same answer "
        "(default: random)",
        is_basic=True,
    )
    bad_words: Sequence[str] = NO_TEXTS
    json_schema: Mapping[str, object] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    close_early: bool = True
    prediction: str | Sequence[int] | None = None
    speculation: Literal["auto", "off"] | int | None = None
    cache_salt: str | None = None
    lora: str | None = None
    priority: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        """Normalise sequences to tuples and check every field."""
        # super() fails here: a dataclass with slots replaces its class
        TokenSamplingParams.__post_init__(self)
        self._normalise()
        self._check_numbers_of_request()
        self._check_strings()
        self._check_prediction()
        self._check_speculation()
        self._check_structured_output()

    @property
    def structured_field(self) -> str | None:
        """The structured-output field that is set, if any."""
        if _read_structured(self) == NO_STRUCTURE:
            return None
        return next(name for name in STRUCTURED_FIELDS if getattr(self, name) is not None)

    def _normalise(self) -> None:
        if self.stop is not NO_TEXTS:
            stop = (self.stop,) if isinstance(self.stop, str) else self.stop
            object.__setattr__(self, "stop", as_tuple("stop", stop))
        if self.bad_words is not NO_TEXTS:
            object.__setattr__(self, "bad_words", as_tuple("bad_words", self.bad_words))
        if self.choice is not None:
            object.__setattr__(self, "choice", as_tuple("choice", self.choice))
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", as_tuple("prediction", self.prediction))

    def _check_numbers_of_request(self) -> None:
        BOUNDS.check(self)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("close_early", self.close_early)

    def _check_strings(self) -> None:
        if self.stop:
            _check_stop(self.stop)
        if words := self.bad_words:
            fits = len(words) <= MAX_WORDS
            require(fits, "bad_words", f"must have at most {MAX_WORDS} texts, not {len(words)}")
            for text in words:
                fits = isinstance(text, str) and 0 < len(text) <= MAX_WORD_CHARS
                require(fits, "bad_words", f"must have texts of 1 to {MAX_WORD_CHARS} characters")
        if (salt := self.cache_salt) is not None:
            require(isinstance(salt, str), "cache_salt", "must be a string")
            require(
                0 < len(salt) <= 1024,
                "cache_salt",
                f"must have 1 to 1024 characters, not {len(salt)}",
            )
            require(_is_unicode(salt), "cache_salt", "must be valid Unicode")
            # Namespaces of adapters begin with NUL.
            require(not salt.startswith("\0"), "cache_salt", "must not begin with a NUL")
        if self.lora is not None:
            require(isinstance(self.lora, str), "lora", "must be a string")

    def _check_prediction(self) -> None:
        prediction = self.prediction
        if isinstance(prediction, str):
            fits = len(prediction) <= MAX_PREDICTION_CHARS
            require(fits, "prediction", f"must have at most {MAX_PREDICTION_CHARS} characters")
        elif prediction:
            fits = len(prediction) <= MAX_PREDICTION_IDS
            require(fits, "prediction", f"must have at most {MAX_PREDICTION_IDS} token ids")
            # Compare types and extremes only: a Python loop would block the event loop for tens of
            # milliseconds.
            require({*map(type, prediction)} == {int}, "prediction", "must be a text or token ids")
            check_integer("prediction", min(prediction), 0, MAX_INT)
            check_integer("prediction", max(prediction), 0, MAX_INT)

    def _check_structured_output(self) -> None:
        """Check types and sizes. The content is checked when the grammar is compiled."""
        if _read_structured(self) == NO_STRUCTURE:
            return
        given = [name for name in STRUCTURED_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{given[1]} cannot be combined with {given[0]}", param=given[1])
        schema = self.json_schema
        if schema is not None and not isinstance(schema, Mapping):
            require(isinstance(schema, str), "json_schema", "must be a JSON object or its text")
            _grammar_text("json_schema", schema)
        _grammar_text("regex", self.regex)
        _grammar_text("grammar", self.grammar)
        if self.choice is not None:
            _choices(self.choice)

    def _check_speculation(self) -> None:
        depth = self.speculation
        if isinstance(depth, str):
            message = f"must be 'auto', 'off' or a number of draft tokens, not {shown(depth)}"
            require(depth in ("auto", "off"), "speculation", message)
        elif depth is not None:
            check_integer("speculation", depth, 0, MAX_DEPTH)


class SamplingDefaults(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Default values for fields that a request leaves out; None: the default of `SamplingParams`.

    A value out of range raises `InvalidRequest`, which names its field.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    origin: str = ""  # source of the values, for display

    def __post_init__(self) -> None:
        """Check every value."""
        TokenSamplingParams(**self.given)

    @property
    def given(self) -> dict[str, Any]:
        """The values that are not None, by field."""
        values = ((name, getattr(self, name)) for name in RECOMMENDED)
        return {name: value for name, value in values if value is not None}

    @property
    def in_force(self) -> dict[str, Any]:
        """The values of all five fields, by field, for a request that leaves all five out."""
        params = TokenSamplingParams(**self.given)
        return {name: getattr(params, name) for name in RECOMMENDED}

    def fill(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with these values for the fields that were left out."""
        if _read_recommended(self) == NO_RECOMMENDATIONS:
            return params
        found = {
            name: value
            for name in RECOMMENDED
            if (value := getattr(self, name)) is not None
            and isinstance(getattr(params, name), LeftOut)
        }
        return replace(params, **found) if found else params


NO_DEFAULTS = SamplingDefaults()
BOUNDS = Bounds(
    Bound("n", check_integer, 1, MAX_N),
    Bound("priority", check_integer, -(2**31), 2**31 - 1),
    Bound("seed", check_integer, -(2**63), 2**64 - 1),
    Bound("deadline", check_number, 0.0, 1e9),
)


def num_stop_bytes(stop: Sequence[str]) -> int:
    """Return the total size of the stop strings in UTF-8 bytes."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in stop)


def _check_stop(stop: Sequence[object]) -> None:
    texts = [text for text in stop if isinstance(text, str) and text]
    require(len(texts) == len(stop), "stop", "must have only non-empty texts")
    size = num_stop_bytes(texts)
    message = f"must have at most {MAX_STOP_BYTES} bytes in total, not {size}"
    require(size <= MAX_STOP_BYTES, "stop", message)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _grammar_text(param: str, text: object) -> None:
    require(text is None or isinstance(text, str), param, "must be a text")
    fits = text is None or 0 < len(text) <= MAX_GRAMMAR_CHARS  # type: ignore[arg-type]
    require(fits, param, f"must have 1 to {MAX_GRAMMAR_CHARS} characters")


def _choices(choice: Sequence[str]) -> None:
    require(0 < len(choice) <= MAX_CHOICES, "choice", f"must have 1 to {MAX_CHOICES} texts")
    require(
        all(isinstance(text, str) and text for text in choice),
        "choice",
        "must have only non-empty texts",
    )
    fits = sum(map(len, choice)) <= MAX_GRAMMAR_CHARS
    require(fits, "choice", f"must have at most {MAX_GRAMMAR_CHARS} characters in total")
