"""Vision: from the pixels of an image to the vectors that represent it in a prompt.

The tower and the projector are transformers' own modules; the backend computes their linears. Each
image is computed alone, so its vectors depend on nothing else.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...interface.extras.images import PromptImage, TowerInput
from ...ops.base import Ops
from ..decoder import Decoder, OwnDecoder
from ..description.fields import Fields, read_json
from ..formats.checkpoint import OnRead
from ..formats.files import gguf_file
from ..formats.nested import text_names
from ..formats.safetensors import SafetensorsCheckpoint

logger = logging.getLogger(__name__)
GRID_TYPES = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
"""Types whose RoPE rotates the rows of an image by their line and column."""
SOFT_TYPES = ("gemma3", "gemma4")
"""Types that scale the vectors of text but not of images, whose rows may attend to each other."""
MODEL_TYPES = ("idefics3", "internvl", "llava", "mistral3", *GRID_TYPES, "smolvlm", *SOFT_TYPES)
"""Types whose images are rows of the prompt."""
_MIN_VOCAB = 2  # The tower's class needs this many rows of an embedding.


@dataclass(frozen=True, slots=True)
class VisionSupport:
    """The image support of a model.

    ``model_type``: type of a model with an image tower; "" without one. ``reason``: why its images
    are not served; "" if they are.
    """

    model_type: str = ""
    reason: str = ""

    @property
    def is_served(self) -> bool:
        """Whether prompts may have images."""
        return bool(self.model_type) and not self.reason


def vision_support(path: Path) -> VisionSupport:
    """Return which image tower a model's config describes, and whether it is served."""
    if gguf_file(path) is not None:
        return VisionSupport()
    values = read_json(path / "config.json")
    if "vision_config" not in values:
        return VisionSupport()
    model_type = Fields(values, str(path / "config.json")).text("model_type")
    if model_type == "gemma4" and values.get("text_config", {}).get("pad_token_id", 0) != 0:
        why = "image rows use the padding token's inputs, which must be token 0"
        return VisionSupport(model_type, why)
    if model_type in MODEL_TYPES:
        return VisionSupport(model_type)
    served = ", ".join(MODEL_TYPES)
    return VisionSupport(
        model_type, f"images are not supported for {model_type}; supported: {served}"
    )


