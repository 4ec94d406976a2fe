"""StepPlan and StepOutput: what crosses between the event loop and the model thread.

The scheduler writes a `StepPlan`, the model thread returns a `StepOutput`. While a step runs, the
event loop changes no request, so a plan may lend the request's own ``tokens`` and page table
instead of copying them; the model thread only reads them.

Several of these objects are made for each request and step. They are msgspec structs because a
dataclass takes several times as long to construct and is tracked by the garbage collector.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import TypeVar, cast

import msgspec

from ..errors import shown
from .sampling_params import Constraint, TokenSamplingParams

Made = TypeVar("Made")
LEAST_CHUNK = 16  # prompt tokens that a step computes at least: smaller chunks are not cut


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class SamplingMetadata:
    """What the samplers of all backends must know of one request, resolved once at admission.

    ``has_processors``: logits processors apply at every position; below ``min_tokens`` they apply
    in any case. ``reads_text``: choosing or reporting a token needs more than its logits and its
    position. ``constraint`` belongs to the model thread; other threads fork it. Compared by
    identity.
    """

    params: TokenSamplingParams
    seed: int  # the request's own seed, or the one drawn for it; 64 bits, unsigned
    prompt_len: int  # tokens; output position = token index - prompt_len
    stop_ids: frozenset[int] = frozenset()  # suppressed while fewer than min_tokens are out
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    constraint_param: str | None = None  # the field that it was made from, for errors
    has_processors: bool = field(init=False)
    reads_text: bool = field(init=False)
    _cache: dict[Hashable, object] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """The only place that says which parameters edit logits before the temperature."""
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
        object.__setattr__(self, "reads_text", reads_history or wants_logprobs)

    def has_processors_at(self, position: int) -> bool:
        """Whether logits processors apply at this output position."""
        return self.has_processors or position < self.params.min_tokens

    def token_id_fields(self) -> dict[str, Collection[int]]:
        """The token ids that the caller's parameters name, by parameter.

        Ids of ``stop_ids`` that the caller did not write (a model's own) are left out.
        """
        return {
            "logit_bias": self.params.logit_bias or (),
            "allowed_token_ids": self.params.allowed_token_ids or (),
            "bad_words": [token_id for word in self.bad_words_ids for token_id in word],
            "stop_token_ids": self.params.stop_token_ids,
        }

    def cached(self, make: Callable[..., Made], *args: Hashable) -> Made:
        """Return ``make(self, *args)``, made once and kept as long as the request.

        For what a backend derives from the parameters. Called in the model thread.
        """
        key = (make, *args)
        if key not in self._cache:
            self._cache[key] = make(self, *args)
        return cast("Made", self._cache[key])


def beyond_vocabulary(param: str, ids: Collection[int], vocab_size: int) -> str | None:
    """What is wrong with token ids that a vocabulary does not have; None if it has them all."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return None
    wrong = min(ids) if min(ids) < 0 else max(ids)
    return f"{param} must have token ids from 0 to {vocab_size - 1}, not {shown(wrong)}"


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A tree of draft tokens behind a request's ``tokens``, and the source of each.

    ``parents[i]`` is the node that node ``i`` follows: an earlier one, or -1 for the last of
    ``tokens``. Nodes come depth first, the best child first, and siblings differ: so a prefix of
    the nodes is a tree, too. A draft without ``parents`` is a chain: each token follows the one
    before it.
    """

    token_ids: Sequence[int] = ()
    sources: Sequence[str] = ()  # [len(token_ids)]
    num_uncached_draft_tokens: int = 0  # tokens whose KV the draft model lacks
    parents: Sequence[int] = ()  # [len(token_ids)], or none for a chain
    # [len(token_ids)] chance that a node and all before it on its path come true, or none. Of a
    # proposer's draft: as it judges alone, 0 for the nodes that were looked up and it did not find
    odds: Sequence[float] = ()
    num_levels: int = 0  # that its proposer computed one after another

    @classmethod
    def of(cls, token_ids: Sequence[int], source: str) -> Draft:
        """A draft whose tokens all come from one source."""
        return cls(token_ids, (source,) * len(token_ids))

    def first(self, count: int) -> Draft:
        """The tree of its first ``count`` nodes."""
        if count >= len(self.token_ids):
            return self
        count = max(0, count)
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[:count],
            sources=self.sources[:count],
            parents=self.parents[:count],
            odds=self.odds[:count],
        )

    def trunk(self) -> Draft:
        """The chain of its best path: from the first node on, as far as each follows the last."""
        if not self.parents:
            return self
        return msgspec.structs.replace(self.first(self.trunk_len), parents=())

    def path(self, node: int) -> list[int]:
        """The nodes from the first level down to ``node``, which is the last of them."""
        if not self.parents:
            return list(range(node + 1))
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def depths(self) -> list[int]:
        """The level of each node, 1 for those behind the last of ``tokens``."""
        if not self.parents:
            return list(range(1, len(self.token_ids) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def height(self) -> int:
        """Tokens of its longest path."""
        if not self.parents:
            return len(self.token_ids)
        return max(self.depths(), default=0)

    def runs(self) -> list[tuple[int, int]]:
        """Runs of nodes ``[first, stop)``, each the child of the one before it; trunk first."""
        num_nodes = len(self.token_ids)
        if not self.parents:
            return [(0, num_nodes)] if num_nodes else []
        starts = [
            node for node, parent in enumerate(self.parents) if node == 0 or parent != node - 1
        ]
        return list(zip(starts, [*starts[1:], num_nodes], strict=True))

    @property
    def trunk_len(self) -> int:
        """Nodes of the first run."""
        if not self.parents:
            return len(self.token_ids)
        return sum(takewhile(bool, map(int.__eq__, self.parents, count(-1))))

    @property
    def is_tree(self) -> bool:
        """Whether every node follows an earlier one, or the last of ``tokens``."""
        num_parents = len(self.parents)
        sound = all(-1 <= parent < node for node, parent in enumerate(self.parents))
        return sound and num_parents in (0, len(self.token_ids))


NO_DRAFT = Draft()
NO_PAGES = array("q")


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of a step: compute KV of ``tokens[start:stop]``, then maybe sample.

    ``page_ids[i]`` holds positions ``[i * page_size, (i + 1) * page_size)`` and reaches at least
    to ``stop`` and the longest path of its draft. Nodes of the draft beside its trunk have their KV
    in the ``spare_page_ids`` until one of their paths is accepted. A request that ``is_ahead`` has
    one pending token, at ``stop - 1``, which the step under way is choosing: ``tokens`` holds those
    before it, and may grow meanwhile.
    """

    request_id: str
    tokens: array[int]  # prompt and output so far; lent, read only
    start: int
    stop: int
    page_ids: array[int]  # page table; lent, read only
    sampling: SamplingMetadata
    draft: Draft = NO_DRAFT  # tokens that were looked up
    # nodes that the proposer may draft, those of ``draft`` among them; a chain if no page is spare
    max_draft: int = 0
    spare_page_ids: array[int] = NO_PAGES  # at the lease's end; held for this step
    # Tokens that 1, 2, ... nodes must bring in all; beyond these each costs what the last one adds.
    row_prices: tuple[float, ...] = ()
    pass_price: float = 0.0  # tokens that one more pass of the proposer must bring to the step
    is_ahead: bool = False

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that its last row yields a new one."""
        return self.is_ahead or self.stop == len(self.tokens)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One ragged batch."""

    requests: Sequence[ScheduledRequest]
    # taken from the free list since the last plan: their content is void
    newly_allocated_pages: array[int]
    is_plain: bool = False  # no request drafts: the speculator learns nothing from it
    # requests that released their pages since the last plan: finished or preempted
    released_request_ids: Sequence[str] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step, drafts not counted."""
        return sum(scheduled.stop - scheduled.start for scheduled in self.requests)

    @property
    def is_decode_only(self) -> bool:
        """Whether every request decodes one token, without a draft, by its logits and position."""
        return self.is_plain and all(
            scheduled.stop - scheduled.start == 1
            and scheduled.samples
            and not scheduled.sampling.reads_text
            for scheduled in self.requests
        )


def num_chunk_tokens(requests: Iterable[ScheduledRequest]) -> int:
    """Prompt tokens computed for these requests."""
    return sum(
        scheduled.stop - scheduled.start
        for scheduled in requests
        if scheduled.stop - scheduled.start > 1
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the model's unprocessed distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


class Refusal(str):
    """An error that the request's own parameters caused, for example its grammar."""

    __slots__ = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a step yields for one scheduled request.

    ``token_ids`` is the accepted path followed by the recovered or bonus token; empty for a chunk
    that does not reach the end. ``sources`` begins with those of the ``num_accepted`` tokens.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    num_proposed: int = 0
    num_accepted: int = 0
    sources: Sequence[str] = ()  # [num_proposed] the source of each draft token
    draft_len: int = 0  # tokens of the draft's longest path
    num_levels: int = 0  # of the draft, as its proposer computed it
    num_ranked: int = 0  # nodes that the proposer found itself
    accepted_ranks: Sequence[int] = ()  # of accepted ones among these by their odds, best is 0
    # tokens whose KV the draft model lacks; 0 if it was not called
    num_uncached_draft_tokens: int = 0
    logprobs: Sequence[TokenLogprob] = ()  # [len(token_ids)] if requested
    prompt_logprobs: Sequence[TokenLogprob] = ()  # of the prompt in tokens[start + 1 : stop + 1]
    error: str | None = (
        None  # this request failed alone (NaN logits); `Refusal`: by its own parameters
    )

    @property
    def is_tree(self) -> bool:
        """Whether the draft had more than one path."""
        return 0 < self.draft_len < self.num_proposed


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The outcome of a `StepPlan`, requests in its order. Times are in seconds."""

    requests: Sequence[RequestOutput]
    times: Mapping[str, float] = msgspec.field(default_factory=dict)  # "draft", "forward", "verify"
    num_rows: int = 0  # that the target's forward pass computed
    lost_proposer: bool = False  # it failed repeatedly and drafts no more
