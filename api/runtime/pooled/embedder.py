"""Embedder: embeds texts with the hidden state of their last token."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ....core.errors import InvalidRequest
from ....core.interface.request import DEFAULT_CACHE, CacheOptions
from ....core.interface.sampling import Pooling
from ....core.options.checks import MAX_INT, check_integer
from ...types.sampling_params import SamplingParams
from ..engine_client import EngineClient
from ..preprocess import Prompt
from .pooled_prompts import PooledPrompts

logger = logging.getLogger(__name__)
HIDDEN_STATE = Pooling()


def unit_vector(numbers: array[float], dimensions: int | None = None) -> NDArray[np.float32]:
    """Return the first ``dimensions`` of a vector, scaled to length 1; a zero vector stays zero."""
    vector = np.frombuffer(numbers, np.float32)[:dimensions].astype(np.float64)
    length = float(np.sqrt(np.square(vector).sum())) or 1.0
    return (vector / length).astype(np.float32)


class Embedder:
    """Prepares the inputs of embedding calls.

    Warns once if the model is not marked as an embedding model.
    """

    def __init__(self, llm: EngineClient) -> None:
        self._llm = llm
        self._has_warned = False

    def open(
        self,
        inputs: Sequence[Prompt],
        params: SamplingParams,
        dimensions: int | None,
        *,
        name: Callable[[int], str],
        cache: CacheOptions = DEFAULT_CACHE,
        keeps_ids: bool = False,
        is_cut: bool = False,
    ) -> PooledPrompts:
        """Return the prompts that embed ``inputs``, texts or token ids.

        An input is tokenized and checked just before it runs. ``name`` returns the name of an
        input's field from its index, for errors. ``is_cut``: truncate texts that are too long.
        ``keeps_ids``: keep the token ids for the caller. Raises `InvalidRequest` for an empty input
        and for unsupported ``dimensions``.
        """
        self._check(dimensions)
        for index, each in enumerate(inputs):
            if not each:
                message = f"{name(index)} must not be empty"
                raise InvalidRequest(message, param=name(index))
        self._warn()

        async def prompt_of(index: int) -> Sequence[int]:
            prompt, param = inputs[index], name(index)
            if is_cut and isinstance(prompt, str):
                prompt = await self._llm.tokenizer.encode_start(prompt, param)
            return await self._llm.check(prompt, params, pooling=HIDDEN_STATE, param=param)

        return PooledPrompts(
            self._llm,
            len(inputs),
            prompt_of,
            params,
            lambda _: HIDDEN_STATE,
            cache=cache,
            keeps_ids=keeps_ids,
        )

    def _warn(self) -> None:
        built = self._llm.built
        if not (built.pooling.embeds or self._has_warned):
            self._has_warned = True
            logger.warning(
                "%s is not marked as an embedding model (no pooling in modules.json): its "
                "embeddings may be of low quality",
                built.name,
            )

    def _check(self, dimensions: int | None) -> None:
        spec = self._llm.built.pooling
        if dimensions is not None:
            check_integer("dimensions", dimensions, 1, MAX_INT)
        if dimensions is None or dimensions == spec.dimensions:
            return
        if dimensions > spec.dimensions:
            message = f"dimensions must be at most {spec.dimensions}, not {dimensions}"
        elif spec.cuts == ():
            message = (
                f"dimensions must be {spec.dimensions} or left out, not {dimensions}: the model's "
                "config.json does not allow truncation (matryoshka_dimensions, is_matryoshka)"
            )
        elif spec.cuts is not None and dimensions not in spec.cuts:
            others = [each for each in spec.cuts if each < spec.dimensions]
            known = ", ".join(map(str, sorted({*others, spec.dimensions})))
            message = (
                f"dimensions must be one of {known} (matryoshka_dimensions in the model's "
                f"config.json), not {dimensions}"
            )
        else:
            return
        raise InvalidRequest(message, param="dimensions")
