"""TokenSamplingParams: the sampling options that concern token ids and logits, checked once.

The API's `SamplingParams` adds what concerns text: stop strings, forms of the answer, predictions.
What the answer may consist of reaches the core as a `Constraint`: it knows token ids, no grammar.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_LISTED = 1024  # stop_token_ids
MAX_ALLOWED = 2**14
MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSamplingParams:
    """How to choose the next tokens. A bad value raises `InvalidRequest` naming its field.

    ``max_tokens=None`` means up to the end of the context; ``temperature=0`` is greedy; ``top_k=0``
    and ``top_p=1`` are off. ``logprobs`` and ``prompt_logprobs`` are the number of alternatives
    wanted beside the token itself.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Normalise sequences to tuples and check every field."""
        object.__setattr__(self, "stop_token_ids", as_tuple("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            ids = as_tuple("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", ids)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        self._check_numbers()
        self._check_optional_numbers()
        self._check_token_ids()

    def _check_numbers(self) -> None:
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, 0.0, 1.0)
        require(self.top_p > 0, "top_p", "must be above 0")
        check_integer("top_k", self.top_k, -1, MAX_INT)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_integer("min_tokens", self.min_tokens, 0, MAX_INT)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)

    def _check_optional_numbers(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, MAX_INT)
            fits = self.min_tokens <= self.max_tokens
            require(fits, "min_tokens", "must not exceed max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_token_ids(self) -> None:
        for name, most in (("stop_token_ids", MAX_LISTED), ("allowed_token_ids", MAX_ALLOWED)):
            ids = getattr(self, name) or ()
            require(len(ids) <= most, name, f"takes at most {most}")
            for token_id in ids:
                check_integer(name, token_id, 0, MAX_INT)
        if self.allowed_token_ids is not None:
            require(len(self.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty")


def require(holds: bool, param: str, message: str) -> None:
    """Raise `InvalidRequest` naming ``param`` unless the condition holds."""
    if not holds:
        raise InvalidRequest(f"{param} {message}", param=param)


def as_tuple(param: str, values: Sequence[object]) -> tuple[object, ...]:
    """A list's items; raises `InvalidRequest` for what is not a list."""
    require(not isinstance(values, (str, bytes)), param, "must be a list")
    try:
        return tuple(values)
    except TypeError:
        raise InvalidRequest(f"{param} must be a list", param=param) from None


def check_integer(param: str, value: object, low: int, high: int) -> None:
    """Raise `InvalidRequest` unless ``value`` is an integer from ``low`` to ``high``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int, param, "must be an integer")
    require(low <= value <= high, param, f"must be from {low} to {high}")  # type: ignore[operator]


def check_number(param: str, value: object, low: float, high: float) -> None:
    """Raise `InvalidRequest` unless ``value`` is a number from ``low`` to ``high``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(is_number, param, "must be a number")
    # NaN fails every comparison, so it is refused here as well.
    require(low <= value <= high, param, f"must be from {low} to {high}")  # type: ignore[operator]


def _bias(bias: Mapping[int, float]) -> dict[int, float]:
    require(isinstance(bias, Mapping), "logit_bias", "must map token ids to numbers")
    require(len(bias) <= MAX_BIASED_TOKENS, "logit_bias", f"takes at most {MAX_BIASED_TOKENS}")
    for token_id, value in bias.items():
        check_integer("logit_bias", token_id, 0, MAX_INT)
        check_number("logit_bias", value, -100.0, 100.0)
    return dict(bias)


Mask = memoryview
"""One byte for each token of the vocabulary, 1 where it is allowed; read only."""


class ConstraintFailed(Exception):  # noqa: N818 - it fails its request, nothing else
    """The tokens after this output cannot be determined: the request ends with this error."""


class Constraint(Protocol):
    """The tokens that may follow a request's output. Belongs to one thread; `fork` makes another.

    They depend on the output before them and on nothing else. So with a constraint, too, a token is
    a function of its path: the answer is the same for every drafter, depth and batch.

    In every call the output so far is ``tokens[start:]``. It only grows from call to call; what is
    guessed to follow it may be anything. Costs grow with what is new, not with the whole output.
    All raise `ConstraintFailed`.
    """

    def allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        """Which tokens may follow the output and then ``tail``.

        None, which is no limit at all, where the tail itself is not allowed or ends the answer:
        what is drawn there is never served.
        """

    def forced(self, tokens: array[int], start: int, most: int) -> Sequence[int]:
        """The tokens that follow for sure, ``most`` at most: nothing else is allowed there."""

    def count_allowed(self, tokens: array[int], start: int, guess: Sequence[int]) -> int:
        """Leading tokens of ``guess`` that may follow the output; cheap, and at times too many."""

    def fork(self) -> Constraint:
        """Another one at the beginning of the output."""
