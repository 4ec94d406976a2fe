"""StepOutput: what the model thread returns for a `StepPlan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec


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
