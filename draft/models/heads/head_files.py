"""Head checkpoints: which dialect lies in a folder, and its config, tensors and vocabulary.

Dialects differ in the names of keys and tensors; docs/heads.md lists them. What a head does is
declared by its config: a tensor that the config does not imply, a norm flag that is not known or
a missing tensor is a `ModelLoadError`, because each would be a head that silently drafts badly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ....core.errors import ModelLoadError
from ....core.model.config import DecoderConfig
from ....core.model.fields import Fields, read_json
from ....core.model.rope import RopeSpec, parse_rope
from ....core.ops.batch import Taps
from .block import BlockConfig, BlockHead, MarkovKind
from .eagle import EagleConfig, EagleHead
from .medusa import MedusaConfig, MedusaHead

Kind: TypeAlias = Literal["block", "eagle3", "medusa"]
Head: TypeAlias = BlockHead | EagleHead | MedusaHead
HeadConfigs: TypeAlias = BlockConfig | EagleConfig | MedusaConfig
Odds: TypeAlias = tuple[float, float, float]
Tensors: TypeAlias = dict[str, Tensor]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# read without running any of their code
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
OWN_KEY = "foretoken"  # our own keys in a config.json
_NAMES_SHOWN = 4
_LEAST_LAYERS = 8  # with fewer the default boundaries coincide
_KINDS: dict[str, Kind] = {  # by a word of architectures or of speculators_model_type
    "eagle3": "eagle3",
    "dflash": "block",
    "dspark": "block",
    "medusa": "medusa",
}
_UNSUPPORTED = ("dflash2", "domino", "lilicorr", "peagle", "mtp")
_ALIASES = {  # of tensor names, behind the prefixes below
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
_PREFIXES = ("model.", "eagle_module.")
# Of DSpark: the odds of a draft come from what was accepted, not from a trained estimate.
_IGNORED = ("confidence_head.", "t2d", "rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A folder with a head: its kind, its config and where its tap ids leave a choice.

    ``shifted_taps``: what the boundaries are if the engine that the head was trained with counts
    layers; None where the config leaves no doubt. ``odds``: the three numbers of `GapModel` that
    its training found, by whether tokens are sampled; none where it was trained elsewhere.
    """

    path: Path
    kind: Kind
    config: HeadConfigs
    shifted_taps: Taps | None = None
    odds: Mapping[bool, Odds] = field(default_factory=dict)

    def load(self) -> Head:
        """The module with its weights, float32 or as they are stored. Raises `ModelLoadError`."""
        return _load(self)


def head_kind(path: Path) -> Kind | None:
    """The kind of head in a folder, by its config; None where something else lies there.

    Raises `ModelLoadError` for a head that is not supported.
    """
    if not (path / CONFIG).is_file():
        return None
    values = read_json(path / CONFIG)
    words = _words(values)
    for word in _UNSUPPORTED:
        if any(word in each for each in words):
            raise ModelLoadError(f"{path / CONFIG}: heads of kind {word} are not supported")
    own = values.get(OWN_KEY)
    if isinstance(own, dict) and own.get("kind") in get_args(Kind):
        return cast(Kind, own["kind"])
    found = {kind for word, kind in _KINDS.items() if any(word in each for each in words)}
    if not found and "dflash_config" in values:
        return "block"
    if not found and "medusa_num_heads" in values:
        return "medusa"
    if not found and _has_eagle_tensors(path, values):
        return "eagle3"
    return next(iter(found), None)


def _words(values: Mapping[str, Any]) -> list[str]:
    named = values.get("architectures") or []
    words = [str(each) for each in named] if isinstance(named, list) else []
    words.append(str(values.get("speculators_model_type", "")))
    return [word.lower() for word in words if word]


def _has_eagle_tensors(path: Path, values: Mapping[str, Any]) -> bool:
    """The first EAGLE-3 heads name a plain architecture; their draft vocabulary gives them away."""
    return "draft_vocab_size" in values and (
        (path / WEIGHTS).is_file() or (path / PICKLES[0]).is_file()
    )


