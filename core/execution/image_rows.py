"""Input vectors of the batch rows that belong to images."""

from __future__ import annotations

import torch
from torch import Tensor

from ..interface.extras.images import PromptImage
from ..interface.plan import ScheduledRequest
from ..model.images.vision import Vision
from ..ops.batch import RaggedBatch
from .step_layout import StepLayout


def image_rows(
    layout: StepLayout, batch: RaggedBatch, vision: Vision, hidden: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return `Wanted.inputs` and `Wanted.layer_vectors` of a step; None if it has no image rows.

    ``hidden``: hidden size of the model. The images are encoded here, unless an earlier step kept
    their vectors. Raises ValueError if the image encoder returns another number of vectors than the
    prompt has rows for the image.
    """
    inputs: Tensor | None = None
    for scheduled, first_row in zip(layout.requests, layout.first_rows, strict=True):
        for image in scheduled.extras.images:
            spans = _spans(image, scheduled)
            if not spans:
                continue
            vectors = vision.vectors(image)
            if inputs is None:
                inputs = vectors.new_zeros((batch.num_rows, vectors.shape[1]))
            for position, at, count in spans:
                row = first_row + position - scheduled.start
                inputs[row : row + count] = vectors[at : at + count]
    if inputs is None:
        return None, None
    # The batch is padded with copies of its last row, which must write the same KV.
    inputs[layout.num_rows :] = inputs[layout.num_rows - 1]
    if inputs.shape[1] == hidden:
        return inputs, None
    first, *others = torch.split(inputs, hidden, dim=1)
    return first.contiguous(), torch.stack(others)


def _spans(image: PromptImage, scheduled: ScheduledRequest) -> list[tuple[int, int, int]]:
    """Return (position, index of the first vector, count) of each run of image rows in a chunk."""
    last_start, last_count = image.runs[-1]
    if last_start + last_count <= scheduled.start:  # Every step after the prompt returns here.
        return []
    spans, at = [], 0
    for start, count in image.runs:
        first, stop = max(start, scheduled.start), min(start + count, scheduled.stop)
        if first < stop:
            spans.append((first, at + first - start, stop - first))
        at += count
    return spans
