"""FusedLmHead: logits and tokens of few rows, in the graph of the layers.

Launched one by one behind a pass of few rows, the output layer and the sampler's kernels would
take longer to ask for than to compute, and the sampler would need inputs of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ....sampling.gumbel import vocabulary_hashes
from ....sampling.sampler import DraftVocab
from ...base import LayersOutput, Ops
from ...batch import SamplingPlan
from ...weights import DecoderWeights
from ..graph_inputs import GraphInputs, HostFields
from ..sampling.sampler import TritonPendingBest, TritonPendingTokens, TritonSampler
from .input_fields import fill_controls

# Rows. What is launched behind more of them is asked for while they are computed, and the logits
# of every graph stay in memory: of all buckets up to here, 217 rows of the vocabulary.
MAX_ROWS = 64


class GraphOutputs(NamedTuple):
    """Outputs of a graph, valid until the next replay."""

    hidden: Tensor  # [bucket, hidden]
    taps: Tensor | None = None  # [bucket, num_taps * hidden]
    logits: Tensor | None = None  # [bucket, vocab] float32, of its logit rows
    winners: Tensor | None = None  # int64 [bucket], or [bucket, num_best]; void where no place is
    draft_vocab: DraftVocab | None = None  # the tokens that the logits are of, if not all

    @classmethod
    def of(cls, layers: LayersOutput) -> GraphOutputs:
        """Outputs of layers alone, without the output layer."""
        return cls(layers.hidden, layers.taps)

    def of_pass(self, num_rows: int, logit_rows: Tensor, *, has_chosen: bool) -> LayersOutput:
        """Cut the outputs to a pass of ``num_rows`` rows. ``logit_rows`` is on the device.

        ``logit_rows``: [num_logits]. ``has_chosen``: whether the winners are the drawn tokens.
        """
        num_logits = len(logit_rows)
        logits = None if self.logits is None else self.logits[:num_logits]
        tokens, best = None, None
        if self.winners is not None and has_chosen:
            winners = self.winners[:num_logits]
            if winners.ndim > 1 or self.draft_vocab is not None:
                winners = winners.view(num_logits, -1)
                best = TritonPendingBest(winners, {}, self.draft_vocab)
            else:
                tokens = TritonPendingTokens(winners, {})
        taps = None if self.taps is None else self.taps[:num_rows]
        return LayersOutput(self.hidden[:num_rows], logit_rows, logits, tokens, taps, best)


class FusedLmHead:
    """The output layer and the sampler of a decoder.

    Edited rows are not for graphs: there may be any number of edits, and a constraint's mask is as
    long as the vocabulary. Where a pass has one, its graph leaves the logits and chooses nothing.
    ``num_best``: tokens of each place that it chooses. ``draft_vocab``: those that the output layer
    is of, unless it is of all.
    """

    def __init__(
        self,
        ops: Ops,
        weights: DecoderWeights,
        sampler: TritonSampler,
        num_best: int = 1,
        draft_vocab: DraftVocab | None = None,
    ) -> None:
        self._ops, self._weights, self._sampler = ops, weights, sampler
        self._num_best, self._draft_vocab = num_best, draft_vocab
        self._vocab_size, device = len(weights.embedding), weights.embedding.device
        # Made before a graph is captured, and held: the graph reads it where it is.
        self._hashes = (
            vocabulary_hashes(self._vocab_size, device)
            if draft_vocab is None
            else draft_vocab.hashes
        )

    def compute(self, layers: LayersOutput, graph_inputs: GraphInputs) -> GraphOutputs:
        """Compute logits and winners of [bucket] rows, by the controls in the inputs."""
        fields, hidden = graph_inputs.device, layers.hidden
        rows = hidden.index_select(0, fields["logit_rows"])
        logits = self._ops.logits(rows, self._weights.lm_head, self._weights.logit_cap)
        winners = self._sampler.gumbel_argmax(
            logits, fields["controls"], fields["cuts"], self._hashes, self._num_best
        )
        return GraphOutputs(hidden, layers.taps, logits, winners, self._draft_vocab)

    def fill(self, to: HostFields, draws: SamplingPlan | None, num_logits: int) -> bool:
        """Write what is to be chosen; whether all of it will be."""
        controls = None
        if draws is not None and num_logits > 0 and draws.num_best == self._num_best:
            controls = self._sampler.plain_controls(draws, num_logits, self._vocab_size)
        fill_controls(to, controls)
        return controls is not None
