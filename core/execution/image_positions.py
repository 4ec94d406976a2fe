"""RoPE positions and attention limits of the rows of a prompt with images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..interface.extras.images import PromptImage, mutual_runs
from ..ops.batch import IntArray


def image_positions(images: Sequence[PromptImage], start: int, stop: int) -> IntArray | None:
    """Return the RoPE positions in time, height and width of rows ``start`` to ``stop``.

    The result is [3, stop - start]; None if all three positions of each row equal its position in
    the sequence. All rows of an image have the same position in time; height and width count its
    lines and columns. The positions of the text after an image begin after the longer of the
    image's two sides (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    if not images:
        return None
    grids = [image for image in images if image.grid is not None]
    if not grids or stop <= grids[0].runs[0][0]:
        return None
    places = np.arange(start, stop)
    found, shift = np.stack([places] * 3), 0
    for image in grids:
        (first, count), *_ = image.runs
        assert image.grid is not None
        lines, columns = image.grid
        begin, end = (min(max(at - start, 0), stop - start) for at in (first, first + count))
        if begin < end:
            rows = places[begin:end] - first
            found[0, begin:end] = first + shift
            found[1, begin:end] = first + shift + rows // columns
            found[2, begin:end] = first + shift + rows % columns
        shift += max(lines, columns) - count
        found[:, end:] = places[end:] + shift
    return found


def image_reaches(images: Sequence[PromptImage], start: int, stop: int) -> IntArray | None:
    """Return the first position after those that each of the rows ``start`` to ``stop`` attends to.

    The result is [stop - start], or None if every row is causal. Rows of an image that attend to
    each other attend to all positions up to the end of their run.
    """
    if not images:
        return None
    runs = [
        (max(first, start) - start, first + count - start)
        for first, count in mutual_runs(images)
        if first < stop and start < first + count
    ]
    if not runs:
        return None
    found = np.arange(start + 1, stop + 1)
    for begin, end in runs:
        found[begin:end] = start + end
    return found
