"""SamplingParams: the options of a request, checked once, when they are constructed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import InvalidRequest

MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_LISTED = 1024  # stop_token_ids, bad_words
MAX_ALLOWED = 2**14
MAX_DEPTH = 64  # draft tokens of one request in one step
MAX_PREDICTION_CHARS = 2**17
MAX_PREDICTION_IDS = 2**16
MAX_INT = 2**31 - 1
MAX_GRAMMAR_CHARS = 2**18  # of json_schema, regex, grammar, or all of choice
MAX_CHOICES = 4096
FORMS = ("json_schema", "regex", "grammar", "choice")  # one at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Every bad value raises `InvalidRequest` naming its field.

    ``max_tokens=None`` means up to the end of the context; ``temperature=0`` is greedy; ``top_k=0``
    and ``top_p=1`` are off. With a ``seed`` the output is a function of the model, the prompt and
    these parameters alone. ``logprobs`` and ``prompt_logprobs`` are the number of alternatives
    wanted beside the token itself. ``speculation``: "auto", "off" or a fixed depth in tokens.
    One of ``json_schema`` (an object or its text), ``regex``, ``grammar`` (Lark or GBNF) and
    ``choice`` may give the answer its form. Such an answer ends where it is complete, whatever
    ``ignore_eos`` and ``min_tokens`` say.
    ``prediction``: the caller's own guess at the answer, as text or token ids; it is drafted from,
    so it can make the answer faster and never another one.
    ``priority``: lower runs first; the engine's ``max_priority`` bounds it. ``deadline``: seconds
    after which the request is aborted.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    json_schema: Mapping[str, object] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    prediction: str | Sequence[int] | None = None
    speculation: Literal["auto", "off"] | int | None = None
    cache_salt: str | None = None
    priority: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        """Normalise sequences to tuples and check every field."""
        self._normalise()
        self._check_numbers()
        self._check_token_ids()
        self._check_strings()
        self._check_prediction()
        self._check_speculation()
        self._check_form()

    def _normalise(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop))
        for name in ("stop_token_ids", "bad_words"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            ids = _tuple("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", ids)
        if self.choice is not None:
            object.__setattr__(self, "choice", _tuple("choice", self.choice))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", _tuple("prediction", self.prediction))

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _require(self.top_p > 0, "top_p", "must be above 0")
        _integer("top_k", self.top_k, -1, MAX_INT)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("min_tokens", self.min_tokens, 0, MAX_INT)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", "must be true or false")
        self._check_optional_numbers()

    def _check_optional_numbers(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_INT)
            _require(self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.deadline is not None:
            _number("deadline", self.deadline, 0.0, 1e9)

    def _check_token_ids(self) -> None:
        for name, most in (("stop_token_ids", MAX_LISTED), ("allowed_token_ids", MAX_ALLOWED)):
            ids = getattr(self, name) or ()
            _require(len(ids) <= most, name, f"takes at most {most}")
            for token_id in ids:
                _integer(name, token_id, 0, MAX_INT)
        if self.allowed_token_ids is not None:
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty")

    def _check_strings(self) -> None:
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS}")
        _require(len(self.bad_words) <= MAX_LISTED, "bad_words", f"takes at most {MAX_LISTED}")
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                fits = isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS
                _require(fits, name, f"takes strings of 1 to {MAX_STOP_CHARS} characters")
        salt = self.cache_salt
        _require(salt is None or isinstance(salt, str), "cache_salt", "must be a string")
        _require(salt is None or 0 < len(salt) <= 1024, "cache_salt", "takes 1 to 1024 characters")
        _require(salt is None or _is_unicode(salt), "cache_salt", "must be valid Unicode")

    def _check_prediction(self) -> None:
        prediction = self.prediction
        if isinstance(prediction, str):
            fits = len(prediction) <= MAX_PREDICTION_CHARS
            _require(fits, "prediction", f"takes at most {MAX_PREDICTION_CHARS} characters")
        elif prediction:
            fits = len(prediction) <= MAX_PREDICTION_IDS
            _require(fits, "prediction", f"takes at most {MAX_PREDICTION_IDS} token ids")
            # By type and by extremes: a loop would hold the event loop for tens of milliseconds.
            _require({*map(type, prediction)} == {int}, "prediction", "must be text or token ids")
            _integer("prediction", min(prediction), 0, MAX_INT)
            _integer("prediction", max(prediction), 0, MAX_INT)

    def _check_form(self) -> None:
        """Check types and sizes; the content is checked when it is compiled."""
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{given[1]} cannot go with {given[0]}", param=given[1])
        schema = self.json_schema
        if schema is not None and not isinstance(schema, Mapping):
            _require(isinstance(schema, str), "json_schema", "must be an object or its text")
            _grammar_text("json_schema", schema)
        _grammar_text("regex", self.regex)
        _grammar_text("grammar", self.grammar)
        if self.choice is not None:
            _choices(self.choice)

    def _check_speculation(self) -> None:
        depth = self.speculation
        if isinstance(depth, str):
            _require(depth in ("auto", "off"), "speculation", "must be 'auto', 'off' or a depth")
        elif depth is not None:
            _integer("speculation", depth, 0, MAX_DEPTH)


def _require(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {message}", param=param)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


def _grammar_text(param: str, text: object) -> None:
    _require(text is None or isinstance(text, str), param, "must be text")
    fits = text is None or 0 < len(text) <= MAX_GRAMMAR_CHARS  # type: ignore[arg-type]
    _require(fits, param, f"takes 1 to {MAX_GRAMMAR_CHARS} characters")


def _choices(choice: Sequence[str]) -> None:
    _require(0 < len(choice) <= MAX_CHOICES, "choice", f"takes 1 to {MAX_CHOICES} texts")
    _require(all(isinstance(text, str) and text for text in choice), "choice", "takes texts")
    fits = sum(map(len, choice)) <= MAX_GRAMMAR_CHARS
    _require(fits, "choice", f"takes at most {MAX_GRAMMAR_CHARS} characters")


def _tuple(param: str, values: Sequence[object]) -> tuple[object, ...]:
    _require(not isinstance(values, (str, bytes)), param, "must be a list")
    try:
        return tuple(values)
    except TypeError:
        raise InvalidRequest(f"{param} must be a list", param=param) from None


def _integer(param: str, value: object, low: int, high: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    _require(is_int, param, "must be an integer")
    _require(low <= value <= high, param, f"must be from {low} to {high}")  # type: ignore[operator]


def _number(param: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _require(is_number, param, "must be a number")
    # NaN fails every comparison, so it is refused here as well.
    _require(low <= value <= high, param, f"must be from {low} to {high}")  # type: ignore[operator]


def _bias(bias: Mapping[int, float]) -> dict[int, float]:
    _require(isinstance(bias, Mapping), "logit_bias", "must map token ids to numbers")
    _require(len(bias) <= MAX_BIASED_TOKENS, "logit_bias", f"takes at most {MAX_BIASED_TOKENS}")
    for token_id, value in bias.items():
        _integer("logit_bias", token_id, 0, MAX_INT)
        _number("logit_bias", value, -100.0, 100.0)
    return dict(bias)
