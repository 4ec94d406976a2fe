"""DecoderConfig: what makes one decoder differ from another, read from config.json.

Families are not copies of the decoder but functions that declare its differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from ..errors import ModelLoadError
from .checkpoint import gguf_file
from .fields import Fields, read_json
from .fold import NO_FOLD, Fold
from .formats.quantized import read_scheme
from .rope import RopeSpec, parse_rope

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape and declared differences of a decoder. Lengths and windows are in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_model_len: int
    windows: tuple[int | None, ...]  # [num_layers] sliding window, None for full attention
    dtype: DtypeName = "float32"  # what config.json names; the tensors' own dtype wins
    eos_token_ids: tuple[int, ...] = ()
    tie_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu"] = "silu"
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    fold: Fold = NO_FOLD

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


def read_config(path: str | Path) -> DecoderConfig:
    """The config of a checkpoint. Raises `ModelLoadError` for what is not supported."""
    file = gguf_file(Path(path))
    if file is None:
        return read_folder_config(Path(path))
    from .formats.gguf import GgufCheckpoint

    return GgufCheckpoint(file).config


def read_folder_config(folder: Path) -> DecoderConfig:
    """The config of a folder in Hugging Face layout."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder")
    config = parse_config(Fields(read_json(folder / "config.json"), str(folder / "config.json")))
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    more = Fields(read_json(generation), str(generation)).integers("eos_token_id")
    return _with_eos(config, more)


def parse_config(fields: Fields) -> DecoderConfig:
    """The config of one config.json."""
    model_type = fields.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise fields.unsupported("model_type", f"{model_type!r} is not supported; {supported} are")
    _refuse_unsupported(fields)
    return _check(family(fields), fields)


def _base(
    fields: Fields,
    *,
    partial: float | None = None,
    **differences: Any,  # noqa: ANN401 - declared fields
) -> DecoderConfig:
    """What all families write alike; ``differences`` are fields of `DecoderConfig`.

    ``partial``: the share of a head's items that RoPE turns where the config does not say it;
    None: the family turns all of them.
    """
    num_layers = fields.positive("num_hidden_layers")
    num_heads = fields.positive("num_attention_heads")
    hidden_size = fields.positive("hidden_size")
    max_len = fields.positive("max_position_embeddings", 2048)
    rope = parse_rope(fields, max_len=max_len, partial=partial)
    if rope.kind == "longrope":  # beyond it another table turns all positions
        max_len = rope.original_max_len
    stretched = int(rope.factor * rope.original_max_len) if rope.kind == "yarn" else 0
    shape: dict[str, Any] = {
        "model_type": fields.text("model_type"),
        "vocab_size": fields.positive("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.positive("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.positive("num_key_value_heads", num_heads),
        "head_dim": fields.positive("head_dim", hidden_size // num_heads),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "max_model_len": max(max_len, stretched),
        "windows": (None,) * num_layers,
        "dtype": _dtype(fields),
        "eos_token_ids": fields.integers("eos_token_id"),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
    }
    return DecoderConfig(**(shape | differences))


def _llama(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    return _base(fields, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(fields: Fields) -> DecoderConfig:
    # The class default applies where the key is absent; null means full attention.
    absent = "sliding_window" not in fields.values
    window = 4096 if absent else _window(fields)
    return _base(fields, windows=(window,) * fields.positive("num_hidden_layers"))


def _qwen2(fields: Fields) -> DecoderConfig:
    return _base(fields, qkv_bias=True, windows=_qwen_windows(fields))


def _qwen3(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    windows = _qwen_windows(fields)
    head_dim = fields.positive("head_dim", 128)
    return _base(
        fields, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=windows, head_dim=head_dim
    )


def _phi3(fields: Fields) -> DecoderConfig:
    windows = (_window(fields),) * fields.positive("num_hidden_layers")
    fold = Fold(fused_qkv=True, fused_gate_up=True)
    return _base(fields, partial=1.0, windows=windows, fold=fold)


def _granite(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    fold = Fold(
        embed_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.above_zero("logits_scaling", 1.0),
    )
    return _base(
        fields,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        fold=fold,
    )


def _glm(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    fold = Fold(fused_gate_up=True, interleaved=True)
    head_dim = fields.positive("head_dim", 128)
    return _base(fields, partial=0.5, qkv_bias=bias, fold=fold, head_dim=head_dim)


def _helium(fields: Fields) -> DecoderConfig:
    return _base(
        fields,
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=fields.positive("head_dim", 128),
        fold=Fold(interleaved=True),
    )


def _ernie(fields: Fields) -> DecoderConfig:
    bias = fields.flag("use_bias", False)
    fold = Fold(interleaved=True)
    head_dim = fields.positive("head_dim", 128)
    return _base(fields, qkv_bias=bias, o_bias=bias, mlp_bias=bias, head_dim=head_dim, fold=fold)


FAMILIES: dict[str, Callable[[Fields], DecoderConfig]] = {
    "ernie4_5": _ernie,
    "glm": _glm,
    "granite": _granite,
    "helium": _helium,
    "llama": _llama,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _window(fields: Fields) -> int | None:
    return fields.positive("sliding_window") if fields.has("sliding_window") else None


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Windows by ``layer_types`` where given, else of the layers from max_window_layers on."""
    num_layers = fields.positive("num_hidden_layers")
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        raise fields.error("layer_types", f"must be {num_layers} of {', '.join(known)}")
    if window is None and "sliding_attention" in types:
        raise fields.error("sliding_window", "is missing, though layer_types has sliding layers")
    return tuple(known[name] for name in types)


def _dtype(fields: Fields) -> DtypeName:
    """``dtype`` since transformers v5, ``torch_dtype`` before."""
    name = fields.text("dtype", fields.text("torch_dtype", "float32"))
    if name not in get_args(DtypeName):
        supported = ", ".join(get_args(DtypeName))
        raise fields.error("dtype", f"{name!r} is not supported; {supported} are")
    return cast(DtypeName, name)


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse what would otherwise be computed wrongly without a word."""
    read_scheme(fields)
    if fields.flag("is_encoder_decoder", False):
        raise fields.error("is_encoder_decoder", "is not supported: decoders only")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", f"{activation!r} is not supported; silu is")


def _check(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    if config.num_heads % config.num_kv_heads:
        problem = f"{config.num_kv_heads} does not divide {config.num_heads} attention heads"
        raise fields.error("num_key_value_heads", problem)
    if config.head_dim % 2:
        raise fields.error("head_dim", f"must be even, not {config.head_dim}")
    return config


def _with_eos(config: DecoderConfig, more: tuple[int, ...]) -> DecoderConfig:
    """Chat models name further end tokens in generation_config.json only."""
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
