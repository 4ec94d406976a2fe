"""The files of heads: reads, checks and writes the parts that are common to all kinds of heads.

A head has a config.json and tensors. Dialects differ in the names of keys and tensors;
docs/heads.md lists them. The config declares everything that a head computes. An unexpected or
missing tensor or an unknown norm flag raises `ModelLoadError`, because such a head would silently
draft badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ....core.errors import ModelLoadError
from ....core.model.description.config import DecoderConfig
from ....core.model.description.fields import Fields, read_json
from ....core.model.description.rope import RopeSpec, parse_rope
from ....core.ops.batch import Taps
from ...proposers.gap_model import GapNumbers
from .base import Tensors
from .layers import Head, HeadConfig, Vocabulary

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Pickles are read without running any of their code.
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
OWN_KEY = "foretoken"  # key of our own part of a config.json
_NAMES_SHOWN = 4
_ALIASES = {  # tensor names of dialects without `_PREFIXES`, and our names
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
_PREFIXES = ("model.", "eagle_module.")
# DSpark's confidence head is ignored: survival is learnt from accepted tokens instead.
_IGNORED = ("confidence_head.", "t2d", "rotary_emb.inv_freq")
_AnyHead = TypeVar("_AnyHead", bound=Head)
_AnyVocabulary = TypeVar("_AnyVocabulary", bound=Vocabulary)


# -- config ---------------------------------------------------------------------------------------


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return the architectures and the speculators type that a config.json names, in lower case."""
    named = values.get("architectures") or []
    words = [str(each) for each in named] if isinstance(named, list) else []
    words.append(str(values.get("speculators_model_type", "")))
    return [word.lower() for word in words if word]


def flattened(fields: Fields) -> Fields:
    """Return fields with the keys of nested objects moved to the top level.

    If a key is on both levels, the value on the top level is used.
    """
    values: dict[str, Any] = {}
    for name in ("transformer_layer_config", "dflash_config", "eagle_config", "text_config"):
        values |= {k: v for k, v in fields.object(name).values.items() if v is not None}
    values |= {k: v for k, v in fields.values.items() if v is not None}
    # DSpark heads within other checkpoints have prefixed keys.
    for name, value in list(values.items()):
        if name.startswith("dspark_"):
            values.setdefault(name.removeprefix("dspark_"), value)
    return Fields(values, fields.where)


