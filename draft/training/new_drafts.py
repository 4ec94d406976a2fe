"""New drafts: their shapes, their initial weights and their files."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...core.errors import InvalidRequest
from ...core.model.decoder import OwnDecoder
from ...core.model.description.config import DecoderConfig
from ...core.model.description.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from ...core.model.opening import open_model
from ...core.ops.batch import Taps
from ...core.ops.weights import whole_table
from ..heads.common.layers import Vocabulary
from ..heads.common.losses import kl_overlap_loss
from ..heads.common.training import Recipe, Student, TeacherOutput, TrainedKind, next_rows
from ..heads.eagle import default_taps
from ..heads.kinds import KINDS, open_head, save_head

LM = "lm"
RECIPES: dict[str, Recipe] = {
    name: kind.recipe for name, kind in KINDS.items() if kind.recipe is not None
}
TRAINED: dict[str, TrainedKind] = {
    **RECIPES,
    LM: TrainedKind(about="a small language model", options=("layers",)),
}
LM_DEPTH = 4  # length of the measured chains; a language model can draft any number of tokens
_LEAST_LAYERS = 8  # number of layers below which the default boundaries coincide


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a draft is trained for."""

    decoder: OwnDecoder
    path: Path  # folder or GGUF file of the model
    tokenizer_json: str | None = None  # text of the tokenizer.json for a draft model's folder

    @property
    def config(self) -> DecoderConfig:
        """The shape of the model."""
        return self.decoder.config


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of `foretoken train-draft`. Either ``minutes`` or ``tokens`` is the budget.

    ``kind``: a name of `TRAINED`. ``tokens`` counts all tokens that the target computes for the
    draft to learn from. ``init``: "target" for weights of the target, a folder with a draft of the
    same kind, or None for random weights.
    """

    kind: str
    minutes: float | None = None
    tokens: int | None = None
    init: str | None = "target"
    layers: int = 2
    block: int = 7
    draft_vocab: int | None = None  # number of most frequent ids that a head can draft; None: all
    resume: bool = False
    seed: int = 0


class Weights:
    """The target's tensors as float32, by their names in transformers."""

    def __init__(self, path: Path) -> None:
        self._config, self._checkpoint = open_model(path)

    def __call__(self, name: str) -> Tensor:
        """Return a tensor, dequantised if necessary."""
        found = self._checkpoint.read(name)
        return (found if isinstance(found, Tensor) else found.dequantize()).float()

    def output(self) -> Tensor:
        """Return the output matrix, which is the embedding if the two are tied."""
        return self(EMBEDDING if self._config.tie_embeddings else LM_HEAD)


def make_student(
    target: Target,
    options: TrainOptions,
    draft_ids: Tensor | None = None,
    pairs: Tensor | None = None,
) -> Student:
    """Make the draft to train.

    ``draft_ids``: the ids that a head can draft; None for all. ``pairs`` [num, 2]: pairs of
    neighbouring tokens in answers, from which a head may initialise a part of its weights. Raises
    `InvalidRequest` for a folder that contains another kind or shape, and for a target whose layers
    cannot initialise a draft.
    """
    init, is_new = options.init, options.init in (None, "target")
    recipe = RECIPES.get(options.kind)
    if init == "target":
        _check_layers(target.config, is_head=recipe is not None)
    weights = Weights(target.path)
    if recipe is None:
        return LmStudent(_language_model(target, options.layers, weights, init))
    head = _new_head(target, recipe, options, draft_ids) if is_new else _saved_head(target, options)
    with torch.no_grad():
        if init == "target":
            recipe.begin_as_target(head, weights, target.config.num_layers)
        if is_new and pairs is not None and recipe.begin_with_pairs is not None:
            recipe.begin_with_pairs(head, pairs)
    device = target.decoder.device
    head.float().to(device)
    table = whole_table(target.decoder.weights.embedding)
    head.borrow(table.float(), weights.output().to(device))
    return recipe.student(head)


def taps_of(num_layers: int) -> Taps:
    """Return the default taps of a head; a target of fewer than 8 layers has its own defaults."""
    if num_layers >= _LEAST_LAYERS:
        return default_taps(num_layers)
    return tuple(sorted({max(1, round(num_layers * share)) for share in (0.2, 0.5, 0.8)}))


