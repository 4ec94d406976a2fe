"""TritonSampler: chooses the tokens of a step on the device.

The host writes one packet and reads one word for each place; nothing waits in between, and `begin`
leaves the reading for later. A plain batch takes two kernels, whatever its mix of greedy and
sampled rows: greatest values by tiles, then the race. Rows under top-k or top-p take one more,
edited rows two. core/verify.py is the oracle: what this chooses differs from it only where two
scores, or a token's mass and the edge of top-p, are as near as the last bits of a logarithm. A
row's token depends on that row alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...cuts import mass_unit
from ...noise import vocabulary_hashes
from ...sampling import SampleRow
from ...verify import ALL_BANNED, NOT_FINITE, Choice, Place, Verified, VerifyRow, walk_drafts
from . import choose
from .choose import race_kernel, rank_kernel
from .controls import ControlDesk, Controls, EditLists
from .cuts import cut_kernel
from .edits import copy_kernel, edit_kernel
from .packet import FLIGHTS, Field, Packet, Reply

TILE = 1024  # tokens
LIST_TILE = 512  # values of a cut row, weighed together
EDIT_TILE = 256  # edits
# Logits handled at once: bounds the working space. A step's second block writes where the one of
# the launch ahead of it was, and may wait for that: 256 rows of the largest vocabularies must fit
# into one.
BLOCK = 2**26
ROUNDED = {"enable_fp_fusion": False}  # after every operation
_ALIGN = 4  # numbers: 16 bytes
_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
_LAST_ID = 2**31 - 1
_ERRORS = {choose.NOT_FINITE.value: NOT_FINITE, choose.ALL_BANNED.value: ALL_BANNED}


class TritonSampler:
    """`DeviceSampler` by the kernels of choose.py, cuts.py and edits.py.

    ``tile``: tokens of the vocabulary that one program looks at, a power of two.
    """

    def __init__(self, *, tile: int = TILE) -> None:
        self._tile = tile
        self._desk = ControlDesk()
        self._post = _Post()

    def verify(self, logits: Tensor, rows: Sequence[VerifyRow]) -> list[Verified]:
        """Compare drafts with the target's own tokens; see `core.verify.verify`."""
        return walk_drafts(logits, rows, lambda places: self._choose(logits, places, 1.0))

    def sample(
        self, logits: Tensor, rows: Sequence[SampleRow], *, tau: float = 1.0
    ) -> list[Choice]:
        """Draw one token per row; see `core.verify.sample`."""
        if len(rows) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {len(rows)} tokens to draw")
        return self._choose(logits, list(enumerate(rows)), tau)

    def begin(self, logits: Tensor, rows: Sequence[SampleRow]) -> _Drawing:
        """As `sample` of a row or more, without waiting."""
        if len(rows) != len(logits) or not rows:
            raise ValueError(f"{len(logits)} rows of logits for {len(rows)} tokens to draw")
        return self._begin(logits, list(enumerate(rows)), 1.0)

    def _choose(self, logits: Tensor, places: Sequence[Place], tau: float) -> list[Choice]:
        return self._begin(logits, places, tau).choices() if places else []

    @torch.inference_mode()
    def _begin(self, logits: Tensor, places: Sequence[Place], tau: float) -> _Drawing:
        vocab_size = logits.shape[-1]
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        step = max(1, BLOCK // vocab_size)
        winners, refusals = [], dict[int, str]()
        for start in range(0, len(places), step):
            controls = self._desk.write(places[start : start + step], vocab_size, tau)
            refusals |= {start + index: why for index, why in controls.refusals.items()}
            winners.append(_Race(logits, controls, self._post, self._tile).run())
        return _Drawing(winners[0] if len(winners) == 1 else torch.cat(winners), refusals)


class _Drawing:
    """`Drawing`: the winners' words, on the device and on their way to the host."""

    def __init__(self, words: Tensor, refusals: dict[int, str]) -> None:
        self.words = words
        self._reply, self._refusals = Reply(words), refusals

    def choices(self) -> list[Choice]:
        """Wait for the words."""
        return _choices(self._reply.read(), self._refusals)


def _choices(words: NDArray[np.int64], refusals: dict[int, str]) -> list[Choice]:
    """What the winners' words say. Logits that are not finite come before any refusal."""
    choices = [Choice(token_id) for token_id in (_LAST_ID - (words & _LAST_ID)).tolist()]
    for index, why in refusals.items():
        choices[index] = Choice(-1, why)
    for index in np.flatnonzero(words >= choose.NOT_FINITE.value).tolist():
        choices[index] = Choice(-1, _ERRORS[int(words[index])])
    return choices


class _Post:
    """Carries arrays to the device, all of them in one copy."""

    def __init__(self) -> None:
        self._packet: Packet | None = None
        self._capacity = 0  # numbers

    def send(self, arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
        """The arrays on the device, flat, each of its own dtype.

        They hold until the next call: its copy is in the stream behind the kernels that read them.
        """
        stops = np.cumsum([-(-array.nbytes // (4 * _ALIGN)) * _ALIGN for array in arrays]).tolist()
        packet = self._packet_of(stops[-1], device)
        host, there = packet.open()["numbers"], packet.device["numbers"]
        sent = []
        for array, start in zip(arrays, [0, *stops], strict=False):
            stop = start + array.nbytes // 4
            host[start:stop] = array.reshape(-1).view(np.int32)
            sent.append(there[start:stop].view(_DTYPES[array.dtype.name]))
        packet.upload(stops[-1])
        return sent

    def _packet_of(self, size: int, device: torch.device) -> Packet:
        if self._packet is None or size > self._capacity:
            self._capacity = max(2**12, 1 << (size - 1).bit_length())
            field = Field("numbers", self._capacity)
            self._packet = Packet([field], device, num_hosts=FLIGHTS)
        return self._packet


class _Race:
    """Some places on their way to a token each."""

    def __init__(self, logits: Tensor, controls: Controls, post: _Post, tile: int) -> None:
        self._logits = logits
        vocab_size, device = logits.shape[-1], logits.device
        num_tiles = -(-vocab_size // tile)
        self._shape = {"VOCAB": vocab_size, "TILE": tile, "NUM_TILES": num_tiles}
        self._tiles = 1 << (num_tiles - 1).bit_length()
        self._num_places = len(controls.columns)
        self._lists = controls.edits
        sent = post.send(_arrays(controls), device)
        self._controls, self._cuts, self._sent_edits = sent[0], sent[1], sent[2:]
        self._ranks = self._space((self._num_places, num_tiles), torch.int32)
        self._kept = self._space((self._num_places, 2), torch.int32)

    def run(self) -> Tensor:
        """Each place's winner, int64 [num_places]."""
        values, raw_ranks = self._edited()
        rows = (self._logits, self._logits.stride(0), values, self._controls)
        grid = (self._num_places, self._shape["NUM_TILES"])
        winners = self._space((self._num_places,), torch.int64)
        rank_kernel[grid](*rows, self._ranks, winners, **self._shape, **ROUNDED)
        self._cut(rows)
        hashes = vocabulary_hashes(self._shape["VOCAB"], self._logits.device)
        race_kernel[grid](
            *rows, self._ranks, raw_ranks, self._kept, hashes, winners,
            **self._shape, TILES=self._tiles, **ROUNDED,
        )  # fmt: skip
        return winners

    def _edited(self) -> tuple[Tensor, Tensor]:
        """Copies of the rows that are edited, float32 [num_edited, vocab].

        Also the greatest rank of each tile before the edits, int32 [num_edited, num_tiles].
        """
        num_edited = 0 if self._lists is None else len(self._lists.places)
        values = self._space((num_edited, self._shape["VOCAB"]), torch.float32)
        raw_ranks = self._space((num_edited, self._shape["NUM_TILES"]), torch.int32)
        if self._lists is not None:
            self._edit(self._lists, values, raw_ranks)
        return values, raw_ranks

    def _edit(self, lists: EditLists, values: Tensor, raw_ranks: Tensor) -> None:
        places, mask_of, masks, bounds, ids, amounts = self._sent_edits
        copy_kernel[(len(values), self._shape["NUM_TILES"])](
            self._logits, self._logits.stride(0), values, self._controls,
            places, mask_of, masks, raw_ranks,
            **self._shape, MASK_WORDS=lists.masks.shape[1], **ROUNDED,
        )  # fmt: skip
        if len(ids):
            edit_kernel[(len(values),)](
                values, bounds, ids, amounts,
                VOCAB=self._shape["VOCAB"], TILE=EDIT_TILE, **ROUNDED,
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


def _arrays(controls: Controls) -> list[NDArray[Any]]:
    lists = controls.edits
    arrays: list[NDArray[Any]] = [controls.columns, controls.cuts]
    if lists is not None:
        arrays += _edit_arrays(lists)
    return arrays


def _edit_arrays(lists: EditLists) -> list[NDArray[Any]]:
    return [lists.places, lists.mask_of, lists.masks, lists.bounds, lists.ids, lists.amounts]
