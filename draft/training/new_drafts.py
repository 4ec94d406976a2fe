"""New drafts: their shapes, what they begin with, and the files they end in."""

from __future__ import annotations

import copy
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ...core.errors import InvalidRequest
from ...core.model.decoder import OwnDecoder
from ...core.model.description.config import DecoderConfig
from ...core.model.description.shapes import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from ...core.model.opening import open_model
from ...core.ops.batch import Taps
from ...core.ops.weights import whole_table
from ..heads.block_network import BlockConfig, BlockHead
from ..heads.common.layers import Vocabulary
from ..heads.eagle import default_taps
from ..heads.eagle_network import EagleConfig, EagleHead
from ..heads.kinds import open_head, save_head
from .students import BlockStudent, EagleStudent, LmStudent, Student

Kind: TypeAlias = Literal["block", "eagle3", "lm"]
MARKOV_RANK = 64
SMOOTHING = 1.0  # pairs that every token is given, spread as all tokens are
QUIET = 0.3  # the share of its scale with which the layers' output begins beside the Markov head's
LM_DEPTH = 4  # tokens of a chain that is measured; a language model drafts any number
_LEAST_LAYERS = 8  # with fewer the default boundaries coincide
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a draft is for."""

    decoder: OwnDecoder
    path: Path  # its folder or GGUF file
    tokenizer_json: str | None = None  # what a draft model's folder holds beside its weights

    @property
    def config(self) -> DecoderConfig:
        """The shape of the model."""
        return self.decoder.config


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The choices for a draft. ``draft_ids``: the ids that a head can draft; None: all."""

    kind: Kind
    layers: int = 2
    block: int = 7
    draft_ids: Tensor | None = None
    pairs: Tensor | None = None  # [num, 2] neighbouring tokens of answers, see `_begin_with_pairs`


class Weights:
    """The target's tensors by the names of transformers, as float32."""

    def __init__(self, path: Path) -> None:
        self._config, self._checkpoint = open_model(path)

    def __call__(self, name: str) -> Tensor:
        """One tensor."""
        found = self._checkpoint.read(name)
        return (found if isinstance(found, Tensor) else found.dequantize()).float()

    def output(self) -> Tensor:
        """The output matrix, which may be the embedding."""
        return self(EMBEDDING if self._config.tie_embeddings else LM_HEAD)


def make_student(target: Target, shape: Shape, init: str | None) -> Student:
    """A draft that begins as ``init`` names: "target", a folder with one of its kind, or None.

    Raises `InvalidRequest` for a folder that holds another kind or shape, and for a target whose
    layers are not those of a draft.
    """
    if init == "target":
        _check_layers(target.config, is_head=shape.kind != "lm")
    weights = Weights(target.path)
    if shape.kind == "lm":
        return LmStudent(_language_model(target, shape, weights, init), LM_DEPTH)
    recipe = RECIPES[shape.kind]
    head = (
        _new_head(target, shape) if init in (None, "target") else _saved_head(shape, init, target)
    )
    with torch.no_grad():
        if init == "target":
            recipe.begin_as_target(head, weights, target.config.num_layers)
        if init in (None, "target") and shape.pairs is not None:
            recipe.begin_with_pairs(head, shape.pairs)
    device = target.decoder.device
    head.float().to(device)
    table = whole_table(target.decoder.weights.embedding)
    head.borrow(table.float(), weights.output().to(device))
    return recipe.student(head)


def taps_of(num_layers: int) -> Taps:
    """The boundaries that engines take where a head names none; spread, below 8 layers."""
    if num_layers >= _LEAST_LAYERS:
        return default_taps(num_layers)
    return tuple(sorted({max(1, round(num_layers * share)) for share in (0.2, 0.5, 0.8)}))


def _heads_of(config: DecoderConfig) -> tuple[int, int]:
    """KV heads of a draft and their size: the target's, or its values' where these are made of
    latents.
    """
    if config.latent is None:
        return config.num_kv_heads, config.head_dim
    return config.num_heads, config.latent.value_dim


def _new_head(target: Target, shape: Shape) -> Vocabulary:
    config, ids = target.config, shape.draft_ids
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
        # Files of heads name no part of a head that turns: all of it does.
        "rope": replace(config.rope, query_beta=0.0, partial=1.0),
        "max_model_len": config.max_model_len,
        "norm_eps": config.norm_eps,
    }
    head: Vocabulary = RECIPES[shape.kind].make(shape, same)
    if ids is not None:
        head.set_draft_ids(ids)
    return head


