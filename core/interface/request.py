"""Request: one object from admission to the end, written by the Scheduler alone."""

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


MAX_TTL = 30 * 24 * 3600.0  # seconds


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefix to pin: the first ``num_tokens`` of the prompt, in whole pages, for ``ttl`` seconds.

    A number beyond the prompt means the whole prompt. Each hit restarts the time. Raises
    `InvalidRequest` for a number that is not positive or a time beyond 30 days.
    """

    num_tokens: int
    ttl: float

    def __post_init__(self) -> None:
        """Check both fields."""
        if self.num_tokens < 1:
            raise InvalidRequest("cache: a pinned prefix needs at least one token", param="cache")
        if not 0 < self.ttl <= MAX_TTL:  # also false for NaN
            message = f"cache: the ttl must be above 0 and at most {MAX_TTL:.0f} s"
            raise InvalidRequest(message, param="cache")


class CacheOptions(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Whether a request reads and writes the prefix cache, and which prefixes it pins.

    Without ``read`` it uses no cached pages, and its drafts come from the request alone. Without
    ``write`` its pages are not published, its tokens are not kept for later drafts, and pins have
    no effect. ``session`` names the conversation, or an agent's group of conversations, to which
    the request belongs: the last turn of each stays pinned, at most for the engine's session TTL.
    Sessions of different namespaces are different, even under one name. With ``ends_session`` the
    session ends with the request.
    """

    read: bool = True
    write: bool = True
    pins: tuple[Pin, ...] = ()
    session: str | None = None
    ends_session: bool = False

    @property
    def is_private(self) -> bool:
        """Whether the request does not both read and write the prefix cache."""
        return not (self.read and self.write)


DEFAULT_CACHE = CacheOptions()


class RequestStatus(Enum):
    """State of a request."""

    WAITING = "waiting"  # owns no page: new, or preempted
    RUNNING = "running"  # owns a lease and takes part in steps
    FINISHED = "finished"  # owns nothing


class FinishReason(StrEnum):
    """Reason why a request ended."""

    STOP = "stop"  # a stop token or stop string; the end of a prompt that is only computed
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the caller left, or the deadline passed


