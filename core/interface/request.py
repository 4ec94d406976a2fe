"""Request: a request from its arrival to its end. Only the scheduler changes it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Literal

import msgspec

from ...radix_cache import Eviction, KVLease
from ..errors import ForetokenError, InvalidRequest
from ..options.checks import Count, Seconds, TokenId
from .extras.packing import most_kv, next_packing, num_packed_away
from .extras.request_extras import NO_TRANSFER, PLAIN_REQUEST, RequestExtras, Transfer
from .output import Floats, TokenLogprob
from .sampling import SamplingMetadata

OnToken = Callable[[int], str | None]
"""Called with every served token in order; returns the stop string that it completes, or None."""


Tenant = str | None


MAX_TTL = 30 * 24 * 3600.0  # maximum time of a pin, in seconds
MAX_PINS = 16  # maximum number of pins of a request


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefix to pin: the first ``num_tokens`` of the prompt, in whole pages, for ``ttl`` seconds.

    A number above the prompt's length means the whole prompt. Each prefix hit restarts the time.
    Raises `InvalidRequest` for a number of tokens below 1, or a time that is not positive or above
    30 days.
    """

    num_tokens: int
    ttl: float

    def __post_init__(self) -> None:
        """Check ``num_tokens`` and ``ttl``."""
        if self.num_tokens < 1:
            raise InvalidRequest("cache: a pinned prefix needs at least one token", param="cache")
        if not 0 < self.ttl <= MAX_TTL:  # refuses NaN, too
            message = f"cache: the ttl must be above 0 and at most {MAX_TTL:.0f} s"
            raise InvalidRequest(message, param="cache")


