"""WeightExchange: loads checked weights beside the served ones, to be copied over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ....core.config import EngineConfig
from ....core.errors import InvalidRequest, ModelLoadError
from ....core.execution.proposer import Proposer
from ....core.model.decoder import Decoder, OwnDecoder
from ....core.model.drafting.rough_copy import rough_decoder
from ....core.model.images.vision import Vision
from ....core.model.weights.exchange import copy_tensors, pair_tensors
from ....draft.proposers.self_draft import SelfProposer
from .checked_files import ServedTensors
from .new_weights import NewWeights
from .refusal import WeightsRefused

FLAG = "allow_weight_updates"


class WeightExchange:
    """The served target and its self-draft, whose weights an update replaces.

    ``load`` loads the decoder in a folder with the engine's options. Other drafters keep their
    weights, because drafts never change an answer. Raises `InvalidRequest` for a model whose
    weights cannot be replaced.
    """

    def __init__(
        self,
        path: Path,
        target: Decoder,
        proposer: Proposer | None,
        load: Callable[[Path], Decoder],
    ) -> None:
        if not isinstance(target, OwnDecoder):
            raise InvalidRequest(f"{FLAG} needs foretoken's own decoder", param=FLAG)
        if any(old.layout != torch.strided for old, _ in pair_tensors(*[target.weights] * 2)):
            message = f"{FLAG} does not support the torch backend, which keeps opaque weights"
            raise InvalidRequest(message, param=FLAG)
        self._target, self._load = target, load
        self._self_draft: Decoder | None = None
        if isinstance(proposer, SelfProposer):
            self._self_draft = proposer.models[0][0]
        try:
            self._served = ServedTensors(path)
        except (ModelLoadError, OSError) as error:
            message = f"{FLAG} needs a model in safetensors files: {error}"
            raise InvalidRequest(message, param=FLAG) from None

    @property
    def max_bytes(self) -> int:
        """Size in bytes that one file of new weights cannot exceed."""
        return self._served.max_bytes

    def prepare(self, weights: NewWeights) -> Callable[[], None]:
        """Check and load new weights; return the function that copies them. Blocking.

        Raises `WeightsRefused`.
        """
        with self._served.checked(weights) as staged:
            try:
                new = self._load(staged)
                assert isinstance(new, OwnDecoder), "it has the served model's config"
                if new.config.tie_embeddings != self._target.config.tie_embeddings:
                    name = "lm_head.weight"
                    message = "only one of the served and the new weights have an output matrix"
                    raise WeightsRefused(f"{message} that equals the embedding", tensors=(name,))
                pairs = [*pair_tensors(self._target.weights, new.weights)]
                if isinstance(self._self_draft, OwnDecoder):
                    rough = rough_decoder(new)
                    pairs += pair_tensors(self._self_draft.weights, rough.weights)
            except ModelLoadError as error:
                raise WeightsRefused(weights.named(str(error), staged)) from None
        # The new weights may be mapped from files, which stay mapped after their names are gone.
        return partial(copy_tensors, pairs)


def check_supported(config: EngineConfig, target: Decoder, vision: Vision | None) -> None:
    """Raise `InvalidRequest` for options and models that weight updates do not support."""
    reasons = {
        "a GPU": target.device.type != "cpu",
        "tensor parallelism": config.tp > 1,
        "KV tiers, transfers and events": (
            config.has_tiers or config.kv_transfer is not None or config.kv_events is not None
        ),
        "load_format random": config.load_format != "auto",
        "an image tower (use no_images)": vision is not None,
        "models with recurrent states": bool(target.states),
    }
    for what, is_used in reasons.items():
        if is_used:
            raise InvalidRequest(f"{FLAG} does not support {what}", param=FLAG)