class Vision:
    """A tower with its projector, and a cache of the vectors of recent images.

    It belongs to the model thread. ``cache_bytes``: size of the cache. The vectors of the last
    image are always kept, because its prompt may be computed in several steps.
    """

    def __init__(
        self,
        compute: Callable[[Mapping[str, Tensor]], Tensor],
        *,
        cache_bytes: int,
        num_parameters: int = 0,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a tower.

        ``compute`` maps the inputs of one image to its vectors, [num_rows, hidden]. ``identity``:
        versions and settings that decide the vectors besides weights, see
        core/tiers/fingerprint.py.
        """
        self._compute = compute
        self._cache_bytes = cache_bytes
        # ordered by last use, the latest last
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._num_bytes = 0
        self.num_parameters = num_parameters
        self.identity: Mapping[str, str] = identity or {}
        self.num_computed = 0  # number of images encoded since the start

    @torch.inference_mode()
    def vectors(self, image: PromptImage) -> Tensor:
        """Return the vectors of an image, [num_rows, hidden], in the model's dtype and device.

        For a model that also adds vectors after its first n layers, these follow in each row:
        [num_rows, (1 + n) * hidden]. Raises ValueError if the tower returns another number of
        vectors than the image has rows.
        """
        kept = self._kept.get(image.key)
        if kept is not None:
            self._kept.move_to_end(image.key)
            return kept
        self.num_computed += 1
        found = self._compute({each.name: _tensor(each) for each in image.inputs})
        if len(found) != image.num_rows:
            raise ValueError(
                f"the image tower returned {len(found)} vectors for an image of {image.num_rows} "
                "rows"
            )
        self._keep(image.key, found)
        return found

    def _keep(self, key: bytes, vectors: Tensor) -> None:
        self._kept[key] = vectors
        self._num_bytes += vectors.nbytes
        while self._num_bytes > self._cache_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= dropped.nbytes


def _tensor(given: TowerInput) -> Tensor:
    values = np.frombuffer(given.data, np.dtype(given.dtype).newbyteorder("<"))
    return torch.from_numpy(values.astype(given.dtype)).view(given.shape)


def load_vision(
    path: Path,
    decoder: Decoder,
    plain: Ops,
    *,
    cache_bytes: int,
    kernels: Ops | None = None,
    has_weights: bool = True,
    on_read: OnRead | None = None,
) -> Vision | None:
    """Return the image tower of a folder; None without a tower, or if its images are not served.

    ``plain``: operations that pack the tower's linears, which stay unquantised. ``kernels``:
    operations that compute its attention and activations; None: torch does. ``on_read`` is called
    with its parameters and buffers. Raises `ModelLoadError` for files that cannot be read.
    """
    support = vision_support(path)
    reason = support.reason
    if support.is_served:
        if not isinstance(decoder, OwnDecoder):
            reason = (
                "images need foretoken's own decoder, but transformers' modules compute the model"
            )
        else:
            reason = _unsupported(support.model_type, decoder)
    if reason:
        logger.info("%s: prompts cannot have images: %s", path.name, reason)
    if reason or not support.is_served:
        return None
    model = _load_tower(path, decoder.dtype, has_weights=has_weights)
    seen = {name: each for name, each in model.named_parameters() if _is_seen(model, name)}
    if on_read is not None:
        for name, tensor in (*seen.items(), *model.named_buffers()):
            on_read(f"vision.{name}", tensor)
    num_parameters = sum(each.numel() for each in seen.values())
    model = model.to(decoder.device)
    mode = _pack(model, plain, kernels)
    hidden, device, dtype = decoder.config.hidden_size, decoder.device, decoder.dtype

    def compute(inputs: Mapping[str, Tensor]) -> Tensor:
        given = {
            name: each.to(device, dtype) if each.is_floating_point() else each.to(device)
            for name, each in inputs.items()
        }
        with mode:
            found = model.get_image_features(**given)
        per_layer = getattr(found, "deepstack_features", None) or ()
        vectors = [_rows(each, hidden) for each in (found.pooler_output, *per_layer)]
        return torch.cat(vectors, dim=1).to(dtype)

    logger.info(
        "%s: transformers' %s encodes images, with %.3g million parameters",
        path.name, type(model).__name__, num_parameters / 1e6,
    )  # fmt: skip
    return Vision(
        compute,
        cache_bytes=cache_bytes,
        num_parameters=num_parameters,
        identity=_identity(model.config),
    )


def _identity(config: Any) -> dict[str, str]:  # noqa: ANN401 - of transformers
    """Return the identity of a tower: the version of transformers and the config."""
    from transformers import __version__

    values = config.to_dict()
    values.pop("_name_or_path", None)  # The folder's path does not change the result.
    return {
        "transformers": __version__,
        "config": json.dumps(values, sort_keys=True, default=str),
    }


def _unsupported(model_type: str, decoder: OwnDecoder) -> str:
    """Return why images of a type are not served with this text model; "" if they are."""
    on_cpu, config = decoder.device.type == "cpu", decoder.config
    if config.fold.embed_scale != 1.0 and model_type not in SOFT_TYPES:
        return f"its text model, {config.model_type}, would scale the vectors of images"
    if model_type in GRID_TYPES and not on_cpu:
        return "RoPE positions on three axes are supported on the CPU only"
    if any(layer.is_mutual for layer in config.layers) and not on_cpu:
        return "images whose rows attend to each other are supported on the CPU only"
    return ""


def _rows(found: Any, hidden: int) -> Tensor:  # noqa: ANN401 - of transformers
    """Return the vectors of all parts of an image, [num_rows, hidden]."""
    parts = found if isinstance(found, list | tuple) else (found,)
    return torch.cat([part.reshape(-1, hidden) for part in parts])


def _pack(model: Any, plain: Ops, kernels: Ops | None) -> Any:  # noqa: ANN401 - of transformers
    """Pack a tower's linears and return the mode in which it computes.

    The imports are here because they import transformers, which engines for text do not need.
    """
    from ..fallback.transformers_decoder import pack
    from .tower_kernels import TowerAttention, use_kernels

    if kernels is not None:
        use_kernels(model, kernels)
    pack(model, plain, plain, frozenset())
    return nullcontext() if kernels is None else TowerAttention(kernels)


def count_tower(folder: Path) -> int:
    """Return the number of parameters of a folder's tower and projector.

    Raises `ModelLoadError`.
    """
    model_class, config = _tower_class(folder)
    with torch.device("meta"):
        model = model_class(config)
    return sum(each.numel() for name, each in model.named_parameters() if _is_seen(model, name))


def _is_seen(model: Any, name: str) -> bool:  # noqa: ANN401 - of transformers
    """Whether a parameter belongs to the tower or projector, not to the text model."""
    text = {id(each) for each in model.get_decoder().parameters()}
    text |= {id(each) for each in model.get_output_embeddings().parameters()}
    return id(model.get_parameter(name)) not in text


def _tower_class(folder: Path) -> tuple[Any, Any]:
    """Return the multimodal class of a folder, and its config without text layers."""
    from transformers import AutoModelForImageTextToText

    from ..fallback.text_config import read_whole_config

    config = read_whole_config(folder)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, _MIN_VOCAB, None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    for name, none in (("hidden_size_per_layer_input", 0), ("num_kv_shared_layers", 0)):
        if hasattr(text, name):
            setattr(text, name, none)
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None
    config.tie_word_embeddings = text.tie_word_embeddings = True
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return AutoModelForImageTextToText._model_mapping[type(config)], config


def _load_tower(folder: Path, dtype: torch.dtype, *, has_weights: bool) -> Any:  # noqa: ANN401
    """Return the multimodal model with the weights of tower and projector, without text layers."""
    from ..fallback.text_config import one_line, quiet

    model_class, config = _tower_class(folder)
    try:
        with quiet(shows_bar=False):
            if not has_weights:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    return model_class._from_config(config, dtype=dtype).eval()
            checkpoint = SafetensorsCheckpoint(folder, _tower_names)
            found, report = model_class.from_pretrained(
                None,
                state_dict={name: _Lazy(checkpoint, name) for name in checkpoint.shapes},
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{folder}: the image tower cannot be loaded: {one_line(error)}"
        ) from error
    missing = sorted(name for name in report["missing_keys"] if _is_seen(found, name))
    if missing:
        raise ModelLoadError(f"{folder} lacks tensors of the image tower: {', '.join(missing[:4])}")
    return found.eval()


def _tower_names(names: Any) -> dict[str, str]:  # noqa: ANN401 - as `Rename` has it
    text = set(text_names(names).values())
    return {name: name for name in names if name not in text}


class _Lazy:
    """A tensor that is read when transformers places it."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, index: Any) -> Tensor:  # noqa: ANN401 - as a tensor's
        value = self._checkpoint.read(self._name)
        return (value if isinstance(value, Tensor) else value.dequantize())[index]
