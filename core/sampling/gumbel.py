"""Gumbel noise as a pure function of (seed, output position, token id).

A counter-based generator keeps no state: the same position of a request always draws the same
noise, independent of other requests in the batch, of drafts and of recomputation. So verifier.py is
exact, and a drafter can draw with the target's own noise. Every integer is a 64-bit word, whose
arithmetic wraps around; the mixing function is `mix` in seeds.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .seeds import GOLDEN, ODD_1, ODD_2, mix, splitmix64


def gumbel(seed: int, position: int, ids: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32 [num_ids], for token ``ids`` at an output position."""
    return gumbel_rows([(seed, position)], id_hashes(ids))[0]


def gumbel_rows(places: Sequence[tuple[int, int]], hashes: Tensor) -> Tensor:
    """Return Gumbel noise, float32 [num_rows, num_ids].

    ``places``: (seed, output position) of each row. ``hashes``: `id_hashes` of the tokens,
    [num_ids] or [num_rows, num_ids].
    """
    keys = torch.tensor([_stream_key(*place) for place in places], dtype=torch.int64)
    words = hashes ^ keys.to(hashes.device)[:, None]
    words *= _signed(ODD_1)
    words ^= (words >> 32) & 0xFFFFFFFF
    words *= _signed(ODD_2)
    return _gumbel_of_words(words)


def id_hashes(ids: Tensor) -> Tensor:
    """Return a hash of each token id, from which its noise is made; int64, shaped like ``ids``."""
    words = (ids + 1) * _signed(GOLDEN)
    words = (words ^ _shifted(words, 30)) * _signed(ODD_1)
    words = (words ^ _shifted(words, 27)) * _signed(ODD_2)
    return words ^ _shifted(words, 31)


@lru_cache(maxsize=8)
def vocabulary_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """Return `id_hashes` of the whole vocabulary, int64 [vocab]; cached, so do not change it."""
    return id_hashes(torch.arange(vocab_size, device=device))


def _gumbel_of_words(words: Tensor) -> Tensor:
    # The greatest noise comes from a uniform u close to 1, where float32 is coarse (2**-24). But
    # float32 is precise for 1 - u, which is the magnitude of a signed word in units of 2**-63.
    minus_v = words.to(torch.float32).abs_().mul_(-(2.0**-63))
    minus_v.clamp_(min=2.0**-24 - 1.0, max=-(2.0**-63))
    return minus_v.log1p_().neg_().log_().neg_()


def _stream_key(seed: int, position: int) -> int:
    """Return the noise key of an output position: word ``position`` of the seed's stream."""
    return _signed(mix(stream_start(seed) + GOLDEN * (position + 1)))


def stream_start(seed: int) -> int:
    """Return the unsigned word from which `stream_keys` makes the noise keys of ``seed``."""
    return splitmix64(seed)


def stream_keys(starts: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the noise keys [num_rows] of rows with these `stream_start`s and output positions."""
    words = starts + np.uint64(GOLDEN) * (positions + 1).view(np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(ODD_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(ODD_2)
    keys: NDArray[np.int64] = (words ^ (words >> np.uint64(31))).view(np.int64)
    return keys


def _signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word


def _shifted(words: Tensor, bits: int) -> Tensor:
    # torch shifts signed words arithmetically: the mask clears the copies of the sign bit.
    return (words >> bits) & ((1 << (64 - bits)) - 1)