class CacheOptions(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Options of a request: whether it reads and writes the prefix cache, and what it pins.

    Without ``read`` the request uses no cached pages, and its drafts come from its own tokens
    alone. Without ``write`` its pages are not published, its tokens are not kept for later drafts,
    and pins have no effect. ``session`` names the conversation, or the group of an agent's
    conversations, to which the request belongs: the last turn of each conversation stays pinned, at
    most for the engine's session TTL. Sessions in different namespaces are separate, even with
    equal names. With ``ends_session`` the session ends with the request.
    """

    read: bool = True
    write: bool = True
    pins: tuple[Pin, ...] = ()
    session: str | None = None
    ends_session: bool = False

    def __post_init__(self) -> None:
        """Check the number of pins, each of which costs a walk of the tree."""
        if len(self.pins) > MAX_PINS:
            message = f"cache: a request may pin at most {MAX_PINS} prefixes"
            raise InvalidRequest(message, param="cache")

    @property
    def is_private(self) -> bool:
        """Whether the request skips the prefix cache for reading, for writing or for both."""
        return not (self.read and self.write)


DEFAULT_CACHE = CacheOptions()


class RequestStatus(Enum):
    """State of a request."""

    WAITING = "waiting"  # new or preempted; has no pages
    RUNNING = "running"  # owns a lease of pages and takes part in steps
    FINISHED = "finished"  # ended; has no pages


class FinishReason(StrEnum):
    """Reason why a request ended."""

    STOP = "stop"  # a stop token or stop string; or pooling is complete
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the caller aborted the request, or the deadline passed


@dataclass(slots=True, kw_only=True)
class Usage:
    """Cost of an answer. Counts are in tokens unless stated otherwise, times in seconds."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0  # prompt tokens whose KV was in the prefix cache

    # Prompt tokens whose KV was cached, including KV without a recurrent state to resume from.
    matched_tokens: Count = 0
    loaded_tokens: Count = 0  # cached tokens whose KV came from a tier
    cache_write_tokens: Count = 0  # prompt tokens whose KV this request added to the cache
    image_tokens: Count = 0  # prompt tokens that are rows of images
    spliced_tokens: Count = 0  # prompt tokens whose ids were copied from earlier answers
    normalized: tuple[str, ...] = ()  # names of the changes made to the prompt before it was queued
    cache_loss: Eviction | None = None  # why the first page that was not cached was lost, if known
    completion_tokens: Count = 0
    proposed_tokens: Count = 0  # draft tokens that were verified
    accepted_tokens: Count = 0  # draft tokens that are part of the answer
    verify_steps: Count = 0  # steps that yielded tokens, or numbers of a pooling request
    draft_steps: Count = 0  # number of steps with a draft
    tree_steps: Count = 0  # number of steps whose draft was a tree with more than one path
    accepted_by_source: dict[str, Count] = field(default_factory=dict)
    proposed_by_source: dict[str, Count] = field(default_factory=dict)
    # number of steps by number of accepted tokens
    steps_by_accepted: dict[Count, Count] = field(default_factory=dict)
    accepted_prediction_tokens: Count = 0  # tokens of the caller's prediction that the answer has
    rejected_prediction_tokens: Count = 0  # tokens of the caller's prediction that the answer lacks
    evicted_tokens: Count = 0  # answer tokens whose KV was dropped by packing
    closed_early: bool = False  # structured output was completed early to fit its token limit
    moves: Count = 0  # number of times that the request moved to another engine after a failure
    queue_time: Seconds = 0.0
    time_to_first_token: Seconds = 0.0
    total_time: Seconds = 0.0


class Delta(msgspec.Struct, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Tokens that a step adds to an answer. Deltas that were not read yet are merged."""

    token_ids: list[TokenId] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    num_proposed: Count = 0  # draft tokens that were verified
    proposed_sources: list[str] = []  # [num_proposed] name of each draft token's drafter
    accepted_sources: list[str] = []  # [num_accepted] name of each accepted token's drafter
    token_sources: list[str] = []  # [len(token_ids)] drafter's name, or "" for the target's token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # stop token id or stop string, if any
    pooled: Floats | None = None  # numbers of `Pooling`; only comparisons have several such deltas
    error: ForetokenError | None = None  # error that ends the answer, instead of finish_reason

    @property
    def terminal(self) -> bool:
        """Whether this is the last delta of the answer."""
        return self.finish_reason is not None or self.error is not None

    def merge(self, later: Delta) -> None:
        """Append the content of a later delta to this one."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.num_proposed += later.num_proposed
        self.proposed_sources += later.proposed_sources
        self.accepted_sources += later.accepted_sources
        self.token_sources += later.token_sources
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        if self.pooled is None:
            self.pooled = later.pooled
        elif later.pooled is not None:
            self.pooled += later.pooled
        self.error = later.error


@dataclass(slots=True, eq=False)
class Fault:
    """Record of a failed step with a chunk of this request, which could not be run again."""

    stop: int  # end of that chunk; up to it, the request is computed without other chunks
    beside_drafts: bool  # whether the step had drafts of others, and no chunk succeeded since


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Request: a prompt and its growing answer.

    A request has no prefill or decode state: ``num_pending`` tokens lack their KV. More than one
    pending token is a prefill, which the token budget cuts into chunks; one pending token is a
    decode, which a draft may follow. With ``sampling.pooling`` the request ends when its tokens are
    computed, and it never drafts. If it compares a recorded answer, ``tokens`` has that answer
    after the prompt.
    """

    request_id: str
    tokens: array[int]  # the prompt, then the answer; only `Scheduler.commit` appends to it
    sampling: SamplingMetadata
    stop_ids: frozenset[int] = frozenset()  # tokens that end the answer: eos and stop_token_ids
    depth: int | Literal["auto"] | None = None  # draft tokens per step; None: the engine's setting
    prediction: array[int] | None = None  # the caller's own guess of the answer, as a draft

    # Made from cache_salt and adapter. Only requests with equal namespaces share KV and drafts.
    namespace: str | None = None
    tenant: Tenant = None  # tenant to which the request's tokens are charged
    cache: CacheOptions = DEFAULT_CACHE
    extras: RequestExtras = PLAIN_REQUEST
    priority: int = 0  # a lower number runs earlier
    deadline: float | None = None  # seconds after arrival
    on_token: OnToken | None = None
    shown_ids: frozenset[int] = frozenset()  # special tokens that `on_token` shows in the text
    transfer: Transfer = NO_TRANSFER

    arrival_time: float = 0.0  # time on the engine's clock
    serial: int = 0  # number of requests that arrived earlier
    urgency: float = 0.0  # arrival time plus seconds by priority; a lower value goes first
    max_len: int = 0  # maximum number of tokens of prompt and answer
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0  # number of leading tokens whose KV is computed
    lease: KVLease | None = None  # the request's pages while it is running
    usage: Usage = field(default_factory=Usage)
    num_preemptions: int = 0
    # number of tokens that were charged to the tenant but not computed, such as after a failed step
    num_charged_not_computed: int = 0
    num_prompt_logprobs: int = 0  # number of prompt log-probabilities that were sent
    num_tokens_accounted: int = 0  # leading tokens that `usage` counts as cached or written
    num_uncached: int = 0  # number of tokens without cached KV when the request was queued
    is_early: bool = False  # the request was admitted before its turn, because it is short
    fault: Fault | None = None

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return self.sampling.prompt_len

    @property
    def num_given(self) -> int:
        """Number of tokens that the caller gave: the prompt, and a recorded answer to compare."""
        return len(self.tokens) if self.sampling.compares else self.prompt_len

    @property
    def num_pending(self) -> int:
        """Number of tokens whose KV is not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.tokens) - self.prompt_len

    def num_packed_away(self, stop: int) -> int:
        """Return how many tokens lost their KV by packing before position ``stop - 1``."""
        budget = self.extras.kv_budget
        return num_packed_away(self.prompt_len, budget, stop) if budget else 0

    @property
    def is_packed(self) -> bool:
        """Whether packing drops the KV of some tokens before all pending tokens are computed."""
        return self.num_packed_away(len(self.tokens)) > 0

    def kv_len(self, stop: int) -> int:
        """Return how many tokens have KV after a step that computes tokens up to ``stop``."""
        return stop - self.num_packed_away(stop) if self.extras.kv_budget else stop

    def most_kv(self, num_tokens: int) -> int:
        """Return the maximum number of tokens with KV until ``num_tokens`` tokens are computed."""
        budget = self.extras.kv_budget
        return most_kv(self.prompt_len, budget, num_tokens) if budget else num_tokens

    def next_packing(self, start: int) -> int | None:
        """Return the first position after ``start`` at which KV is packed; None if KV never is.

        No step may cross that position.
        """
        budget = self.extras.kv_budget
        return next_packing(self.prompt_len, budget, start) if budget else None

    @property
    def is_suspect(self) -> bool:
        """Whether the next chunk must run without other chunks, because a step with it failed."""
        return self.fault is not None and self.num_computed < self.fault.stop

    @property
    def order(self) -> tuple[float, int]:
        """Sort key of the admission order: urgency, then order of arrival. It never changes."""
        return self.urgency, self.serial


def by_order(request: Request) -> tuple[float, int]:
    """Return `Request.order`, the sort key of the admission order."""
    return request.order


def by_work(request: Request) -> tuple[int, int]:
    """Return a sort key: the priority, then the number of tokens left to compute.

    For a waiting request, the number was counted when the request was queued.
    """
    is_queued = request.status is RequestStatus.WAITING
    return request.priority, request.num_uncached if is_queued else request.num_pending
