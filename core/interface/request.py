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
    """Keep the first ``num_tokens`` of the prompt, in whole pages, for ``ttl`` seconds.

    More tokens than the prompt has mean all of it. Each hit begins the time anew. Raises
    `InvalidRequest` for a number that is not positive or a time beyond 30 days.
    """

    num_tokens: int
    ttl: float

    def __post_init__(self) -> None:
        """Check both."""
        if self.num_tokens < 1:
            raise InvalidRequest("cache: a pinned prefix needs at least one token", param="cache")
        if not 0 < self.ttl <= MAX_TTL:  # also false for nan
            message = f"cache: the ttl must be above 0 and at most {MAX_TTL:.0f} s"
            raise InvalidRequest(message, param="cache")


class CacheOptions(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Whether a request reads from the prefix cache and writes to it, and what it pins.

    Without ``read`` it uses no cached pages, and drafts come from the request alone. Without
    ``write`` its pages are not published and its tokens not kept for later drafts; pins then have
    no effect. ``session`` names the conversation that it is a turn of, or several of one agent:
    the last turn stays pinned, as long as the engine is set to. Requests of other namespaces with
    the same name are of another session.
    """

    read: bool = True
    write: bool = True
    pins: tuple[Pin, ...] = ()
    session: str | None = None

    @property
    def is_private(self) -> bool:
        """Whether it does not share everything with other requests."""
        return not (self.read and self.write)


DEFAULT_CACHE = CacheOptions()


class RequestStatus(Enum):
    """The state of a request."""

    WAITING = "waiting"  # owns no page: new, or preempted
    RUNNING = "running"  # owns a lease and takes part in steps
    FINISHED = "finished"  # owns nothing


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token or a stop string; the prompt's end where nothing is generated
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the caller left, or its deadline passed


@dataclass(slots=True, kw_only=True)
class Usage:
    """Cost of an answer. Counts are tokens, times are seconds since arrival."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0  # of the prompt: their KV was in the prefix cache
    # of the prompt: their KV was there, but maybe no state to go on from; only of recurrent models
    matched_tokens: Count = 0
    loaded_tokens: Count = 0  # of the cached ones: their KV came from a tier beyond the pool
    cache_write_tokens: Count = 0  # of the prompt: it was the first to put their KV there
    image_tokens: Count = 0  # of the prompt: rows of images
    spliced_tokens: Count = 0  # of the prompt: they came as ids of earlier answers, not as text
    normalized: tuple[str, ...] = ()  # names of what was changed in the prompt before it came here
    cache_loss: Eviction | None = None  # why the first missing page was evicted, if known
    completion_tokens: Count = 0
    proposed_tokens: Count = 0  # draft tokens that were verified
    accepted_tokens: Count = 0  # draft tokens that were served
    verify_steps: Count = 0  # steps that yielded tokens: the accepted run, mostly one more
    draft_steps: Count = 0  # those that had a draft
    tree_steps: Count = 0  # those whose draft was a tree: more tokens than its longest path has
    accepted_by_source: dict[str, Count] = field(default_factory=dict)
    proposed_by_source: dict[str, Count] = field(default_factory=dict)
    steps_by_accepted: dict[Count, Count] = field(default_factory=dict)  # a histogram
    accepted_prediction_tokens: Count = 0  # of the caller's prediction: they stand in the answer
    rejected_prediction_tokens: Count = 0  # of the caller's prediction: they do not
    evicted_tokens: Count = 0  # of the answer: they lost their KV before it ended
    closed_early: bool = False  # structured output was closed to end within its tokens
    moves: Count = 0  # times that it went on in another engine, because its own was lost
    queue_time: Seconds = 0.0
    time_to_first_token: Seconds = 0.0
    total_time: Seconds = 0.0


class Delta(msgspec.Struct, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Tokens that a step adds to an answer; a slow reader gets several steps merged."""

    token_ids: list[TokenId] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    num_proposed: Count = 0  # draft tokens that were verified
    proposed_sources: list[str] = []  # [num_proposed]
    accepted_sources: list[str] = []  # of each draft token served
    token_sources: list[str] = []  # [token_ids] "" for the target's own
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string, if any
    pooled: Floats | None = None  # in the last one, of a request that generates nothing
    error: ForetokenError | None = None  # terminal, as finish_reason is

    @property
    def terminal(self) -> bool:
        """Whether nothing follows."""
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
    """A step with a chunk of a request failed, and could not be run again."""

    stop: int  # of the chunk: up to here the request's chunks are computed without others
    beside_drafts: bool  # others drafted in that step, and no chunk has succeeded since


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt on its way to an answer.

    There is no prefill state and no decode state: ``num_pending`` tokens lack their KV. More than
    one is a prefill, cut into chunks by the token budget; one is a decode, drafts ride behind it.
    With ``sampling.pooling`` it ends when its prompt is computed, and drafts nothing.
    """

    request_id: str
    tokens: array[int]  # the prompt, then the output; grows in Scheduler.commit only
    sampling: SamplingMetadata
    stop_ids: frozenset[int] = frozenset()  # end the answer: eos and stop_token_ids
    depth: int | Literal["auto"] | None = None  # draft tokens a step; None: as the engine is set
    prediction: array[int] | None = None  # the caller's own guess at the answer
    # of the cache_salt and the adapter: it shares KV and drafts with its like alone
    namespace: str | None = None
    tenant: Tenant = None  # the tenant that is charged
    cache: CacheOptions = DEFAULT_CACHE
    extras: RequestExtras = PLAIN_REQUEST
    priority: int = 0  # lower runs first
    deadline: float | None = None  # seconds after arrival
    on_token: OnToken | None = None
    shown_ids: frozenset[int] = frozenset()  # special tokens that the text of `on_token` has
    transfer: Transfer = NO_TRANSFER

    arrival_time: float = 0.0  # set by the engine's clock
    serial: int = 0  # order of arrival
    urgency: float = 0.0  # arrival, a priority being so many seconds; lower goes first
    max_len: int = 0  # tokens at which the answer ends by length
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0  # tokens whose KV is in the lease's pages
    lease: KVLease | None = None  # owned while RUNNING
    usage: Usage = field(default_factory=Usage)
    num_preemptions: int = 0
    num_charged_not_computed: int = 0  # tokens charged already, computed again for free
    num_prompt_logprobs: int = 0  # sent so far
    num_tokens_accounted: int = 0  # leading ones counted as cached or written
    num_uncached: int = 0  # tokens without KV when it was queued
    is_early: bool = False  # admitted before its turn, because it is short
    fault: Fault | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.sampling.prompt_len

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_len

    def num_packed_away(self, stop: int) -> int:
        """Return how many tokens have lost their KV when the row at ``stop - 1`` is computed."""
        budget = self.extras.kv_budget
        return num_packed_away(self.prompt_len, budget, stop) if budget else 0

    @property
    def is_packed(self) -> bool:
        """Whether the pages lack KV of its tokens once the pending ones are computed."""
        return self.num_packed_away(len(self.tokens)) > 0

    def kv_len(self, stop: int) -> int:
        """Places in its pages that a step needs which computes the tokens up to ``stop``."""
        return stop - self.num_packed_away(stop) if self.extras.kv_budget else stop

    def most_kv(self, num_tokens: int) -> int:
        """Most places that it needs on its way from no KV to that of ``num_tokens``."""
        budget = self.extras.kv_budget
        return most_kv(self.prompt_len, budget, num_tokens) if budget else num_tokens

    def next_packing(self, start: int) -> int | None:
        """Position that a step from ``start`` must not cross; None if there is none."""
        budget = self.extras.kv_budget
        return next_packing(self.prompt_len, budget, start) if budget else None

    @property
    def is_suspect(self) -> bool:
        """Whether its next chunk is computed in a step without other chunks."""
        return self.fault is not None and self.num_computed < self.fault.stop

    @property
    def order(self) -> tuple[float, int]:
        """The order of admission: by priority and time of arrival; it never changes."""
        return self.urgency, self.serial


def by_order(request: Request) -> tuple[float, int]:
    """A key to sort by."""
    return request.order


def by_work(request: Request) -> tuple[int, int]:
    """A key to sort by: priority, then tokens left to compute, for a waiting one when queued."""
    is_queued = request.status is RequestStatus.WAITING
    return request.priority, request.num_uncached if is_queued else request.num_pending