def _new_block(shape: Shape, same: dict[str, Any]) -> BlockHead:
    config = BlockConfig(
        **same,
        num_layers=shape.layers,
        block_size=shape.block,
        mask_token_id=same["vocab_size"] - 1,
        markov_rank=MARKOV_RANK,
        markov_vocab_size=same["draft_vocab_size"],
    )
    return BlockHead(config)


def _new_eagle(shape: Shape, same: dict[str, Any]) -> EagleHead:  # noqa: ARG001
    return EagleHead(EagleConfig(**same, num_layers=1))


def _check_layers(config: DecoderConfig, *, is_head: bool) -> None:
    """Raise `InvalidRequest` for layers whose matrices fit no draft."""
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
            f"init: RoPE turns a part of each head of {config.model_type}, and all of a draft's: "
            "train from random weights, or begin with a draft in a folder",
            param="init",
        )


def _saved_head(shape: Shape, init: str | None, target: Target) -> Any:  # noqa: ANN401 - of any kind
    """A head from a folder, which brings its own shape and vocabulary."""
    path = Path(str(init))
    if not path.is_dir():
        raise InvalidRequest(f"init: {path} is not a folder", param="init")
    folder = open_head(path, target.config)
    if folder.kind.name != shape.kind:
        message = f"init: {path} contains a head of kind {folder.kind.name}"
        raise InvalidRequest(message, param="init")
    return folder.load()


# -- beginning as the target ----------------------------------------------------------------------


def _block_from_target(head: BlockHead, weights: Weights, num_layers: int) -> None:
    """The target's last layers; the context begins as its last tap.

    Their queries and keys have norms here: these begin with the scales that the target's have.
    """
    count = head.config.num_layers
    first = max(0, num_layers - count)
    for index, layer in enumerate(head.layers):
        prefix = layer_prefix(min(first + index, num_layers - 1))
        norm = weights(f"{prefix}input_layernorm.weight")
        attention: Any = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            matrix = weights(f"{prefix}self_attn.{name}.weight")
            getattr(attention, name).weight.copy_(matrix)
        for name in ("q", "k"):
            matrix = getattr(attention, f"{name}_proj").weight
            getattr(attention, f"{name}_norm").weight.fill_(_scale(matrix, norm))
        _copy_rest(layer, weights, prefix)
        layer.input_layernorm.weight.copy_(norm)  # type: ignore[union-attr, operator]
    head.hidden_norm.weight.copy_(weights(f"{layer_prefix(first)}input_layernorm.weight"))
    head.norm.weight.copy_(weights(FINAL_NORM))
    _pass_last_tap(head.fc, head.config.hidden_size)


def _begin_with_pairs(head: BlockHead, pairs: Tensor) -> None:
    """The Markov head begins with the counts of neighbouring tokens in the data.

    Its first rank holds the frequency of each id, the others the strongest directions of how much
    likelier an id is behind another one than anywhere, both weighted by how often they occur.
    """
    markov, config = head.markov_head, head.config
    if markov is None or markov.kind != "vanilla":
        return
    size, rank = config.draft_vocab_size, config.markov_rank
    before, behind = (head.markov_ids(each) for each in pairs.T)
    is_known = (before >= 0) & (behind >= 0)
    counts = torch.zeros(size, size)
    counts.index_put_((before[is_known], behind[is_known]), torch.ones(()), accumulate=True)
    total = counts.sum()
    behind_share = (counts.sum(dim=0) + 0.1) / (total + 0.1 * size)
    before_share = (counts.sum(dim=1) + 0.1) / (total + 0.1 * size)
    seen = counts.sum(dim=1, keepdim=True)
    likelier = (counts + SMOOTHING * behind_share) / ((seen + SMOOTHING) * behind_share)
    rows, columns = before_share.sqrt().unsqueeze(1), behind_share**0.75
    u, strength, v = torch.svd_lowrank(likelier.log() * rows * columns, q=rank - 1, niter=3)
    log_share = behind_share.log()
    markov.markov_w1.weight[:size, :1] = 1.0
    markov.markov_w2.weight[:, :1] = (log_share - log_share.mean()).unsqueeze(1)
    markov.markov_w1.weight[:size, 1:] = u * strength.sqrt() / rows
    markov.markov_w2.weight[:, 1:] = v * strength.sqrt() / columns.unsqueeze(1)
    head.norm.weight.mul_(QUIET)


