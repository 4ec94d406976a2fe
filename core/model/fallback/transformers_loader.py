"""Loading of models for `TransformersDecoder`: checks, a model without memory, and the weights."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...errors import ModelLoadError
from ...ops.base import Ops
from ..description.config import DecoderConfig, DtypeName, LayerSpec
from ..description.fields import Fields, read_json
from ..description.rope import RopeSpec
from ..description.tensors import Shape
from ..families.registry import OWN_ONLY
from ..formats.checkpoint import Checkpoint, OnRead, is_derived, mismatch, refuse_names
from ..formats.files import gguf_file
from ..formats.gguf import GgufFile
from ..formats.nested import text_names
from ..formats.quantized import read_scheme
from ..formats.safetensors import SafetensorsCheckpoint
from .startup_test import startup_test
from .states import has_states
from .text_config import make_config, one_line, quiet, read_whole_config, text_of
from .transformers_decoder import TransformersDecoder, pack
from .transformers_probe import HOOKS, AttentionSite, ProbeResult, probe

logger = logging.getLogger(__name__)

_OWN_CACHE = "its layers keep a state outside transformers' cache"
_INDEXER = "an indexer selects the keys of each query"
OTHER_ENGINE = "serve it with transformers or vLLM"
# Model types that are refused by name, and the reasons.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), _OWN_CACHE),
    **dict.fromkeys(
        (
            "axk2",
            "deepseek_v32",
            "deepseek_v4",
            "glm_moe_dsa",
            "hy_v4",
            "qwen4_exp",
            "qwen4_exp_text",
        ),
        _INDEXER,
    ),
    **dict.fromkeys(("bloom", "mpt"), "its attention scores depend on the distance (ALiBi)"),
    **dict.fromkeys(
        ("inkling_mm_model", "inkling_text", "inkling2", "inkling2_text"),
        "its attention scores have a term that depends on the distance",
    ),
    "ctrl": "its output differed from that of transformers",
    **dict.fromkeys(("diffllama", "hrm_text"), "a layer computes attention twice in a pass"),
}
_LONGEST_WITHOUT_ATTENTION = 32_768  # context length if the config names none, in tokens

# These fields count MTP layers, which follow the last layer.
_FURTHER = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A checkpoint's text model, as its config describes it, before any weight is read.

    ``probed`` is None if the attention can only be inspected on the loaded model. ``checkpoint`` is
    None for random weights.
    """

    folder: Path
    text: PreTrainedConfig
    model_class: type[Any]
    probed: ProbeResult | None
    config: DecoderConfig
    num_parameters: int
    checkpoint: Checkpoint | None


def read_text_model(folder: Path, *, has_weights: bool = True) -> TextModel:
    """Return the text model of a folder in Hugging Face layout or a GGUF file, without weights.

    ``has_weights``: whether to compare the headers of the weight files with the model. Raises
    `ModelLoadError` with a reason for a model that cannot be served.
    """
    file = gguf_file(folder)
    gguf = None if file is None else _read_gguf(file)
    config = read_whole_config(folder) if gguf is None else make_config(gguf.values, gguf.where)
    text = text_of(config)
    _refuse(folder, config, text)
    is_quantized = gguf is None and _forget_quantization(folder, config, text)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if model_class is None:
        problem = f"transformers {transformers.__version__} has no such causal language model"
        raise _refusal(folder, text.model_type, problem)
    text._attn_implementation = HOOKS
    with quiet():
        twin = _meta_twin(folder, model_class, text)
        probed = _probed(folder, text, twin)
    checkpoint = (gguf or _open(folder, config, text)) if has_weights else None
    if checkpoint is not None:
        _compare(checkpoint, twin, text)
    found = _decoder_config(folder, config, text, probed.sites if probed else None)
    if is_quantized:  # The same dtype applies to quantised GGUF files.
        found = replace(found, dtype="bfloat16")
    count = sum(each.numel() for each in twin.parameters())
    return TextModel(
        folder=folder,
        text=text,
        model_class=model_class,
        probed=probed,
        config=found,
        num_parameters=count,
        checkpoint=checkpoint,
    )