def open_head(path: Path, target: DecoderConfig) -> HeadFolder:
    """Read a head's config for a target. Raises `ModelLoadError` naming the key that is wrong."""
    kind = head_kind(path)
    if kind is None:
        raise ModelLoadError(f"{path / CONFIG}: not the config of a known kind of head")
    fields = _flattened(Fields(read_json(path / CONFIG), str(path / CONFIG)))
    names = set(_normalised(read_tensors(path)))
    if kind == "medusa":
        return HeadFolder(path, kind, _parse_medusa(fields, target))
    parse = _parse_block if kind == "block" else _parse_eagle
    config, shifted = parse(fields, target, names)
    return HeadFolder(path, kind, config, shifted, _own_odds(fields))


def _flattened(fields: Fields) -> Fields:
    """The keys of nested objects beside the others, the outer ones first."""
    values: dict[str, Any] = {}
    for name in ("transformer_layer_config", "dflash_config", "eagle_config", "text_config"):
        values |= {k: v for k, v in fields.object(name).values.items() if v is not None}
    values |= {k: v for k, v in fields.values.items() if v is not None}
    for name, value in list(values.items()):  # a variant inside of other checkpoints
        if name.startswith("dspark_"):
            values.setdefault(name.removeprefix("dspark_"), value)
    return Fields(values, fields.where)


# -- config ---------------------------------------------------------------------------------------


