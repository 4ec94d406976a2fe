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
    """Log-probability of one token by the model's raw logits, without sampling parameters."""

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()  # (token id, log-probability), best first


class Refusal(str):
    """Error message for a failure that the request's own parameters caused, such as its grammar."""

    __slots__ = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of a step for one scheduled request.

    ``token_ids`` are the accepted draft tokens and then the recovered or bonus token; they are
    empty for a chunk that does not reach the last token of the prompt.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    draft: Draft = NO_DRAFT  # the draft that was verified
    path: Sequence[int] = ()  # accepted nodes of the draft, in order of depth
    logprobs: Sequence[TokenLogprob] = ()  # [len(token_ids)] if requested, else empty

    # log-probabilities of tokens[start + 1 : stop + 1] of the prompt, if requested
    prompt_logprobs: Sequence[TokenLogprob] = ()
    pooled: Floats | None = None  # float32 result of `Pooling`, once the prompt is computed
    # Error of this request alone, such as NaN logits; a `Refusal` if its own parameters caused it.
    error: str | None = None


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Outcome of a `StepPlan`, with an output for each request in the order of the plan."""

    requests: Sequence[RequestOutput]
    # seconds by part of the step: "draft", "forward" and "verify"
    times: Mapping[str, float] = msgspec.field(default_factory=dict)
    num_rows: int = 0  # number of rows of the target's forward pass
    lost_proposer: bool = False  # whether the proposer was disabled because it kept failing
    num_images: int = 0  # number of images that the image encoder computed
