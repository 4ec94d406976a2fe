"""TokenSamplingParams: the sampling options that concern token ids and logits, checked once.

The API's `SamplingParams` adds what concerns text: stop strings, structured output, predictions.
What the answer may consist of reaches the core as a `Constraint`: it knows token ids, no grammar.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from ..errors import InvalidRequest, shown
from .settings import setting

MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_LISTED = 1024  # stop_token_ids
MAX_ALLOWED = 2**14
MAX_INT = 2**31 - 1
NO_IDS: tuple[int, ...] = ()
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields for which the files of models recommend values."""


CheckNumber = Callable[[str, object, float, float], None]


class Bound(NamedTuple):
    """The range of a number."""

    name: str
    check: CheckNumber
    low: float
    high: float
    default: object


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
    max_tokens: int | None = setting(None, "longest answer, in tokens", is_basic=True)
    min_tokens: int = setting(0, "shortest answer, in tokens")
    stop_token_ids: Sequence[int] = NO_IDS
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = setting(
        0.0, "penalty on tokens that occur in the answer, from -2 to 2"
    )
    frequency_penalty: float = setting(
        0.0, "penalty on tokens for each time they occur in the answer, from -2 to 2"
    )
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Normalise sequences to tuples and check every field."""
        if self.stop_token_ids is not NO_IDS:
            ids = as_tuple("stop_token_ids", self.stop_token_ids)
            object.__setattr__(self, "stop_token_ids", ids)
        if self.allowed_token_ids is not None:
            ids = as_tuple("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", ids)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        self._check_numbers()
        self._check_token_ids()

    def _check_numbers(self) -> None:
        check_bounds(self, BOUNDS)
        require(self.top_p > 0, "top_p", "must be above 0, not 0")
        if self.max_tokens is not None:
            fits = self.min_tokens <= self.max_tokens
            require(fits, "min_tokens", f"must be at most max_tokens ({self.max_tokens})")

    def _check_token_ids(self) -> None:
        for name, most in (("stop_token_ids", MAX_LISTED), ("allowed_token_ids", MAX_ALLOWED)):
            ids = getattr(self, name)
            if not ids:
                continue
            require(len(ids) <= most, name, f"must have at most {most} token ids")
            for token_id in ids:
                check_integer(name, token_id, 0, MAX_INT)
        if self.allowed_token_ids is not None:
            require(len(self.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty")


def with_defaults(
    owner: type, bounds: Iterable[tuple[str, CheckNumber, float, float]]
) -> tuple[Bound, ...]:
    """Bounds of a dataclass's fields, each with the field's default."""
    defaults = {each.name: each.default for each in fields(owner)}
    return tuple(Bound(*bound, defaults[bound[0]]) for bound in bounds)


def check_bounds(params: object, bounds: Iterable[Bound]) -> None:
    """Raise `InvalidRequest` for a field outside its bounds; defaults are within them."""
    for name, check, low, high, default in bounds:
        value = getattr(params, name)
        if value is not default:
            check(name, value, low, high)


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


def check_integer(param: str, value: object, low: float, high: float) -> None:
    """Raise `InvalidRequest` unless ``value`` is an integer from ``low`` to ``high``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int:
        raise InvalidRequest(f"{param} must be an integer, not {shown(value)}", param=param)
    if not low <= value <= high:  # type: ignore[operator]
        raise _outside(param, value, low, high)


def check_number(param: str, value: object, low: float, high: float) -> None:
    """Raise `InvalidRequest` unless ``value`` is a number from ``low`` to ``high``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number:
        raise InvalidRequest(f"{param} must be a number, not {shown(value)}", param=param)
    # NaN fails every comparison, so it is refused here as well.
    if not low <= value <= high:  # type: ignore[operator]
        raise _outside(param, value, low, high)


def _outside(param: str, value: object, low: float, high: float) -> InvalidRequest:
    message = f"{param} must be from {low:.12g} to {high:.12g}, not {shown(value)}"
    return InvalidRequest(message, param=param)


BOUNDS = with_defaults(
    TokenSamplingParams,
    (
        ("temperature", check_number, 0.0, 100.0),
        ("top_p", check_number, 0.0, 1.0),
        ("top_k", check_integer, -1, MAX_INT),
        ("min_p", check_number, 0.0, 1.0),
        ("max_tokens", check_integer, 1, MAX_INT),
        ("min_tokens", check_integer, 0, MAX_INT),
        ("presence_penalty", check_number, -2.0, 2.0),
        ("frequency_penalty", check_number, -2.0, 2.0),
        ("repetition_penalty", check_number, 0.01, 100.0),
        ("logprobs", check_integer, 0, MAX_LOGPROBS),
        ("prompt_logprobs", check_integer, 0, MAX_LOGPROBS),
    ),
)


def _bias(bias: Mapping[int, float]) -> dict[int, float]:
    require(isinstance(bias, Mapping), "logit_bias", "must map token ids to numbers")
    require(
        len(bias) <= MAX_BIASED_TOKENS,
        "logit_bias",
        f"must have at most {MAX_BIASED_TOKENS} entries",
    )
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
