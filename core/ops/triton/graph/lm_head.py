"""FusedLmHead: logits and tokens of few rows, in the graph of the layers.

After a pass of few rows, launching the kernels of the output layer and the sampler one by one would
take longer than computing them, and the sampler would need separate inputs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ....sampling.gumbel import vocabulary_hashes
from ....sampling.sampler import DraftVocab
from ...base import LayersOutput, Ops
from ...batch import MOST_DRAWN_ROWS, SamplingPlan
from ...weights import DecoderWeights
from ..graph_inputs import GraphInputs, HostFields
from ..sampling.sampler import TritonPendingBest, TritonPendingTokens, TritonSampler
from .input_fields import fill_controls

# With more rows, the kernels after the graph are launched while the graph computes. The logits of
# every graph stay in memory: all buckets up to 64 have 217 rows together.
MAX_ROWS = MOST_DRAWN_ROWS


class GraphOutputs(NamedTuple):
    """Outputs of a graph, valid until the next replay."""

    hidden: Tensor  # [bucket, hidden]
    taps: Tensor | None = None  # [bucket, num_taps * hidden]
    logits: Tensor | None = None  # [bucket, vocab] float32, for the logit rows
    winners: Tensor | None = None  # int64 [bucket] or [bucket, num_best]; any value if unused
    draft_vocab: DraftVocab | None = None  # tokens with logits; None: all tokens

    @classmethod
    def of(cls, layers: LayersOutput) -> GraphOutputs:
        """Return the outputs of the layers, without logits."""
        return cls(layers.hidden, layers.taps)

    def of_pass(self, num_rows: int, logit_rows: Tensor, *, has_chosen: bool) -> LayersOutput:
        """Return the outputs of a pass of ``num_rows`` rows.

        ``logit_rows`` [num_logits]: on the device. ``has_chosen``: whether the winners are the
        drawn tokens.
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

    Graphs do not support edited rows: the number of edits is unlimited, and a constraint's mask is
    as long as the vocabulary. For a pass with such a row the graph computes the logits but chooses
    no tokens. ``num_best``: tokens to choose per draw. ``draft_vocab``: tokens of the output
    layer, if not the whole vocabulary.
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
        # Made before a graph is captured, and kept, because the graph reads it at its address.
        self._hashes = (
            vocabulary_hashes(self._vocab_size, device)
            if draft_vocab is None
            else draft_vocab.hashes
        )

    def compute(self, layers: LayersOutput, graph_inputs: GraphInputs) -> GraphOutputs:
        """Return logits and chosen tokens' words of [bucket] rows; the inputs have the controls."""
        fields, hidden = graph_inputs.device, layers.hidden
        rows = hidden.index_select(0, fields["logit_rows"])
        logits = self._ops.logits(rows, self._weights.lm_head, self._weights.logit_cap)
        winners = self._sampler.gumbel_argmax(
            logits, fields["controls"], fields["cuts"], self._hashes, self._num_best
        )
        return GraphOutputs(hidden, layers.taps, logits, winners, self._draft_vocab)

    def fill(self, to: HostFields, draws: SamplingPlan | None, num_logits: int) -> bool:
        """Write the controls of a pass's draws; return whether the graph will choose all."""
        controls = None
        if draws is not None and num_logits > 0 and draws.num_best == self._num_best:
            controls = self._sampler.plain_controls(draws, num_logits, self._vocab_size)
        fill_controls(to, controls)
        return controls is not None