def _shape(fields: Fields, target: DecoderConfig, names: set[str]) -> dict[str, Any]:
    """What configs of block heads and of EAGLE-3 write alike."""
    hidden = fields.positive("hidden_size")
    heads = fields.positive("num_attention_heads")
    width = fields.positive("target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        problem = f"is {width}, but the target's hidden size is {target.hidden_size}"
        raise fields.error("target_hidden_size", problem)
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", "other than silu is not supported")
    max_len = fields.positive("max_position_embeddings", target.max_model_len)
    vocab = fields.positive("vocab_size", target.vocab_size)
    draft_vocab = fields.positive("draft_vocab_size", vocab)
    if vocab != target.vocab_size and draft_vocab == vocab:
        problem = f"is {vocab}, but the target has {target.vocab_size} tokens"
        raise fields.error("vocab_size", problem)
    has_map = "d2t" in names
    if draft_vocab > target.vocab_size or (draft_vocab < target.vocab_size and not has_map):
        problem = f"is {draft_vocab} of {target.vocab_size} tokens, and there is no tensor d2t"
        raise fields.error("draft_vocab_size", problem)
    shape: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target.hidden_size,
        "hidden_size": hidden,
        "intermediate_size": fields.positive("intermediate_size"),
        "num_layers": fields.positive("num_hidden_layers", 1),
        "num_heads": heads,
        "num_kv_heads": fields.positive("num_key_value_heads", heads),
        "head_dim": fields.positive("head_dim", hidden // heads),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": parse_rope(fields, max_len=max_len),
        "max_model_len": max_len,
        "attention_bias": fields.flag("attention_bias", False),
        "owns_embedding": "embed_tokens.weight" in names,
        "owns_output": "lm_head.weight" in names,
    }
    if hidden != target.hidden_size and not (shape["owns_embedding"] and shape["owns_output"]):
        problem = f"is {hidden}: to borrow the target's embedding it must be {target.hidden_size}"
        raise fields.error("hidden_size", problem)
    return shape


def _own_taps(fields: Fields) -> Taps | None:
    """Boundaries as this engine writes them: without a doubt."""
    own = fields.object(OWN_KEY)
    return own.integers("taps") if own.has("taps") else None


def _own_odds(fields: Fields) -> dict[bool, Odds]:
    """The odds that training fitted."""
    found = fields.object(OWN_KEY).object("odds").values
    odds: dict[bool, Odds] = {}
    for name, is_sampled in (("greedy", False), ("sampled", True)):
        if name not in found:
            continue
        numbers = found[name]
        is_sound = isinstance(numbers, list) and len(numbers) == 3
        if not is_sound or not all(isinstance(n, int | float) and isfinite(n) for n in numbers):
            raise fields.error(f"{OWN_KEY}.odds.{name}", "must be three numbers")
        odds[is_sampled] = (float(numbers[0]), float(numbers[1]), float(numbers[2]))
    return odds


def _check_taps(fields: Fields, name: str, taps: Taps, target: DecoderConfig) -> Taps:
    if not taps or min(taps) < 0 or max(taps) > target.num_layers:
        problem = f"names boundaries {list(taps)} of a target of {target.num_layers} layers"
        raise fields.error(name, problem)
    return taps


def _parse_block(
    fields: Fields, target: DecoderConfig, names: set[str]
) -> tuple[BlockConfig, Taps | None]:
    """DFlash and DSpark. Their ids name layers: what a layer leaves is the next boundary."""
    shape = _shape(fields, target, names)
    taps = _own_taps(fields)
    if taps is None:
        name = next(
            (n for n in ("target_layer_ids", "aux_hidden_state_layer_ids") if fields.has(n)),
            "target_layer_ids",
        )
        ids = fields.integers(name) if fields.has(name) else _default_block_ids(fields, target)
        taps = _check_taps(fields, name, tuple(i + 1 for i in ids), target)
    else:
        _check_taps(fields, f"{OWN_KEY}.taps", taps, target)
    mask = fields.integer("mask_token_id")
    if not 0 <= mask < target.vocab_size:
        raise fields.error(
            "mask_token_id",
            f"is {mask}, but the target has token ids from 0 to {target.vocab_size - 1}",
        )
    kind = fields.text("markov_head_type", "vanilla")
    if kind not in get_args(MarkovKind):
        raise fields.error("markov_head_type", f"{kind!r} is not supported")
    has_markov = "markov_head.markov_w1.weight" in names
    rank = fields.integer("markov_rank", 256) if has_markov else 0
    is_dflash = "dflash" in fields.text("speculators_model_type", "").lower() or any(
        "dflash" in word for word in _words(fields.values)
    )
    config = BlockConfig(
        **shape,
        taps=taps,
        block_size=fields.positive("block_size", 16 if is_dflash else 7),
        mask_token_id=mask,
        predicts_at_anchor=fields.flag("sample_from_anchor", not is_dflash),
        markov_rank=rank,
        markov_kind=cast(MarkovKind, kind),
        windows=_windows(fields, shape["num_layers"]),
    )
    return config, None


def _default_block_ids(fields: Fields, target: DecoderConfig) -> tuple[int, ...]:
    """Layers spread as DFlash spreads them, where the config names none."""
    count = fields.positive("num_target_features", 5)
    span = target.num_layers - 4
    return tuple(round(1 + i * span / max(1, count - 1)) for i in range(count))


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    types = fields.values.get("layer_types")
    window = fields.positive("sliding_window") if fields.has("sliding_window") else None
    if not isinstance(types, list):
        return ()
    if len(types) < num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"must name {num_layers} full or sliding layers")
    if "sliding_attention" in types[:num_layers] and window is None:
        raise fields.error("sliding_window", "is missing, though layer_types has sliding layers")
    return tuple(window if t == "sliding_attention" else None for t in types[:num_layers])


_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _parse_eagle(
    fields: Fields, target: DecoderConfig, names: set[str]
) -> tuple[EagleConfig, Taps | None]:
    """EAGLE-3. Engines disagree on whether its ids count layers or boundaries."""
    for name, value in fields.values.items():
        if "norm" in name and value is True and name not in _NORM_FLAGS:
            raise fields.error(name, "is not supported")
    shape = _shape(fields, target, names)
    if shape["num_layers"] != 1:
        raise fields.error("num_hidden_layers", "must be 1 for an EAGLE-3 head")
    shifted: Taps | None = None
    taps = _own_taps(fields)
    if taps is None:
        name = "eagle_aux_hidden_state_layer_ids"
        if fields.has(name):
            ids = fields.integers(name)
            plus = tuple(i + 1 for i in ids)
            taps, shifted = (plus, ids) if min(ids, default=0) == 1 else (ids, plus)
            taps = _check_taps(fields, name, taps, target)
            is_possible = max(shifted) <= target.num_layers
            shifted = shifted if is_possible else None
        else:
            taps = default_taps(target.num_layers)
    else:
        _check_taps(fields, f"{OWN_KEY}.taps", taps, target)
    config = EagleConfig(
        **shape,
        taps=taps,
        fc_bias="fc.bias" in names,
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", "fc_norm.0.weight" in names),
        norm_output=fields.flag("norm_output", False),
    )
    return config, shifted