def load_text_model(
    source: TextModel,
    ops: Ops,
    plain: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_read: OnRead | None = None,
) -> TransformersDecoder:
    """Load, pack and test a model. ``plain`` packs linears that are never quantised.

    Weights are random without a checkpoint. Otherwise ``on_read`` is called with every parameter
    and buffer, in ``dtype``. Raises `ModelLoadError` for unreadable weights, and for a model whose
    results in pieces differ from its results as a whole.
    """
    checkpoint = source.checkpoint
    with quiet():
        model = _random(source, dtype) if checkpoint is None else _load(source, checkpoint, dtype)
    if on_read is not None and checkpoint is not None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            on_read(name, tensor)
    model = model.eval().to(device)
    model.set_attn_implementation(HOOKS)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(HOOKS)
    probed = source.probed
    # The dtypes of states are known only on the loaded model.
    if probed is None or probed.cache is not None:
        with quiet():
            probed = _probed_when_loaded(source, model, device)
    pack(model, ops, plain, probed.read_directly)
    decoder = TransformersDecoder(
        source.config, model, probed.sites, ops, dtype=dtype, device=device, cache=probed.cache
    )
    decoder.pack_experts(ops)
    with quiet():
        decoder.exact = _tested(source, decoder)
    return decoder


# -- configs --------------------------------------------------------------------------------------


def _read_gguf(path: Path) -> GgufFile:
    """Return a GGUF file.

    Raises `ModelLoadError` if the file has a tensor that transformers' modules lack.
    """
    file = GgufFile(path)
    unknown = sorted(name for name in file.shapes if not name.startswith(("model.", "lm_head.")))
    if unknown:
        raise ModelLoadError(f"{path} has unexpected tensors: {', '.join(unknown[:4])}")
    if any(each != 1 for each in file.divisors):
        problem = "transformers' modules do not support RoPE factors for each frequency"
        raise ModelLoadError(f"{path}: {problem}; use the model's safetensors files")
    return file