def parse_shape(fields: Fields, target: DecoderConfig, names: set[str]) -> dict[str, Any]:
    """Parse the fields of `HeadConfig`, whose keys are the same for all kinds of heads with layers.

    Raises `ModelLoadError`, which names the wrong key.
    """
    hidden = fields.positive("hidden_size")
    heads = fields.positive("num_attention_heads")
    width = fields.positive("target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        problem = f"is {width}, but the target's hidden size is {target.hidden_size}"
        raise fields.error("target_hidden_size", problem)
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", "must be silu; no other activation is supported")
    max_len = fields.positive("max_position_embeddings", target.max_model_len)
    vocab = fields.positive("vocab_size", target.vocab_size)
    draft_vocab = fields.positive("draft_vocab_size", vocab)
    if vocab != target.vocab_size and draft_vocab == vocab:
        problem = f"is {vocab}, but the target has {target.vocab_size} tokens"
        raise fields.error("vocab_size", problem)
    has_map = "d2t" in names
    if draft_vocab > target.vocab_size or (draft_vocab < target.vocab_size and not has_map):
        problem = f"is {draft_vocab}, not {target.vocab_size} tokens, and there is no tensor d2t"
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


def own_taps(fields: Fields) -> Taps | None:
    """Return the taps in the object "foretoken" of a config, or None if there are none."""
    own = fields.object(OWN_KEY)
    return own.integers("taps") if own.has("taps") else None


def own_gaps(fields: Fields) -> dict[bool, GapNumbers]:
    """Return the fitted parameters of gap models, for greedy (False) and sampled (True) requests.

    Raises `ModelLoadError` for other values than three finite numbers.
    """
    found = fields.object(OWN_KEY).object("odds").values
    fitted: dict[bool, GapNumbers] = {}
    for name, is_sampled in (("greedy", False), ("sampled", True)):
        if name not in found:
            continue
        numbers = found[name]
        is_sound = isinstance(numbers, list) and len(numbers) == 3
        if not is_sound or not all(isinstance(n, int | float) and isfinite(n) for n in numbers):
            raise fields.error(f"{OWN_KEY}.odds.{name}", "must be three finite numbers")
        fitted[is_sampled] = (float(numbers[0]), float(numbers[1]), float(numbers[2]))
    return fitted


def check_taps(fields: Fields, name: str, taps: Taps, target: DecoderConfig) -> Taps:
    """Return the taps.

    Raises `ModelLoadError` if there are no taps, or if the target has too few layers for one of
    them.
    """
    if not taps or min(taps) < 0 or max(taps) > target.num_layers:
        problem = (
            f"names layer boundaries {list(taps)}, but the target has {target.num_layers} layers"
        )
        raise fields.error(name, problem)
    return taps


# -- tensors --------------------------------------------------------------------------------------


def read_tensors(path: Path) -> Tensors:
    """Return all tensors of a folder, with their stored names and dtypes.

    Raises `ModelLoadError` if there are no weights or they cannot be read.
    """
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
    """Read a pickle of tensors without running its code.

    Raises `ModelLoadError` for any other content.
    """
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch passes on any error of the unpickler.
        raise ModelLoadError(f"{file} cannot be read as plain tensors: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ModelLoadError(f"{file} does not contain a dictionary of tensors")
    return found


def normalised(tensors: Tensors) -> Tensors:
    """Rename tensors of any dialect to their names in docs/heads.md."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name[:1].isdigit():  # A Medusa head may be saved without its parent module.
            name = f"medusa_head.{name}"
        found[_ALIASES.get(name, name)] = tensor
    return found


def fill(where: Path, head: _AnyHead, tensors: Tensors) -> _AnyHead:
    """Load tensors into a head, in the stored dtype of its matrices; return the head.

    Raises `ModelLoadError` for names and shapes that the config does not imply.
    """
    _check(where, head, tensors)
    matrices = [t.dtype for t in tensors.values() if t.ndim == 2]
    head.to(matrices[0])
    head.load_state_dict(tensors)
    return head


def fill_vocabulary(where: Path, head: _AnyVocabulary, tensors: Tensors) -> _AnyVocabulary:
    """Load tensors into a head and set the ids that it can draft; return the head.

    Tensors that the engine does not use are left out. Raises `ModelLoadError` for unexpected names,
    shapes or ids.
    """
    config = head.config
    draft_ids = _draft_ids(where, tensors.get("d2t"), config.vocab_size)
    ignored = (*_IGNORED, "d2t")
    fill(
        where, head, {name: each for name, each in tensors.items() if not name.startswith(ignored)}
    )
    if config.is_reduced:
        if draft_ids is None or len(draft_ids) != config.draft_vocab_size:
            raise ModelLoadError(
                f"{where}: tensor d2t must have {config.draft_vocab_size} entries, one per draft id"
            )
        head.set_draft_ids(draft_ids)
    return head


def _draft_ids(where: Path, differences: Tensor | None, vocab_size: int) -> Tensor | None:
    """Return the target's id of each id of the head, or None without ``d2t``.

    ``d2t`` contains the difference between the two ids. Raises `ModelLoadError` for ids that repeat
    or are out of range.
    """
    if differences is None:
        return None
    ids = torch.arange(len(differences)) + differences.long()
    if not bool((ids >= 0).all() and (ids < vocab_size).all()) or len(set(ids.tolist())) < len(ids):
        raise ModelLoadError(
            f"{where}: tensor d2t is invalid: d2t[i] + i must be distinct ids below {vocab_size}"
        )
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


def vocabulary_tensors(head: Head) -> Tensors:
    """Return the tensors that describe the ids which a head can draft; none if it can draft all.

    ``d2t`` [draft_vocab]: the target's id minus the head's id. ``t2d`` [vocab]: whether the head
    can draft the target's id.
    """
    if head.draft_ids is None:
        return {}
    ids = head.draft_ids.cpu()
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def shape_json(config: HeadConfig) -> dict[str, object]:
    """Return the keys of a config.json that all kinds with layers have."""
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
    """Return RoPE in the format of transformers v4, which every engine reads."""
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