def _heads_of(config: DecoderConfig) -> tuple[int, int]:
    """Return the number of KV heads of a draft, and the size of a head.

    Both are equal to the target's. If the target has latent attention, they are the number of its
    attention heads and the size of its values.
    """
    if config.latent is None:
        return config.num_kv_heads, config.head_dim
    return config.num_heads, config.latent.value_dim


def _new_head(
    target: Target, recipe: Recipe, options: TrainOptions, ids: Tensor | None
) -> Vocabulary:
    config = target.config
    num_kv_heads, head_dim = _heads_of(config)
    same: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size if ids is None else len(ids),
        "target_hidden_size": config.hidden_size,
        "taps": taps_of(config.num_layers),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        # Files of heads cannot express partial RoPE, so all dimensions are rotated.
        "rope": replace(config.rope, query_beta=0.0, partial=1.0),
        "max_model_len": config.max_model_len,
        "norm_eps": config.norm_eps,
    }
    head: Vocabulary = recipe.make(same, options.layers, options.block)
    if ids is not None:
        head.set_draft_ids(ids)
    return head


def _check_layers(config: DecoderConfig, *, is_head: bool) -> None:
    """Raise `InvalidRequest` for a target whose matrices do not fit a draft."""
    for layer in config.layers:
        is_other = layer.experts or layer.heads or layer.mixer is not None
        if is_other or layer.kv_of is not None or config.has_gate or config.latent is not None:
            message = (
                f"init: the layers of {config.model_type} have experts, latents, recurrent states, "
                "gates or heads of several sizes: train a draft of kind block from random weights, "
                "or begin with one in a folder"
            )
            raise InvalidRequest(message, param="init")
    if is_head and config.rope.partial != 1.0:
        raise InvalidRequest(
            f"init: {config.model_type} applies RoPE to a part of each attention head, which draft "
            "heads do not support: train from random weights, or begin with a draft in a folder",
            param="init",
        )


def _saved_head(target: Target, options: TrainOptions) -> Any:  # noqa: ANN401 - of any kind
    """Load a head from a folder; it keeps its shape and vocabulary.

    Raises `InvalidRequest` if the path is not a folder or contains another kind of head.
    """
    path = Path(str(options.init))
    if not path.is_dir():
        raise InvalidRequest(f"init: {path} is not a folder", param="init")
    folder = open_head(path, target.config)
    if folder.kind.name != options.kind:
        message = f"init: {path} contains a head of another kind, {folder.kind.name}"
        raise InvalidRequest(message, param="init")
    return folder.load()


# -- a language model -----------------------------------------------------------------------------


class LmStudent(Student):
    """A small language model with the target's vocabulary; its only input is tokens."""

    kind = LM
    taps: Taps = ()
    depth = LM_DEPTH
    rate = 0.3  # lower than for a head, because the layers are trained already

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    @override
    def loss(self, taught: TeacherOutput, generator: torch.Generator) -> Tensor:
        is_used = taught.rows >= 0
        losses = kl_overlap_loss(self._logits(taught)[is_used], taught.p, taught.rows[is_used])
        return losses.mean()

    def _logits(self, taught: TeacherOutput) -> Tensor:
        logits: Tensor = self.module(input_ids=taught.token_ids, use_cache=False).logits
        return logits

    @override
    def chains(self, taught: TeacherOutput) -> tuple[Tensor, Tensor]:
        # The chains follow the answer, so the draft reads its own earlier tokens in them.
        width = taught.token_ids.shape[1]
        anchors = torch.arange(width, device=taught.rows.device).expand(len(taught.rows), -1)
        rows = next_rows(taught.rows, anchors, self.depth)
        fits = (rows >= 0).all(dim=-1)
        logits = self._logits(taught)
        padded = nn.functional.pad(logits, (0, 0, 0, self.depth))
        batch, places = fits.nonzero(as_tuple=True)
        spans = places.unsqueeze(-1) + torch.arange(self.depth, device=places.device)
        return padded[batch.unsqueeze(-1), spans], rows[fits]


