"""PromptImage: an image of a prompt, as the scheduler, the cache and the tower know it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

KEY_BYTES = 32
_ID_BYTES = 4


class TowerInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input of a model's image tower: numbers, row after row, the lowest byte first."""

    name: str
    dtype: Literal["float32", "int64"]
    shape: tuple[int, ...]
    data: bytes


class PromptImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image: the rows of the prompt that its vectors take, and what the tower makes them of.

    ``runs``: (first position, number of rows), rising and apart. ``grid``: lines and columns of the
    rows, which are one run then, of models whose RoPE turns by them. ``key``: the hash of the
    content and of the cache salt, `KEY_BYTES` long: images with one key have the same vectors.
    ``is_mutual``: rows of a run see each other, those behind them, too; one step computes them all.
    """

    key: bytes
    runs: tuple[tuple[int, int], ...]
    inputs: tuple[TowerInput, ...]
    grid: tuple[int, int] | None = None
    is_mutual: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the prompt."""
        return sum(count for _, count in self.runs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs."""
        return sum(len(each.data) for each in self.inputs)

    def ids(self) -> array[int]:
        """Ids of its rows, [num_rows]: negative, above -2**31 - 1, and by the key alone.

        In the place of token ids they make the prefix cache match an image by its content. Rows
        have 31 bits each, so that all of an image's are equal by no chance. O(rows).
        """
        stream = hashlib.shake_256(self.key).digest(_ID_BYTES * self.num_rows)
        words = (
            int.from_bytes(stream[at : at + _ID_BYTES], "little")
            for at in range(0, len(stream), _ID_BYTES)
        )
        return array("q", [-1 - (word >> 1) for word in words])


def content_hash(inputs: Sequence[TowerInput]) -> bytes:
    """A hash of all that a tower reads. O(bytes): about a millisecond a megabyte."""
    digest = hashlib.sha256()
    for each in inputs:
        digest.update(f"{each.name} {each.dtype} {each.shape} ".encode())
        digest.update(each.data)
    return digest.digest()


def image_key(salt: str | None, content: bytes) -> bytes:
    """The key of an image with this hash of its content under a cache salt, or without one."""
    mark = b"\0" if salt is None else b"\1"
    named = hashlib.sha256((salt or "").encode()).digest()
    return hashlib.sha256(mark + named + content).digest()


def with_image_rows(token_ids: Sequence[int], images: Sequence[PromptImage]) -> array[int]:
    """The tokens of a prompt, with the ids of images' rows in their places.

    Raises ValueError for a run outside of the prompt, or over another one.
    """
    tokens, filled = array("q", token_ids), 0
    runs = sorted((start, count) for image in images for start, count in image.runs)
    for start, count in runs:
        if start < filled or count < 1 or start + count > len(tokens):
            raise ValueError(f"an image's rows {start} to {start + count} do not fit the prompt")
        filled = start + count
    for image in images:
        ids, at = image.ids(), 0
        for start, count in image.runs:
            tokens[start : start + count] = ids[at : at + count]
            at += count
    return tokens


def chunk_stop(images: Sequence[PromptImage], start: int, stop: int) -> int:
    """The end of a chunk from ``start`` on that was to end at ``stop``, inside of no mutual run.

    Before such a run, or behind it where the chunk begins with rows of it.
    """
    for first, count in mutual_runs(images):
        if first < stop < first + count:
            return first if start < first else first + count
    return stop


def mutual_runs(images: Sequence[PromptImage]) -> list[tuple[int, int]]:
    """The runs whose rows see each other."""
    return [run for image in images if image.is_mutual for run in image.runs]


def text_ids(tokens: array[int], images: Sequence[PromptImage]) -> array[int]:
    """The tokens with a 0 in the place of each image row: a copy where there are images."""
    return array("q", [max(0, each) for each in tokens]) if images else tokens