@dataclass(slots=True, kw_only=True)
class Usage:
    """Cost of an answer. Counts are tokens, times are seconds since arrival."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0  # prompt tokens whose KV was in the prefix cache

    # Prompt tokens whose KV was cached; for recurrent models there may have been no kept state to
    # resume from.
    matched_tokens: Count = 0
    loaded_tokens: Count = 0  # cached tokens whose KV came from a tier
    cache_write_tokens: Count = 0  # prompt tokens whose KV this request was the first to cache
    image_tokens: Count = 0  # prompt tokens that are rows of images
    spliced_tokens: Count = 0  # prompt tokens taken as ids from earlier answers, not from text
    normalized: tuple[str, ...] = ()  # names of the changes made to the prompt before it was queued
    cache_loss: Eviction | None = None  # why the first missing page was lost, if known
    completion_tokens: Count = 0
    proposed_tokens: Count = 0  # draft tokens that were verified
    accepted_tokens: Count = 0  # draft tokens that were served
    verify_steps: Count = 0  # steps that yielded tokens
    draft_steps: Count = 0  # steps with a draft
    tree_steps: Count = 0  # steps whose draft was a tree with more than one path
    accepted_by_source: dict[str, Count] = field(default_factory=dict)
    proposed_by_source: dict[str, Count] = field(default_factory=dict)
    # histogram of steps by accepted tokens
    steps_by_accepted: dict[Count, Count] = field(default_factory=dict)
    accepted_prediction_tokens: Count = 0  # tokens of the caller's prediction that the answer has
    rejected_prediction_tokens: Count = 0  # tokens of the caller's prediction that the answer lacks
    evicted_tokens: Count = 0  # tokens of the answer that lost their KV before its end
    closed_early: bool = False  # structured output was closed to end within its token limit
    moves: Count = 0  # times that it was moved to another engine, because its own was lost
    queue_time: Seconds = 0.0
    time_to_first_token: Seconds = 0.0
    total_time: Seconds = 0.0


class Delta(msgspec.Struct, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Tokens that a step adds to an answer; for a slow reader, deltas are merged."""

    token_ids: list[TokenId] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    num_proposed: Count = 0  # draft tokens that were verified
    proposed_sources: list[str] = []  # [num_proposed]
    accepted_sources: list[str] = []  # [accepted draft tokens]
    token_sources: list[str] = []  # [token_ids]; "" for the target's own tokens
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # stop token id or stop string, if any
    pooled: Floats | None = None  # result of `Pooling`, in the last delta
    error: ForetokenError | None = None  # ends the answer, as finish_reason does

    @property
    def terminal(self) -> bool:
        """Whether it is the last delta."""
        return self.finish_reason is not None or self.error is not None

    def merge(self, later: Delta) -> None:
        """Append a later delta."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.num_proposed += later.num_proposed
        self.proposed_sources += later.proposed_sources
        self.accepted_sources += later.accepted_sources
        self.token_sources += later.token_sources
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.pooled = later.pooled
        self.error = later.error


@dataclass(slots=True, eq=False)
class Fault:
    """A failed step that had a chunk of this request and could not be run again."""

    stop: int  # end of the chunk; until then the request's chunks run without other requests
    beside_drafts: bool  # other requests drafted in that step, and no chunk has succeeded since


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Request: a prompt and its growing answer.

    There is no prefill state and no decode state: ``num_pending`` tokens lack their KV. More than
    one is a prefill, cut into chunks by the token budget; one is a decode, whose draft follows it.
    With ``sampling.pooling`` the request ends when its prompt is computed, and it never drafts.
    """

    request_id: str
    tokens: array[int]  # the prompt, then the output; grows in Scheduler.commit only
    sampling: SamplingMetadata
    stop_ids: frozenset[int] = frozenset()  # tokens that end the answer: eos and stop_token_ids
    depth: int | Literal["auto"] | None = None  # draft tokens per step; None: the engine's setting
    prediction: array[int] | None = None  # the caller's own guess at the answer

    # Made from the cache_salt and the adapter; KV and drafts are shared within it alone.
    namespace: str | None = None
    tenant: Tenant = None  # tenant that is charged
    cache: CacheOptions = DEFAULT_CACHE
    extras: RequestExtras = PLAIN_REQUEST
    priority: int = 0  # lower runs first
    deadline: float | None = None  # seconds after arrival
    on_token: OnToken | None = None
    shown_ids: frozenset[int] = frozenset()  # special tokens that `on_token` shows in the text
    transfer: Transfer = NO_TRANSFER

    arrival_time: float = 0.0  # time on the engine's clock
    serial: int = 0  # order of arrival
    urgency: float = 0.0  # arrival time plus seconds for its priority; lower goes first
    max_len: int = 0  # number of tokens at which the answer ends by length
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0  # tokens whose KV is in the lease's pages
    lease: KVLease | None = None  # owned while RUNNING
    usage: Usage = field(default_factory=Usage)
    num_preemptions: int = 0
    # tokens charged but not computed, to be computed free of charge
    num_charged_not_computed: int = 0
    num_prompt_logprobs: int = 0  # prompt log-probabilities sent so far
    num_tokens_accounted: int = 0  # leading tokens counted as cached or written
    num_uncached: int = 0  # tokens without cached KV when it was queued
    is_early: bool = False  # admitted before its turn, because it is short
    fault: Fault | None = None

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return self.sampling.prompt_len

    @property
    def num_pending(self) -> int:
        """Number of tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.tokens) - self.prompt_len

    def num_packed_away(self, stop: int) -> int:
        """Return how many tokens have lost their KV when the row at ``stop - 1`` is computed."""
        budget = self.extras.kv_budget
        return num_packed_away(self.prompt_len, budget, stop) if budget else 0

    @property
    def is_packed(self) -> bool:
        """Whether some tokens have no KV in the pages once all pending tokens are computed."""
        return self.num_packed_away(len(self.tokens)) > 0

    def kv_len(self, stop: int) -> int:
        """Return how many tokens have KV in the pages after a step that computes up to ``stop``."""
        return stop - self.num_packed_away(stop) if self.extras.kv_budget else stop

    def most_kv(self, num_tokens: int) -> int:
        """Return the most tokens with KV at any time until ``num_tokens`` tokens are computed."""
        budget = self.extras.kv_budget
        return most_kv(self.prompt_len, budget, num_tokens) if budget else num_tokens

    def next_packing(self, start: int) -> int | None:
        """Return the position after ``start`` at which KV is packed; None if it never is.

        No step may cross it.
        """
        budget = self.extras.kv_budget
        return next_packing(self.prompt_len, budget, start) if budget else None

    @property
    def is_suspect(self) -> bool:
        """Whether its next chunk is computed in a step without other chunks."""
        return self.fault is not None and self.num_computed < self.fault.stop

    @property
    def order(self) -> tuple[float, int]:
        """Order of admission: by priority and time of arrival; it never changes."""
        return self.urgency, self.serial


def by_order(request: Request) -> tuple[float, int]:
    """Return the sort key of the admission order."""
    return request.order


def by_work(request: Request) -> tuple[int, int]:
    """Return the sort key by priority, then by the number of tokens left to compute.

    For a waiting request the number is the one when it was queued.
    """
    is_queued = request.status is RequestStatus.WAITING
    return request.priority, request.num_uncached if is_queued else request.num_pending
