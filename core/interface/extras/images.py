"""PromptImage: an image of a prompt, for the scheduler, the cache and the image encoder."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

KEY_BYTES = 32
_ID_BYTES = 4


class TowerInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Input tensor of a model's image encoder (tower): row-major, little-endian numbers."""

    name: str
    dtype: Literal["float32", "int64"]
    shape: tuple[int, ...]
    data: bytes


class PromptImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Image of a prompt: the positions of its rows, and the inputs of the image encoder.

    ``runs``: (first position, number of rows) of each range of rows, ascending, disjoint. ``grid``:
    numbers of lines and columns of the rows, for models whose RoPE depends on them; the image then
    has one run. ``key``: hash of content and cache salt, `KEY_BYTES` long; images with equal keys
    have the same vectors. ``is_mutual``: whether all rows of a run attend to each other, so that
    one step must compute them all.
    """

    key: bytes
    runs: tuple[tuple[int, int], ...]
    inputs: tuple[TowerInput, ...]
    grid: tuple[int, int] | None = None
    is_mutual: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows of the image in the prompt."""
        return sum(count for _, count in self.runs)

    @property
    def num_bytes(self) -> int:
        """Size of the encoder's inputs in bytes."""
        return sum(len(each.data) for each in self.inputs)

    def ids(self) -> array[int]:
        """Return an id for each row, [num_rows], from -2**31 to -1, made from ``key``. O(rows).

        The ids take the place of token ids, so that the prefix cache matches an image by its
        content. Each row has 31 bits of a hash, so that no two images share all ids by chance.
        """
        stream = hashlib.shake_256(self.key).digest(_ID_BYTES * self.num_rows)
        words = (
            int.from_bytes(stream[at : at + _ID_BYTES], "little")
            for at in range(0, len(stream), _ID_BYTES)
        )
        return array("q", [-1 - (word >> 1) for word in words])


def content_hash(inputs: Sequence[TowerInput]) -> bytes:
    """Return a hash of the encoder's inputs. O(bytes): about a millisecond per megabyte."""
    digest = hashlib.sha256()
    for each in inputs:
        digest.update(f"{each.name} {each.dtype} {each.shape} ".encode())
        digest.update(each.data)
    return digest.digest()


def image_key(salt: str | None, content: bytes) -> bytes:
    """Return `PromptImage.key` for a `content_hash` and a cache salt or None."""
    mark = b"\0" if salt is None else b"\1"
    named = hashlib.sha256((salt or "").encode()).digest()
    return hashlib.sha256(mark + named + content).digest()


def with_image_rows(token_ids: Sequence[int], images: Sequence[PromptImage]) -> array[int]:
    """Return the tokens of a prompt, with `PromptImage.ids` at the positions of image rows.

    Raises ValueError for a run outside the prompt, or one that overlaps another run.
    """
    tokens, filled = array("q", token_ids), 0
    if not images:
        return tokens
    runs = sorted((start, count) for image in images for start, count in image.runs)
    for start, count in runs:
        if start < filled or count < 1 or start + count > len(tokens):
            raise ValueError(
                f"image rows {start} to {start + count} overlap others or exceed the prompt"
            )
        filled = start + count
    for image in images:
        ids, at = image.ids(), 0
        for start, count in image.runs:
            tokens[start : start + count] = ids[at : at + count]
            at += count
    return tokens


def mutual_runs(images: Sequence[PromptImage]) -> list[tuple[int, int]]:
    """Return the runs of ``images`` whose rows attend to each other: (position, number of rows)."""
    return [run for image in images if image.is_mutual for run in image.runs]


def text_ids(tokens: array[int], images: Sequence[PromptImage]) -> array[int]:
    """Return ``tokens`` with 0 for each image row; a copy if the prompt has images."""
    return array("q", [max(0, each) for each in tokens]) if images else tokens