def _eagle_from_target(head: EagleHead, weights: Weights, num_layers: int) -> None:
    """The target's last layer on its last tap; the embedding's half begins at random."""
    hidden, prefix = head.config.hidden_size, layer_prefix(num_layers - 1)
    attention = head.midlayer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        matrix = weights(f"{prefix}self_attn.{name}.weight")
        getattr(attention, name).weight[:, hidden:] = matrix
    attention.o_proj.weight.copy_(weights(f"{prefix}self_attn.o_proj.weight"))
    _copy_rest(head.midlayer, weights, prefix)
    head.midlayer.hidden_norm.weight.copy_(weights(f"{prefix}input_layernorm.weight"))
    head.norm.weight.copy_(weights(FINAL_NORM))
    head.fc.weight.zero_()
    _pass_last_tap(head.fc, hidden)


def _copy_rest(layer: Any, weights: Weights, prefix: str) -> None:  # noqa: ANN401
    for name in _MLP:
        getattr(layer.mlp, name).weight.copy_(weights(f"{prefix}mlp.{name}.weight"))
    norm = weights(f"{prefix}post_attention_layernorm.weight")
    layer.post_attention_layernorm.weight.copy_(norm)


def _pass_last_tap(fc: nn.Linear, hidden: int) -> None:
    fc.weight[:, -hidden:] += torch.eye(hidden)


def _scale(matrix: Tensor, norm: Tensor) -> float:
    """Root mean square of what a matrix makes of normed inputs, ``norm`` the norm's weights."""
    return math.sqrt(float((matrix * norm).square().sum(dim=1).mean()))


def _ignore_pairs(head: EagleHead, pairs: Tensor) -> None:
    """An EAGLE-3 head has no part that sees the token before alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Functions that make and train heads of one kind.

    ``make``: a head of random weights; the fields of its config that all kinds have are given.
    ``begin_as_target``: copies the target's last layers, by the number of its layers.
    ``begin_with_pairs``: uses neighbouring tokens of answers. ``brings_output``: whether the files
    of a head of a part of the vocabulary have its rows of the target's output: other engines expect
    them beside the map of ids.
    """

    make: Callable[[Shape, dict[str, Any]], Any]
    begin_as_target: Callable[[Any, Weights, int], None]
    begin_with_pairs: Callable[[Any, Tensor], None]
    student: Callable[[Any], Student]
    brings_output: bool = False


RECIPES = {
    "block": Recipe(
        make=_new_block,
        begin_as_target=_block_from_target,
        begin_with_pairs=_begin_with_pairs,
        student=BlockStudent,
    ),
    "eagle3": Recipe(
        make=_new_eagle,
        begin_as_target=_eagle_from_target,
        begin_with_pairs=_ignore_pairs,
        student=EagleStudent,
        brings_output=True,
    ),
}


# -- a language model -----------------------------------------------------------------------------


def _language_model(target: Target, shape: Shape, weights: Weights, init: str | None) -> nn.Module:
    """A decoder of the target's width with fewer layers; its embedding and output stay."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = target.config
    num_kv_heads, head_dim = _heads_of(config)
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": min(shape.layers, config.num_layers),
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
        copied = _lm_tensors(config, values["num_hidden_layers"], weights, whole=init == "target")
        with torch.no_grad():
            for name, tensor in copied.items():
                if name in own:
                    own[name].copy_(tensor)
    for parameter in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        parameter.requires_grad_(False)
    module: nn.Module = model.float().to(target.decoder.device)
    return module


def _lm_tensors(
    config: DecoderConfig, count: int, weights: Weights, *, whole: bool
) -> Mapping[str, Tensor]:
    """The target's embedding, output and norm, and layers spread from its first to its last."""
    found = {EMBEDDING: weights(EMBEDDING), FINAL_NORM: weights(FINAL_NORM)}
    if not config.tie_embeddings:
        found[LM_HEAD] = weights(LM_HEAD)
    if not whole:
        return found
    last = config.num_layers - 1
    names = ["input_layernorm", "post_attention_layernorm"]
    names += [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}" for n in _MLP]
    names += ["self_attn.q_norm", "self_attn.k_norm"] if config.head_norm == "each" else []
    for index in range(count):
        source = round(index * last / max(1, count - 1))
        for name in names:
            own = f"{layer_prefix(index)}{name}.weight"
            found[own] = weights(f"{layer_prefix(source)}{name}.weight")
    return found


def _saved_model(model: Any, path: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    if not (path / "config.json").is_file():
        raise InvalidRequest(
            f"init: {path} is not the folder of a model: config.json is missing", param="init"
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
    """Write a draft as `--draft` reads it, in bfloat16; each file is replaced whole, never half.

    ``tap_scale``: what the taps were multiplied by in training; its head reads them as they are.
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
    """A copy, with the rows of the output that `Recipe.brings_output` asks for."""
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
