"""GumbelArgmax: launches the sampler's kernels, in a graph or one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....sampling.top_k_top_p import mass_unit
from .gumbel_argmax_kernels import gumbel_argmax_kernel, merge_best_kernel, rank_kernel
from .logits_processors import copy_kernel, edit_kernel
from .row_edits import num_words
from .sampling_inputs import NUM_COLUMNS
from .top_k_top_p import cut_kernel

TILE = 1024  # tokens of a program
LIST_TILE = 512  # values of a cut row that are weighed together
EDIT_TILE = 256  # edits applied together
ROUNDED = {"enable_fp_fusion": False}  # results are rounded after every operation


class SentEdits(NamedTuple):
    """`EditLists` on the device, each array flat."""

    draws: Tensor
    mask_of: Tensor
    masks: Tensor
    bounds: Tensor
    ids: Tensor
    amounts: Tensor


class GumbelArgmax:
    """Choice of one token, or of the best ones, for each draw; a draw has one row of the logits.

    All inputs are on the device. ``logits`` [num_rows, vocab]. ``controls`` int64, `NUM_COLUMNS`
    per draw; a draw whose `ROW` is -1 is unused, and its result undefined. ``cuts`` int32: draws
    with top-k or top-p; -1: unused. ``hashes``: `core.sampling.gumbel.vocabulary_hashes`.
    ``edits``: edits of the draws that have any. ``num_best``: number of tokens to choose per
    draw.
    """

    def __init__(
        self,
        logits: Tensor,
        controls: Tensor,
        cuts: Tensor,
        hashes: Tensor,
        edits: SentEdits | None = None,
        *,
        tile: int = TILE,
        num_best: int = 1,
    ) -> None:
        self._logits, self._controls, self._cuts, self._hashes = logits, controls, cuts, hashes
        vocab_size = logits.shape[-1]
        num_tiles = -(-vocab_size // tile)
        self._shape = {"VOCAB": vocab_size, "TILE": tile, "NUM_TILES": num_tiles}
        self._tiles, self._num_best = 1 << (num_tiles - 1).bit_length(), num_best
        self._num_draws = len(controls) // NUM_COLUMNS
        self._edits = edits
        self._ranks = self._space((self._num_draws, num_tiles), torch.int32)
        self._kept = self._space((self._num_draws, 2), torch.int32)

    def run(self) -> Tensor:
        """Return the word of each draw's token, int64 [num_draws], or of the best ones.

        The best ones are [num_draws, num_best]. The upper half of a word is the rank of the
        token's score, the lower half `LAST_ID` minus its id.
        """
        values, raw_ranks = self._edited()
        rows = (self._logits, self._logits.stride(0), values, self._controls)
        grid = (self._num_draws, self._shape["NUM_TILES"])
        winners = self._space((self._num_draws,), torch.int64)
        tile_best = winners if self._num_best == 1 else self._tile_best()
        rank_kernel[grid](*rows, self._ranks, winners, **self._shape, **ROUNDED)
        self._cut(rows)
        gumbel_argmax_kernel[grid](
            *rows, self._ranks, raw_ranks, self._kept, self._hashes, tile_best, winners,
            **self._shape, TILES=self._tiles, NUM_BEST=self._num_best, **ROUNDED,
        )  # fmt: skip
        return winners if self._num_best == 1 else self._merged(tile_best, winners)

    def _tile_best(self) -> Tensor:
        return self._space((self._num_draws, self._shape["NUM_TILES"], self._num_best), torch.int64)

    def _merged(self, tile_best: Tensor, winners: Tensor) -> Tensor:
        """Return the words of each draw's best tokens, merged from the best of its tiles."""
        best = self._space((self._num_draws, self._num_best), torch.int64)
        num_tiles = self._shape["NUM_TILES"]
        merge_best_kernel[(self._num_draws,)](
            tile_best, winners, self._controls, best, NUM_TILES=num_tiles, NUM_BEST=self._num_best,
            WORDS=1 << (num_tiles * self._num_best - 1).bit_length(),
        )  # fmt: skip
        return best

    def _edited(self) -> tuple[Tensor, Tensor]:
        """Return edited copies of rows, and the greatest rank of each tile before the edits.

        They are float32 [num_edited, vocab] and int32 [num_edited, num_tiles].
        """
        num_edited = 0 if self._edits is None else len(self._edits.draws)
        values = self._space((num_edited, self._shape["VOCAB"]), torch.float32)
        raw_ranks = self._space((num_edited, self._shape["NUM_TILES"]), torch.int32)
        if self._edits is not None:
            self._edit(self._edits, values, raw_ranks)
        return values, raw_ranks

    def _edit(self, edits: SentEdits, values: Tensor, raw_ranks: Tensor) -> None:
        vocab_size = self._shape["VOCAB"]
        copy_kernel[(len(values), self._shape["NUM_TILES"])](
            self._logits, self._logits.stride(0), values, self._controls,
            edits.draws, edits.mask_of, edits.masks, raw_ranks,
            **self._shape, MASK_WORDS=num_words(vocab_size), **ROUNDED,
        )  # fmt: skip
        if len(edits.ids):
            edit_kernel[(len(values),)](
                values, edits.bounds, edits.ids, edits.amounts,
                VOCAB=vocab_size, TILE=EDIT_TILE, **ROUNDED,
            )  # fmt: skip

    def _cut(self, rows: tuple[Any, ...]) -> None:
        if not len(self._cuts):
            return
        vocab_size = self._shape["VOCAB"]
        space = self._space((len(self._cuts), vocab_size), torch.float32)
        cut_kernel[(len(self._cuts),)](
            *rows, self._cuts, self._ranks, space, self._kept, **self._shape, TILES=self._tiles,
            MASS_SCALE=1.0 / mass_unit(vocab_size), LIST_TILE=LIST_TILE, num_warps=8, **ROUNDED,
        )  # fmt: skip

    def _space(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._logits.device)
