"""Proposer: the protocol of drafters with a model of their own.

A proposer runs in the model thread: it proposes before the target's forward pass and observes the
outcome of every step, also of those without its drafts. Its drafts can never change the output (see
core/sampling/verifier.py), only how many tokens a step yields: so it may fail, guess wrong or
return nothing. A drafter that needs token ids alone is a `Source` on the event loop's side (see
draft/sources/source.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from ..interface.draft import Draft
from ..interface.output import RequestOutput
from ..interface.plan import ScheduledRequest
from ..interface.protocols import ProposerTraits
from ..model.decoder import Decoder
from ..ops.batch import ForwardOutput, RaggedBatch, Taps
from ..ops.kv_pool import KVPool


class VerifiedRequest(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one scheduled request.

    ``batch_rows[i]`` is the row of the batch that holds position ``scheduled.start + i``: the
    pending tokens, then the accepted draft tokens. There is none where the request failed.
    """

    scheduled: ScheduledRequest
    batch_rows: Sequence[int]
    output: RequestOutput


class PageRows(NamedTuple):
    """Rows that a proposer keeps for each page, ``[num_pages or more, ...]``, row p for page p.

    Where tiers keep pages beyond the pool, rows are read from the one and come back to the other.
    """

    source: Tensor
    target: Tensor


class Proposer(Protocol):
    """Guesses the next tokens of a batch of requests."""

    @property
    def source(self) -> str:
        """The name in answers and metrics."""

    @property
    def traits(self) -> ProposerTraits:
        """Traits that the price of its drafts depends on; fixed."""

    @property
    def taps(self) -> Taps:
        """Boundaries of the target's residual stream that `observe` is to find; fixed."""

    def propose(self, requests: Sequence[ScheduledRequest]) -> Sequence[Draft]:
        """One draft for each request, in order, each of at most its plan's ``max_draft`` nodes.

        A plan's ``draft`` has what was looked up: a draft takes its place, `NO_DRAFT` leaves it.
        Of a tree no more nodes beside the trunk are verified than ``spare_page_ids`` have slots
        for. A proposer that keeps KV of its nodes has the same slots in its own pool; accepted ones
        are its own to move (`observe`).
        """

    def observe(
        self, batch: RaggedBatch, output: ForwardOutput, verified: Sequence[VerifiedRequest]
    ) -> None:
        """Observe a step, plain and prefill steps included, after its verification.

        ``verified`` [requests of the plan]. All arguments are lent for the call. If another step
        was launched behind this one, ``output.hidden`` and ``output.logits`` are void.
        """

    @property
    def stored(self) -> Sequence[PageRows]:
        """Rows that tiers keep beside the target's KV; fixed. None, if the proposer catches up."""
        return ()

    def adopt(self, page_ids: array[int]) -> None:
        """Take pages that came from a tier, rows of `stored` with them; called after `forget`."""
        del page_ids  # without rows of its own, none come back

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Forget requests that released their pages, and pages that were allocated anew."""
        del request_ids, newly_allocated_pages  # nothing is kept

    # -- before the first request ---------------------------------------------------------------

    device: torch.device  # that computes its passes
    models: Sequence[tuple[Decoder, KVPool]] = ()  # decoders of its passes, and their pools

    def warm_up(self, max_len: int, num_best: int) -> None:
        """Be ready for passes over texts of up to ``max_len`` tokens, beside those of `models`.

        ``num_best``: tokens that will be chosen of each place.
        """
        del max_len, num_best

    def try_draft(self, num_requests: int, num_tokens: int) -> None:
        """Compute one pass of so many drafts, behind ``num_tokens`` tokens of void KV each.

        It is called to be timed, before any `propose`; the pools of `models` are zeroed before.
        """
