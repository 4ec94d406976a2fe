"""Sampling parameters of a request, and their resolved form for the samplers of all backends.

The API's `SamplingParams` adds parameters that concern text to `TokenSamplingParams`: stop strings,
structured output, predictions. The core applies a grammar as a `Constraint`, which deals with token
ids only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from ..errors import InvalidRequest, shown
from ..options.checks import (
    MAX_INT,
    Bound,
    Bounds,
    Count,
    TokenId,
    as_tuple,
    check_bool,
    check_integer,
    check_number,
    require,
)
from ..options.settings import setting
from .extras.branches import Branches
from .extras.packing import LEAST_BUDGET

MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_LISTED = 1024  # maximum number of stop_token_ids
MAX_ALLOWED = 2**14
NO_IDS: tuple[int, ...] = ()
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields for which model files recommend values."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSamplingParams:
    """Parameters of the choice of tokens. A bad value raises `InvalidRequest`, naming the field.

    ``max_tokens=None`` means up to the end of the context. With ``prompt_only`` the prompt is
    computed, no token is generated, and ``max_tokens`` is 0. ``temperature=0`` is greedy;
    ``top_k=0`` and ``top_p=1`` are off. ``logprobs`` and ``prompt_logprobs`` are the numbers of
    alternatives to report for each token of the answer and of the prompt. ``kv_budget``: number of
    tokens of the answer that keep their KV if the engine packs KV; None: the engine's setting.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = setting(
        None,
        "maximum length of the answer, in tokens (default: up to the context length)",
        is_basic=True,
    )
    min_tokens: int = setting(0, "minimum length of the answer, in tokens")
    stop_token_ids: Sequence[int] = NO_IDS
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = setting(
        0.0, "penalty on tokens that occur in the answer so far, from -2 to 2; 0: none"
    )
    frequency_penalty: float = setting(
        0.0,
        "penalty on tokens for each time they occur in the answer so far, from -2 to 2; 0: none",
    )
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    kv_budget: int | None = None
    prompt_only: bool = False

    def __post_init__(self) -> None:
        """Convert sequences to tuples and check every field."""
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
        check_bool("prompt_only", self.prompt_only)
        BOUNDS.check(self)
        if self.prompt_only:
            object.__setattr__(self, "max_tokens", 0)
        elif self.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1, not 0", param="max_tokens")
        if self.top_p <= 0:
            raise InvalidRequest("top_p must be above 0, not 0", param="top_p")
        most = None if self.prompt_only else self.max_tokens
        if most is not None and self.min_tokens > most:
            message = f"min_tokens must be at most max_tokens ({most})"
            raise InvalidRequest(message, param="min_tokens")

    def _check_token_ids(self) -> None:
        if self.stop_token_ids:
            _check_ids("stop_token_ids", self.stop_token_ids, MAX_LISTED)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED)
            require(len(self.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty")


BOUNDS = Bounds(
    Bound("temperature", check_number, 0.0, 100.0),
    Bound("top_p", check_number, 0.0, 1.0),
    Bound("top_k", check_integer, -1, MAX_INT),
    Bound("min_p", check_number, 0.0, 1.0),
    Bound("max_tokens", check_integer, 0, MAX_INT),
    Bound("min_tokens", check_integer, 0, MAX_INT),
    Bound("presence_penalty", check_number, -2.0, 2.0),
    Bound("frequency_penalty", check_number, -2.0, 2.0),
    Bound("repetition_penalty", check_number, 0.01, 100.0),
    Bound("logprobs", check_integer, 0, MAX_LOGPROBS),
    Bound("prompt_logprobs", check_integer, 0, MAX_LOGPROBS),
    Bound("kv_budget", check_integer, LEAST_BUDGET, MAX_INT),
)


def _check_ids(name: str, ids: Sequence[int], most: int) -> None:
    require(len(ids) <= most, name, f"must have at most {most} token ids")
    for token_id in ids:
        check_integer(name, token_id, 0, MAX_INT)


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
"""One byte for each token of the vocabulary, 1 if it is allowed; read only."""


class ConstraintFailed(Exception):  # noqa: N818 - it fails its request, nothing else
    """Error of a constraint that cannot determine the allowed tokens, which ends the request."""


class Constraint(Protocol):
    """Limit on the tokens that may follow a request's output.

    A constraint is used in one thread only; `fork` makes one for another thread. The allowed tokens
    depend only on the output before them, so the answer is still the same for every drafter, draft
    length and batch. In every call, ``tokens[start:]`` is the output so far, which only grows from
    call to call; guessed tokens after it need not be allowed. The cost of a call grows with the new
    tokens, not with the whole output. Every method except `fork` may raise `ConstraintFailed`.
    """

    def allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        """Return the mask of the tokens that may follow the output plus ``tail``.

        Returns None, which allows all tokens, if ``tail`` itself is not allowed or ends the answer:
        no token that is drawn after such a tail becomes part of the answer.
        """

    def forced(self, tokens: array[int], start: int, most: int) -> Sequence[int]:
        """Return up to ``most`` tokens that must follow, because no other tokens are allowed."""

    def count_allowed(self, tokens: array[int], start: int, guess: Sequence[int]) -> int:
        """Return how many leading tokens of ``guess`` may follow the output, or an upper bound."""

    def fork(self) -> Constraint:
        """Return an equal constraint for another thread, with an empty output."""


class BranchPooling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers to read after a token of `Branches`: one for each of ``token_ids``.

    ``parent``: index of the branch's token that precedes it, or -1 for the prompt's last token.
    """

    parent: int
    token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1)]


class Pooling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for numbers instead of an answer.

    The numbers belong to the prompt's last row: the hidden state after the final norm, or, with
    ``token_ids``, the raw logits of the tokens; with ``is_normalized`` their log-probabilities.
    With ``branches``, the last tokens of the request are its `Branches`. Then the numbers of the
    row before them are followed by the numbers of each branch.

    With ``compare_from``, the request's tokens after the prompt are a recorded answer. The numbers
    are then `TokenComparison` entries: each token from that index of the answer on is compared with
    the model's own token, and so is the end of the answer.

    Raises ValueError for branches without ``token_ids``, and for a branch whose parent does not
    precede it.
    """

    token_ids: tuple[TokenId, ...] = NO_IDS
    is_normalized: bool = False
    branches: tuple[BranchPooling, ...] = ()
    compare_from: Count | None = None

    def __post_init__(self) -> None:
        """Check the branches."""
        if any(not -1 <= each.parent < index for index, each in enumerate(self.branches)):
            raise ValueError("the parent of a branch must precede it")
        if self.branches and not self.token_ids:
            raise ValueError("a request with branches must read token_ids")

    @property
    def rows(self) -> list[tuple[TokenId, ...]]:
        """The tokens to read from each row of logits; empty for the hidden state."""
        own = [self.token_ids] if self.token_ids else []
        return own + [each.token_ids for each in self.branches]

    def branches_of(self, num_tokens: int) -> Branches | None:
        """Return the branches of a request of ``num_tokens`` tokens; None if it has none.

        Raises `InvalidRequest` if no token precedes them.
        """
        if not self.branches:
            return None
        if num_tokens <= len(self.branches):
            raise InvalidRequest("a prompt needs a token before its branches", param="prompt")
        parents = tuple(each.parent for each in self.branches)
        return Branches(num_tokens - len(parents), parents)

    @property
    def compares(self) -> bool:
        """Whether a recorded answer is compared."""
        return self.compare_from is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class SamplingMetadata:
    """One request's parameters for the samplers of all backends, resolved once at admission.

    ``has_processors``: whether a parameter edits the logits at every position. Until the answer has
    ``min_tokens`` tokens, logits are edited in any case. ``needs_history``: whether choosing or
    reporting a token needs more than its logits and its position. ``constraint`` belongs to the
    model thread; other threads fork it. Objects are compared by identity.
    """

    params: TokenSamplingParams
    seed: int  # the request's seed, or a random seed; 64 bits, unsigned
    prompt_len: int  # number of prompt tokens; output position = token index - prompt_len
    stop_ids: frozenset[int] = frozenset()  # banned until the answer has min_tokens tokens
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    constraint_param: str | None = None  # parameter to name if the constraint causes an error
    pooling: Pooling | None = None  # numbers to return in place of tokens
    has_processors: bool = field(init=False)
    needs_history: bool = field(init=False)
    _cache: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Derive `has_processors` and `needs_history` from the parameters."""
        params = self.params
        reads_history = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
            or bool(self.bad_words_ids)
            or self.constraint is not None
        )
        has_bias = bool(params.logit_bias) or params.allowed_token_ids is not None
        wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        object.__setattr__(self, "has_processors", reads_history or has_bias)
        object.__setattr__(self, "needs_history", reads_history or wants_logprobs)

    @property
    def generates(self) -> bool:
        """Whether the request generates tokens: it has no pooling and is not ``prompt_only``."""
        return self.pooling is None and not self.params.prompt_only

    @property
    def scores_given(self) -> bool:
        """Whether given tokens may be scored, so that several rows of a prompt need logits."""
        return self.pooling is not None or self.params.prompt_logprobs is not None

    @property
    def compares(self) -> bool:
        """Whether the request compares a recorded answer with the model's own tokens."""
        return self.pooling is not None and self.pooling.compares

    def token_id_fields(self) -> dict[str, Collection[int]]:
        """Return the token ids in the caller's parameters, by the name of the parameter.

        Stop tokens that the model itself adds to ``stop_ids`` are left out.
        """
        return {
            "logit_bias": self.params.logit_bias or (),
            "allowed_token_ids": self.params.allowed_token_ids or (),
            "bad_words": [token_id for word in self.bad_words_ids for token_id in word],
            "stop_token_ids": self.params.stop_token_ids,
        }

    def cached(self, make: Callable[..., Made], *args: Hashable) -> Made:
        """Return ``make(self, *args)``, computed once and cached for the lifetime of the request.

        Backends cache values that they derive from the parameters. Only a `StepRunner` calls this,
        of which one call runs at a time.
        """
        key = (make, *args)
        try:
            made: Made = self._cache[key]
        except KeyError:
            made = self._cache[key] = make(self, *args)
        return made


def beyond_vocabulary(param: str, ids: Collection[int], vocab_size: int) -> str | None:
    """Return an error message if ``ids`` of a parameter exceed the vocabulary; otherwise None."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return None
    wrong = min(ids) if min(ids) < 0 else max(ids)
    return f"{param} must have token ids from 0 to {vocab_size - 1}, not {shown(wrong)}"
