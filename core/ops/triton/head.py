"""Head: what a graph of few rows does behind its layers: logits, and a token for each of them.

Launched one by one behind a pass of few rows, the output layer and the sampler's kernels would
take longer to ask for than to compute, and the sampler would need a packet of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...batch import RaggedBatch
from ...noise import vocabulary_hashes
from ..base import Ops
from ..weights import DecoderWeights
from .packet import HostFields, Packet
from .pass_fields import fill_controls
from .sampler import TritonDrawing, TritonSampler

# Rows. What is launched behind more of them is asked for while they are computed, and the logits
# of every graph stay in memory: of all buckets up to here, 217 rows of the vocabulary.
MAX_ROWS = 64


class Outcome(NamedTuple):
    """What a graph leaves, until the next replay."""

    hidden: Tensor  # [bucket, hidden]
    logits: Tensor | None = None  # [bucket, vocab] float32, of its logit rows
    winners: Tensor | None = None  # [bucket] int64; void where there is nobody

    def leave(self, batch: RaggedBatch, *, has_chosen: bool) -> None:
        """Say in the batch what its pass has left."""
        if self.logits is not None:
            batch.logits = self.logits[: batch.num_logits]
        if self.winners is not None and has_chosen:
            batch.drawing = TritonDrawing(self.winners[: batch.num_logits], {})


class Head:
    """The output layer and the sampler of a decoder.

    Edited rows are not for graphs: there may be any number of edits, and a constraint's mask is as
    long as the vocabulary. Where a pass has one, its graph leaves the logits and chooses nothing.
    """

    def __init__(self, ops: Ops, weights: DecoderWeights, sampler: TritonSampler) -> None:
        self._ops, self._weight, self._sampler = ops, weights.lm_head, sampler
        self._vocab_size, device = len(weights.embedding), weights.embedding.device
        # Made before a graph is captured, and held: the graph reads it where it is.
        self._hashes = vocabulary_hashes(self._vocab_size, device)

    def compute(self, hidden: Tensor, packet: Packet) -> Outcome:
        """Behind the layers' ``hidden`` [bucket, hidden], by what the packet says."""
        fields = packet.device
        logits = self._ops.logits(hidden.index_select(0, fields["logit_rows"]), self._weight)
        winners = self._sampler.race(logits, fields["controls"], fields["cuts"], self._hashes)
        return Outcome(hidden, logits, winners)

    def fill(self, to: HostFields, batch: RaggedBatch) -> bool:
        """Write what is to be chosen; whether all of it will be."""
        controls, count = None, batch.num_logits
        if batch.draws is not None and count > 0:
            controls = self._sampler.plain_controls(batch.draws, count, self._vocab_size)
        fill_controls(to, controls)
        return controls is not None