def _refuse(folder: Path, config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    if text.model_type in OWN_ONLY:
        raise ModelLoadError(
            f"{folder / 'config.json'}: only foretoken's own decoder supports the recurrent states "
            f"of {text.model_type!r}; serve it without --model-impl transformers"
        )
    for each in (config, text):
        if each.model_type in REFUSED:
            raise _refusal(folder, each.model_type, REFUSED[each.model_type])
        if getattr(each, "is_encoder_decoder", False):
            raise _refusal(folder, each.model_type, "only decoders are supported")
    if _rope_kind(text) == "dynamic":
        problem = "the angles of its dynamic RoPE depend on the longest sequence in a batch"
        raise _refusal(folder, text.model_type, problem)


def _forget_quantization(folder: Path, *configs: PreTrainedConfig) -> bool:
    """Return whether the files are quantised, and remove the scheme from transformers' configs.

    This engine dequantises instead of transformers. Raises `ModelLoadError` for an unknown scheme.
    """
    where = folder / "config.json"
    scheme = read_scheme(Fields(read_json(where), str(where)))
    for config in configs:
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    return scheme is not None


def _refusal(folder: Path, model_type: str, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"{folder / 'config.json'}: model_type {model_type!r} is not supported: {why}; "
        f"{OTHER_ENGINE}"
    )


def _rope_kinds(text: PreTrainedConfig) -> set[str]:
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [each for each in rope.values() if isinstance(each, dict)]
    return {str(each.get("rope_type", "default")) for each in (rope, *nested)}


def _rope_kind(text: PreTrainedConfig) -> str:
    kinds = _rope_kinds(text) - {"default"}
    return "dynamic" if "dynamic" in kinds else "longrope" if "longrope" in kinds else ""


def _decoder_config(
    folder: Path,
    config: PreTrainedConfig,
    text: PreTrainedConfig,
    sites: tuple[AttentionSite, ...] | None,
) -> DecoderConfig:
    """Build the `DecoderConfig` for the engine; the modules use the config of transformers."""
    first = sites[0] if sites else None
    num_layers = int(text.num_hidden_layers)
    specs = [LayerSpec(window=site.window) for site in sites or ()]
    return DecoderConfig(
        model_type=text.model_type,
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        intermediate_size=_width(text),
        num_layers=num_layers,
        num_heads=first.num_heads if first else 1,
        num_kv_heads=first.num_kv_heads if first else 1,
        head_dim=first.head_dim if first else 2,
        norm_eps=0.0,
        rope=RopeSpec(),
        max_model_len=_max_len(text, sites),
        layers=(*specs, *[LayerSpec()] * (num_layers - len(specs))),
        dtype=_dtype_name(text, config),
        eos_token_ids=_eos(folder, config, text),
        tie_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
    )


def _width(text: PreTrainedConfig) -> int:
    width = getattr(text, "intermediate_size", 0) or 0
    return int(max(width) if isinstance(width, list | tuple) else width)


def _max_len(text: PreTrainedConfig, sites: tuple[AttentionSite, ...] | None) -> int:
    default = 2048 if sites is None or sites else _LONGEST_WITHOUT_ATTENTION
    longest = int(getattr(text, "max_position_embeddings", None) or default)
    rope = getattr(text, "rope_parameters", None) or {}
    if _rope_kind(text) == "longrope":  # Longer texts would need another table for all positions.
        longest = int(rope.get("original_max_position_embeddings") or longest)
        longest = min(longest, int(getattr(text, "original_max_position_embeddings", longest)))
    limits = [site.max_len for site in sites or () if site.max_len is not None]
    return min([longest, *limits])


def _dtype_name(*configs: PreTrainedConfig) -> DtypeName:
    for config in configs:
        name = str(getattr(config, "dtype", None)).removeprefix("torch.")
        if name in ("float32", "bfloat16", "float16"):
            return name  # type: ignore[return-value]
    return "float32"


def _eos(folder: Path, *configs: PreTrainedConfig) -> tuple[int, ...]:
    found: list[int] = []
    file = folder / "generation_config.json"
    sources = [{"eos_token_id": getattr(each, "eos_token_id", None)} for each in configs]
    if file.exists():
        sources.append(read_json(file))
    for values in sources:
        found.extend(Fields(values, str(folder)).integers("eos_token_id"))
    return tuple(dict.fromkeys(found))


# -- models ---------------------------------------------------------------------------------------


def _meta_twin(folder: Path, model_class: type[Any], text: PreTrainedConfig) -> Any:  # noqa: ANN401
    """Return the model on the meta device, without memory for its weights."""
    try:
        with torch.device("meta"):
            twin = model_class(text).eval()
            if twin._can_set_experts_implementation():
                twin.set_experts_implementation(HOOKS)
            return twin
    except Exception as error:
        problem = f"transformers cannot construct it: {one_line(error)}"
        if isinstance(error, KeyError) and HOOKS in str(error):
            problem = "it does not use transformers' attention interface"
        raise _refusal(folder, text.model_type, problem) from error


def _probed(folder: Path, text: PreTrainedConfig, twin: Any) -> ProbeResult | None:  # noqa: ANN401
    if has_states(text):  # States are as large as activations of this dtype.
        twin = twin.to(getattr(torch, _dtype_name(text)))
    try:
        return probe(twin, "meta")
    except ModelLoadError as error:
        raise _refusal(folder, text.model_type, str(error)) from None
    except Exception as error:  # Modules that read values cannot run on a meta model.
        kind, problem = text.model_type, one_line(error)
        logger.info(
            "%s: its attention cannot be inspected before its weights are loaded (%s)",
            kind,
            problem,
        )
        return None


def _probed_when_loaded(source: TextModel, model: Any, device: torch.device) -> ProbeResult:  # noqa: ANN401
    try:
        return probe(model, device)
    except Exception as error:  # Modules may fail in any way if the hooks do not suit them.
        raise _refusal(source.folder, source.text.model_type, one_line(error)) from error


def _random(source: TextModel, dtype: torch.dtype) -> Any:  # noqa: ANN401
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return source.model_class._from_config(source.text, dtype=dtype)


def _load(source: TextModel, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:  # noqa: ANN401
    try:
        return source.model_class.from_pretrained(
            None,
            state_dict={name: _LazyTensor(checkpoint, name) for name in checkpoint.shapes},
            config=source.text,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
        )
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{source.folder} cannot be loaded: {one_line(error)}") from error


class _LazyTensor:
    """A tensor that transformers reads when it places it, like a tensor of its own files."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, index: Any) -> Tensor:  # noqa: ANN401 - as a tensor's
        return _plain_value(self._checkpoint, self._name)[index]


def _plain_value(checkpoint: Checkpoint, name: str) -> Tensor:
    value = checkpoint.read(name)
    return value if isinstance(value, Tensor) else value.dequantize()


# -- files ----------------------------------------------------------------------------------------


def _open(folder: Path, config: PreTrainedConfig, text: PreTrainedConfig) -> Checkpoint:
    """Return the tensors of a folder; a multimodal model's other tensors are left out."""
    if config.model_type == text.model_type:
        return SafetensorsCheckpoint(folder, lambda names: {name: name for name in names})
    return SafetensorsCheckpoint(folder, text_names)


def _compare(checkpoint: Checkpoint, twin: Any, text: PreTrainedConfig) -> None:  # noqa: ANN401
    """Let transformers load shapes into a model without memory, as it will load values.

    Raises `ModelLoadError` for tensors that are missing, of another shape, or not read.
    """
    meta = torch.device("meta")
    shapes = checkpoint.shapes
    empty = {name: torch.empty(shape, device=meta) for name, shape in shapes.items()}
    mapping: Any = get_model_conversion_mapping(twin)
    options = LoadStateDictConfig(device_map={"": meta}, weight_mapping=mapping)
    try:
        with quiet(shows_bar=False):
            found, _ = twin._load_pretrained_model(twin, empty, None, options)
            twin.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
            twin._adjust_missing_and_unexpected_keys(found)
    except Exception as error:
        raise ModelLoadError(f"{checkpoint.where} cannot be loaded: {one_line(error)}") from error
    for name in found.conversion_errors:  # Conversion errors also count as missing tensors.
        _refuse_odd_experts(checkpoint)
        raise ModelLoadError(f"{checkpoint.where}: {name} cannot be built from the stored tensors")
    refuse_names(checkpoint, "lacks", found.missing_keys)
    for name, stored, expected in sorted(found.mismatched_keys):
        raise mismatch(checkpoint, name, stored, expected)
    unread = {name for name in found.unexpected_keys if not _is_passed_over(name, text)}
    refuse_names(checkpoint, "has unexpected", unread)


def _refuse_odd_experts(checkpoint: Checkpoint) -> None:
    """Raise `ModelLoadError` for an expert whose shape differs from most experts of its layer."""
    alike: dict[str, dict[str, Shape]] = {}
    for name, shape in checkpoint.shapes.items():
        alike.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), {})[name] = shape
    for stack in alike.values():
        common, _ = Counter(stack.values()).most_common(1)[0]
        for name, shape in stack.items():
            if shape != common:
                raise mismatch(checkpoint, name, shape, common)


