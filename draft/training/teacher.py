"""Teacher: computes the target's hidden states and distributions that a draft is trained on.

The computation is the same as in serving. The results are dropped after each batch, because
hundreds of numbers per token would fill disks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...core.model.decoder import OwnDecoder, sequence_pool
from ...core.ops.batch import Segment, Taps, Wanted
from ...core.ops.row_extras import fresh_state
from ..heads.common.training import TeacherOutput
from .conversations import Conversation

PAGE_SIZE = 16
PASS_ROWS = 1024  # maximum number of rows of one forward pass
LOGIT_ROWS = 256  # maximum number of rows whose logits are in memory at a time


class Teacher:
    """Computes the target's forward pass over whole conversations.

    ``taps``: boundaries of the residual stream that the draft reads. ``draft_ids`` [draft_vocab]:
    the ids whose probabilities a draft learns, all if None. ``max_len``: maximum length of a
    conversation in tokens.
    """

    def __init__(
        self, decoder: OwnDecoder, taps: Taps, draft_ids: Tensor | None, max_len: int
    ) -> None:
        self._decoder, self._taps, self._draft_ids = decoder, taps, draft_ids
        self._pages = -(-max_len // PAGE_SIZE)
        num_seats = max(1, PASS_ROWS // max_len)
        num_pages = num_seats * self._pages
        self._pool = sequence_pool(decoder, num_pages, num_seats, page_size=PAGE_SIZE)
        self._max_len, self._num_seats = max_len, num_seats
        self.tap_scale: Tensor | None = None  # [num_taps * hidden] factors of the taps

    @torch.inference_mode()
    def __call__(self, batch: Sequence[Conversation]) -> TeacherOutput:
        """Return the taps and probabilities of a batch.

        Raises ValueError for a conversation longer than ``max_len``.
        """
        if max(map(len, batch)) > self._max_len:
            raise ValueError(f"a conversation has more than {self._max_len} tokens")
        device, width = self._decoder.device, max(map(len, batch))
        token_ids = torch.zeros(len(batch), width, dtype=torch.int64)
        rows = torch.full((len(batch), width), -1)
        size = len(self._taps) * self._decoder.config.hidden_size
        taps = torch.zeros(len(batch), width, size, dtype=self._decoder.dtype, device=device)
        probabilities, num_rows = [], 0
        for places in self._passes(batch):
            found = self._forward([batch[place] for place in places])
            for place, (features, p) in zip(places, found, strict=True):
                conversation = batch[place]
                token_ids[place, : len(conversation)] = torch.tensor(conversation.tokens)
                taps[place, : len(conversation)] = features
                first = conversation.first_row
                rows[place, first : len(conversation) - 1] = torch.arange(len(p)) + num_rows
                num_rows += len(p)
                probabilities.append(p)
        lens = torch.tensor([len(conversation) for conversation in batch])

        if self.tap_scale is not None:
            taps *= self.tap_scale
        parts = (token_ids.to(device), lens, taps, torch.cat(probabilities), rows.to(device))
        # Inference tensors cannot take part in the draft's backward pass, so they are copied.
        with torch.inference_mode(False):
            return TeacherOutput(*(part.clone() for part in parts))

    def fit_tap_scale(self, batch: Sequence[Conversation]) -> Tensor:
        """Set and return a scale [num_taps * hidden] that makes all dimensions about equally large.

        In a residual stream a few dimensions are a hundred times larger than the others and hardly
        change. Without the scale they hide the dimensions that a head has to read. The first token
        of each conversation is an outlier and is left out.
        """
        taught = self(batch)
        is_token = torch.arange(taught.taps.shape[1]) < taught.lens.unsqueeze(1)
        is_token[:, 0] = False
        taps = taught.taps[is_token.to(taught.taps.device)].float()
        self.tap_scale = (taps.square().mean(dim=0).sqrt() + 1e-3).reciprocal()
        self.tap_scale = self.tap_scale.to(taught.taps.dtype)
        return self.tap_scale

    def _passes(self, batch: Sequence[Conversation]) -> Iterator[list[int]]:
        """Yield the indices of conversations that fit into one pass together."""
        places: list[int] = []
        for place, conversation in enumerate(batch):
            num_rows = sum(len(batch[each]) for each in places) + len(conversation)
            if places and (len(places) == self._num_seats or num_rows > PASS_ROWS):
                yield places
                places = []
            places.append(place)
        yield places

    def _forward(self, conversations: Sequence[Conversation]) -> list[tuple[Tensor, Tensor]]:
        """Return the taps and probabilities of each conversation.

        The shapes are [len, num_taps * hidden] and [rows, draft_vocab].
        """
        segments = [
            Segment(
                token_ids=array("q", conversation.tokens),
                start=0,
                page_ids=array("q", range(seat * self._pages, (seat + 1) * self._pages)),
                num_logits=0,
                extras=fresh_state(self._pool.states, seat, len(conversation)),
            )
            for seat, conversation in enumerate(conversations)
        ]
        decoder = self._decoder
        batch = decoder.batch(segments, page_size=PAGE_SIZE)
        output = decoder.forward(batch, self._pool, Wanted(taps=self._taps))
        features = output.hidden.new_empty(0) if output.taps is None else output.taps
        found = []
        for at, conversation in zip(batch.first_rows.tolist(), conversations, strict=True):
            hidden = output.hidden[at + conversation.first_row : at + len(conversation) - 1]
            found.append((features[at : at + len(conversation)].clone(), self._p(hidden)))
        return found

    def _p(self, hidden: Tensor) -> Tensor:
        """Return the probabilities [rows, draft_vocab] of the next token, from [rows, hidden]."""
        parts = [self._p_part(part) for part in torch.split(hidden, LOGIT_ROWS)]
        return torch.cat(parts) if parts else hidden.new_empty((0, self._num_ids()))

    def _p_part(self, hidden: Tensor) -> Tensor:
        num_rows, least = len(hidden), self._decoder.ops.min_rows
        if num_rows < least:  # The kernels need `min_rows` rows, like the batches of `build_batch`.
            hidden = torch.cat((hidden, hidden[-1:].expand(least - num_rows, -1)))
        weights = self._decoder.weights
        logits = self._decoder.ops.logits(hidden, weights.lm_head, weights.logit_cap)[:num_rows]
        total = logits.logsumexp(dim=-1, keepdim=True)
        if self._draft_ids is not None:
            logits = logits.index_select(1, self._draft_ids)
        return logits.sub_(total).exp_()

    def _num_ids(self) -> int:
        config = self._decoder.config
        return config.vocab_size if self._draft_ids is None else len(self._draft_ids)