def _parse_medusa(fields: Fields, target: DecoderConfig) -> MedusaConfig:
    """Medusa-1. All else than the number of heads and of their blocks is the target's."""
    for name, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        value = fields.positive(name, own)
        if value != own:
            raise fields.error(name, f"is {value}, but the target's is {own}")
    return MedusaConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        taps=(target.num_layers,),
        num_heads=fields.positive("medusa_num_heads"),
        num_blocks=fields.positive("medusa_num_layers", 1),
    )


def default_taps(num_layers: int) -> Taps:
    """The boundaries of an EAGLE-3 head whose config names none."""
    return (2, num_layers // 2, num_layers - 3)


# -- tensors --------------------------------------------------------------------------------------


def read_tensors(path: Path) -> Tensors:
    """All tensors of a folder, as they are named and stored there. Raises `ModelLoadError`."""
    try:
        if (path / INDEX).is_file():
            named = read_json(path / INDEX).get("weight_map")
            if not isinstance(named, dict) or any(Path(str(n)).name != n for n in named.values()):
                raise ModelLoadError(f"{path / INDEX}: weight_map must name a file of this folder")
            tensors: Tensors = {}
            for name in sorted(set(named.values())):
                tensors |= load_file(path / name)
            return tensors
        for name in (WEIGHTS, MEDUSA_WEIGHTS):
            if (path / name).is_file():
                return load_file(path / name)
        for name in PICKLES:
            if (path / name).is_file():
                return _unpickled(path / name)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    names = ", ".join((WEIGHTS, MEDUSA_WEIGHTS, *PICKLES))
    raise ModelLoadError(f"{path} contains no weights: it has none of {names}")


def _unpickled(file: Path) -> Tensors:
    """A pickle of tensors; anything else in it is refused, so none of its code runs."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the unpickler met
        raise ModelLoadError(f"{file} cannot be read as plain tensors: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ModelLoadError(f"{file} does not contain a dictionary of tensors")
    return found


def _normalised(tensors: Tensors) -> Tensors:
    """Tensors by the names of docs/heads.md."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name[:1].isdigit():  # Medusa heads that were saved alone
            name = f"medusa_head.{name}"
        found[_ALIASES.get(name, name)] = tensor
    return found


def _load(folder: HeadFolder) -> Head:
    tensors = _normalised(read_tensors(folder.path))
    where, config = folder.path, folder.config
    if isinstance(config, MedusaConfig):
        return _filled(where, MedusaHead(config), tensors)
    draft_ids = _draft_ids(where, tensors.pop("d2t", None), config.vocab_size)
    head: BlockHead | EagleHead
    if isinstance(config, BlockConfig):
        config = _with_markov_size(where, config, tensors)
        head = BlockHead(config)
    else:
        tensors = {_midlayer(name): tensor for name, tensor in tensors.items()}
        head = EagleHead(config)
    tensors = {name: each for name, each in tensors.items() if not name.startswith(_IGNORED)}
    _filled(where, head, tensors)
    if config.is_reduced:
        if draft_ids is None or len(draft_ids) != config.draft_vocab_size:
            raise ModelLoadError(f"{where}: tensor d2t must have {config.draft_vocab_size} items")
        head.set_draft_ids(draft_ids)
    return head


_AnyHead = TypeVar("_AnyHead", bound=Head)


def _filled(where: Path, head: _AnyHead, tensors: Tensors) -> _AnyHead:
    """A head with its tensors, of the dtype in which they are stored."""
    _check(where, head, tensors)
    matrices = [t.dtype for t in tensors.values() if t.ndim == 2]
    head.to(matrices[0])
    head.load_state_dict(tensors)
    return head


def _midlayer(name: str) -> str:
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _with_markov_size(where: Path, config: BlockConfig, tensors: Tensors) -> BlockConfig:
    """Whether the Markov head reads the target's ids or the draft's shows in its size."""
    table = tensors.get("markov_head.markov_w1.weight")
    if table is None:
        return config
    if len(table) not in (config.vocab_size, config.draft_vocab_size):
        raise ModelLoadError(
            f"{where}: markov_head.markov_w1.weight has {len(table)} rows, neither the target's "
            f"{config.vocab_size} tokens nor the draft's {config.draft_vocab_size}"
        )
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return BlockConfig(**(values | {"markov_vocab_size": len(table)}))


def _draft_ids(where: Path, differences: Tensor | None, vocab_size: int) -> Tensor | None:
    """``d2t`` holds what must be added to a draft id; returns the target's ids."""
    if differences is None:
        return None
    ids = torch.arange(len(differences)) + differences.long()
    if not bool((ids >= 0).all() and (ids < vocab_size).all()) or len(set(ids.tolist())) < len(ids):
        raise ModelLoadError(f"{where}: tensor d2t must lead to distinct ids below {vocab_size}")
    return ids


def _check(where: Path, head: Head, tensors: Tensors) -> None:
    """Raise `ModelLoadError` for names and shapes that the config does not imply."""
    expected = head.state_dict()
    _refuse(where, "lacks", sorted(set(expected) - set(tensors)))
    _refuse(where, "has unexpected", sorted(set(tensors) - set(expected)))
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise ModelLoadError(
                f"{where}: {name} has shape {list(tensors[name].shape)}, but its config implies "
                f"{list(tensor.shape)}"
            )


def _refuse(where: Path, verb: str, names: list[str]) -> None:
    if names:
        more = len(names) - _NAMES_SHOWN
        shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        raise ModelLoadError(f"{where} {verb} tensors: {shown}")


# -- saving ---------------------------------------------------------------------------------------


def save_head(
    head: BlockHead | EagleHead, folder: Path, *, extra: Mapping[str, object] | None = None
) -> None:
    """Write ``config.json`` and ``model.safetensors`` as docs/heads.md describes them.

    ``extra``: more keys for our own part of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: each.detach().cpu().contiguous() for name, each in head.state_dict().items()}
    config = head.config
    if head.draft_ids is not None:
        ids = head.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[ids] = True
        tensors["t2d"] = known
    specific = _block_json(config) if isinstance(config, BlockConfig) else _eagle_json(config)
    own: dict[str, object] = {"kind": "block" if isinstance(config, BlockConfig) else "eagle3"}
    own |= {"version": 1, "taps": list(config.taps), **(extra or {})}
    values = _shape_json(config) | specific | {OWN_KEY: own}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _shape_json(config: BlockConfig | EagleConfig) -> dict[str, object]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_model_len,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        **_rope_json(config.rope),
    }


def _rope_json(rope: RopeSpec) -> dict[str, object]:
    """RoPE in the spelling of transformers v4, which every engine reads."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, object] = {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_len,
    }
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor}
        scaling |= {"high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        found = {name: getattr(rope, name) for name in (*names, "truncate")}
        scaling |= {name: value for name, value in found.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _block_json(config: BlockConfig) -> dict[str, object]:
    layer_ids = [boundary - 1 for boundary in config.taps]
    name = "DSparkDraftModel" if config.predicts_at_anchor else "DFlashDraftModel"
    values: dict[str, object] = {
        "architectures": [name],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": layer_ids,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": layer_ids},
        "sample_from_anchor": config.predicts_at_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": False,
    }
    if any(config.windows):
        kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
        values |= {"layer_types": kinds, "sliding_window": next(w for w in config.windows if w)}
    return values


def _eagle_json(config: EagleConfig) -> dict[str, object]:
    values: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if not _are_default(config.taps):  # left out they are read alike by every engine
        values["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "use_aux_hidden_state": True,
        }
    return values


def _are_default(taps: Taps) -> bool:
    """Whether these are `default_taps` of some target of at least 8 layers."""
    num_layers = taps[-1] + 3
    return num_layers >= _LEAST_LAYERS and taps == default_taps(num_layers)
