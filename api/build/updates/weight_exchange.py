"""WeightExchange: loads checked weights beside the served ones, to be copied over them."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ....core.config import EngineConfig
from ....core.errors import InvalidRequest, ModelLoadError
from ....core.execution.proposer import Proposer
from ....core.model.decoder import Decoder, OwnDecoder
from ....core.model.drafting.rough_copy import NoRoughCopyError, rough_decoder
from ....core.model.images.vision import Vision
from ....core.model.weights.exchange import copy_tensors, named_pairs, pair_tensors
from ....draft.proposers.self_draft import SelfProposer
from .checked_files import ServedTensors
from .new_weights import NewWeights
from .refusal import WeightsRefused
from .rollouts import DRAFT

logger = logging.getLogger(__name__)
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
        self._self_draft: OwnDecoder | None = None
        if isinstance(proposer, SelfProposer):
            draft = proposer.models[0][0]
            assert isinstance(draft, OwnDecoder), "it is a copy of the target"
            self._self_draft = draft
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

        The self-draft keeps its weights until `prepare_draft`. Raises `WeightsRefused`.
        """
        with self._loaded(weights) as new:
            pairs = pair_tensors(self._target.weights, new.weights)
        # The new weights may be mapped from files, which stay mapped after their names are gone.
        return partial(copy_tensors, pairs)

    def prepare_draft(self) -> Callable[[], None] | None:
        """Round the served weights for the self-draft; return the function that copies them.

        Blocking. None without a self-draft, or if the memory does not suffice: it keeps its weights
        then, and fewer of its tokens are accepted. The served weights must not change meanwhile.
        """
        if self._self_draft is None:
            return None
        began = time.perf_counter()
        try:
            rough = rough_decoder(self._target)
        except NoRoughCopyError as reason:
            logger.warning("the self-draft keeps the weights of an earlier version: it %s", reason)
            return None
        logger.info("rounded the new weights in %.2f s", time.perf_counter() - began)
        return partial(copy_tensors, pair_tensors(self._self_draft.weights, rough.weights))

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each tensor in memory, in hexadecimal, by its name. Blocking.

        Packed weights have the names. The served weights must not change meanwhile.
        """
        found = {name: _digest(tensor) for name, tensor in _tensors(self._target)}
        if self._self_draft is not None:
            draft = _tensors(self._self_draft)
            found |= {f"{DRAFT}{name}": _digest(tensor) for name, tensor in draft}
        return found

    def differences(self, weights: NewWeights) -> list[str]:
        """Return the names of served tensors that differ from a load of ``weights``. Blocking.

        The served weights must not change meanwhile. Raises `WeightsRefused`.
        """
        with self._loaded(weights) as new:
            pairs = named_pairs(self._target.weights, new.weights)
            return [name for name, old, other in pairs if _digest(old) != _digest(other)]

    @contextmanager
    def _loaded(self, weights: NewWeights) -> Iterator[OwnDecoder]:
        """Check new weights and load them beside the served ones. Raises `WeightsRefused`."""
        with self._served.checked(weights) as staged:
            try:
                new = self._load(staged)
                assert isinstance(new, OwnDecoder), "it has the served model's config"
                if new.config.tie_embeddings != self._target.config.tie_embeddings:
                    name = "lm_head.weight"
                    message = "only one of the served and the new weights have an output matrix"
                    raise WeightsRefused(f"{message} that equals the embedding", tensors=(name,))
                yield new
            except ModelLoadError as error:
                raise WeightsRefused(weights.named(str(error), staged)) from None


def _tensors(decoder: OwnDecoder) -> Iterator[tuple[str, Tensor]]:
    for name, tensor, _ in named_pairs(decoder.weights, decoder.weights):
        yield name, tensor


def _digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes, in hexadecimal."""
    made = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    made.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


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
