"""StepOutput: the result that the model thread returns for a `StepPlan`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ..options.checks import TokenId
from .draft import NO_DRAFT, Draft

if TYPE_CHECKING:
    Floats = array[float]
else:
    Floats = array  # msgspec reads annotations, but Python 3.11 has no `array[float]` at run time


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the model's unprocessed distribution."""

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()  # (token id, log-probability), best first


class Refusal(str):
    """Error that the request's own parameters caused, for example its grammar."""

    __slots__ = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of a step for one scheduled request.

    ``token_ids`` is the accepted path followed by the recovered or bonus token; empty for a chunk
    that does not reach the end.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    draft: Draft = NO_DRAFT  # draft that was verified
    path: Sequence[int] = ()  # accepted nodes of the draft, by depth
    logprobs: Sequence[TokenLogprob] = ()  # [len(token_ids)] if requested, else empty

    # log-probabilities of tokens[start + 1 : stop + 1]
    prompt_logprobs: Sequence[TokenLogprob] = ()
    pooled: Floats | None = None  # float32 result of `Pooling`, once the prompt is computed
    error: str | None = (
        None  # error of this request alone (NaN logits); `Refusal`: caused by its own parameters
    )


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Outcome of a `StepPlan`, with the requests in its order. Times are in seconds."""

    requests: Sequence[RequestOutput]
    # seconds of "draft", "forward" and "verify"
    times: Mapping[str, float] = msgspec.field(default_factory=dict)
    num_rows: int = 0  # rows of the target's forward pass
    lost_proposer: bool = False  # the proposer failed repeatedly and drafts no more
    num_images: int = 0  # images whose vectors the image tower computed
