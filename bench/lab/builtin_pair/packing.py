"""Documents of token ids, cut into rows of equal length, in an order that a seed decides."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from .data import END_OF_TEXT, cut_anywhere

CUT_SEED = 1

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[Ids]:
    """Token ids of every document, each ended by `<|endoftext|>`."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts)
    return [np.array([*one.ids, end], dtype=np.int64) for one in encoded]


def encode_cut(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[Ids]:
    """Encode texts, like `encode`, but cut them at random places first: see `cut_anywhere`."""
    rng = random.Random(CUT_SEED)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    documents = []
    for text in texts:
        pieces = tokenizer.backend_tokenizer.encode_batch_fast(cut_anywhere(text, rng))
        ids = [token for piece in pieces for token in piece.ids]
        documents.append(np.array([*ids, end], dtype=np.int64))
    return documents


def pack(documents: list[Ids], row: int, seed: int) -> torch.Tensor:
    """One epoch as rows [num_rows, row + 1]: documents shuffled, streamed, cut, rows shuffled.

    The last column of a row is the label of its last position; the part of the stream that fills no
    row is left out.
    """
    rng = np.random.default_rng(seed)
    stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
    stream = stream[rng.integers(0, row) :]
    num_rows = (len(stream) - 1) // row
    starts = rng.permutation(num_rows) * row
    return torch.from_numpy(stream[starts[:, None] + np.arange(row + 1)])


@dataclass
class Packer:
    """Endless batches; `epoch` and `cursor` say all about where it stands, so a run can be resumed.

    `cursor` counts the rows of this epoch that were already given.
    """

    documents: list[Ids]
    row: int
    seed: int
    epoch: int = 0
    cursor: int = 0

    def __post_init__(self) -> None:
        """Pack the epoch that the cursor is in."""
        self._rows = pack(self.documents, self.row, self.seed + self.epoch)

    def next(self, num_rows: int) -> torch.Tensor:
        """The next batch [num_rows, row + 1]; an epoch's last, incomplete batch is skipped."""
        if self.cursor + num_rows > len(self._rows):
            self.epoch, self.cursor = self.epoch + 1, 0
            self._rows = pack(self.documents, self.row, self.seed + self.epoch)
        self.cursor += num_rows
        return self._rows[self.cursor - num_rows : self.cursor]


def in_order(documents: list[Ids], row: int) -> Iterator[torch.Tensor]:
    """Batches [1, up to row + 1] over all documents, in order and complete, for measuring."""
    for document in documents:
        for start in range(0, len(document) - 1, row):
            yield torch.from_numpy(document[start : start + row + 1])[None]