def _language_model(target: Target, layers: int, weights: Weights, init: str | None) -> nn.Module:
    """Make a decoder of the target's width with fewer layers; freeze embedding and output."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = target.config
    num_kv_heads, head_dim = _heads_of(config)
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": min(layers, config.num_layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "max_position_embeddings": config.max_model_len,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    model: Any
    if config.head_norm == "each":
        model = Qwen3ForCausalLM(Qwen3Config(**values))
    else:
        model = LlamaForCausalLM(LlamaConfig(**values))
    if init not in (None, "target"):
        model = _saved_model(model, Path(str(init)))
    else:
        own = model.state_dict()
        sources = _lm_sources(config, list(own), values["num_hidden_layers"] if init else 0)
        with torch.no_grad():
            for name, source in sources.items():
                own[name].copy_(weights(source))
    for parameter in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        parameter.requires_grad_(False)
    module: nn.Module = model.float().to(target.decoder.device)
    return module


def _lm_sources(config: DecoderConfig, names: Sequence[str], count: int) -> dict[str, str]:
    """Return the name of the target's tensor that initialises each tensor of a draft.

    Embedding, final norm and output are copied. The ``count`` layers of the draft are copied from
    layers of the target at equal distances, from its first to its last.
    """
    found = {EMBEDDING: EMBEDDING, FINAL_NORM: FINAL_NORM}
    if not config.tie_embeddings:
        found[LM_HEAD] = LM_HEAD
    for index in range(count):
        source = round(index * (config.num_layers - 1) / max(1, count - 1))
        own, theirs = layer_prefix(index), layer_prefix(source)
        found |= {name: theirs + name[len(own) :] for name in names if name.startswith(own)}
    return found


def _saved_model(model: Any, path: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    if not (path / "config.json").is_file():
        raise InvalidRequest(
            f"init: {path} is not a model folder: config.json is missing", param="init"
        )
    found = type(model).from_pretrained(path, dtype=torch.float32)
    if found.config.vocab_size != model.config.vocab_size:
        ours, theirs = model.config.vocab_size, found.config.vocab_size
        message = f"init: {path} must have the target's vocabulary of {ours} tokens, not {theirs}"
        raise InvalidRequest(message, param="init")
    return found


# -- files ----------------------------------------------------------------------------------------


def save_student(
    student: Student,
    target: Target,
    folder: Path,
    extra: Mapping[str, object],
    tap_scale: Tensor | None = None,
) -> None:
    """Write a draft in bfloat16 to a folder that `--draft` can read; replace each file atomically.

    ``tap_scale`` [num_taps * hidden]: factors of the taps in training. They are folded into the
    saved weights, because a head reads unscaled taps in serving.
    """
    folder.mkdir(parents=True, exist_ok=True)
    module: Any = student.module
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as name:
        new = Path(name)
        if student.kind in RECIPES:
            save_head(_in_bfloat16(module, target, tap_scale), new, extra=extra)
        else:
            _save_model(module, target, new)
        for path in sorted(new.iterdir()):
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def _in_bfloat16(head: Vocabulary, target: Target, tap_scale: Tensor | None) -> Vocabulary:
    """Return a copy in bfloat16, with the output rows that `Recipe.brings_output` requires."""
    config, tensors = head.config, dict(head.state_dict())
    if tap_scale is not None:
        tensors["fc.weight"] = tensors["fc.weight"] * tap_scale.to(tensors["fc.weight"].device)
    if RECIPES[config.kind].brings_output and head.draft_ids is not None and head.lacks_output:
        config = replace(config, owns_output=True)
        tensors["lm_head.weight"] = Weights(target.path).output()[head.draft_ids.cpu()]
    made = type(head)(config)
    made.bfloat16().load_state_dict(tensors)
    if head.draft_ids is not None:
        made.set_draft_ids(head.draft_ids.cpu())
    return made


def _save_model(module: nn.Module, target: Target, folder: Path) -> None:
    model: Any = copy.deepcopy(module)
    model.bfloat16().save_pretrained(folder)
    if target.tokenizer_json is not None:
        (folder / "tokenizer.json").write_text(target.tokenizer_json, encoding="utf-8")
    for name in ("tokenizer_config.json", "generation_config.json"):
        if target.path.is_dir() and (target.path / name).is_file():
            shutil.copyfile(target.path / name, folder / name)