def _is_passed_over(name: str, text: PreTrainedConfig) -> bool:
    """Whether a stored tensor may stay unread: the config implies it, or an MTP layer has it."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    is_further = layer is not None and int(layer[1]) >= int(text.num_hidden_layers)
    return is_derived(name) or (is_further and any(getattr(text, each, 0) for each in _FURTHER))


def _not_finite(checkpoint: Checkpoint) -> str | None:
    """Return the name of the first tensor with a NaN or infinite value; None without one."""
    names = checkpoint.shapes
    return next((n for n in names if not _plain_value(checkpoint, n).isfinite().all()), None)


# -- the startup test -----------------------------------------------------------------------------


def _tested(source: TextModel, decoder: TransformersDecoder) -> bool:
    try:
        return startup_test(decoder)
    except ModelLoadError as error:
        damaged = None if source.checkpoint is None else _not_finite(source.checkpoint)
        if damaged is not None:
            problem = f"{damaged} has values that are NaN or infinite"
            raise ModelLoadError(f"{source.folder} is damaged: {problem}") from None
        raise _refusal(source.folder, source.text.model_type, str(error)) from None
    except Exception as error:
        problem = f"its first pass failed: {one_line(error)}"
        raise _refusal(source.folder, source.text.model_type, problem) from error
