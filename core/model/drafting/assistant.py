"""Gemma 4's assistants: a few layers that draft for a model and read the model's own KV.

The inputs are a token p and h, the output of the model's final norm at position p - 1. The
assistant computes ``pre_projection([embedding of the token, h])`` with the model's embedding. Its
layers have only queries: each, at position p, attends to the KV of earlier positions in the model's
last layer of the same kind, with or without a window. The output predicts the token after p, and
its ``post_projection`` replaces h for that token, whose queries still use position p. A large
vocabulary may be split into clusters of equal size, of which only the best few are scored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ModelLoadError
from ...ops.batch import ForwardOutput, RaggedBatch, SamplingPlan, Wanted
from ...ops.kv_pool import KVPool
from ...ops.weights import PackedLinear, Table
from ..decoder import OwnDecoder
from ..description.config import DecoderConfig, LayerSpec
from ..description.fields import Fields, read_json
from ..description.page_layout import PageLayout
from ..description.tensors import EMBEDDING, LM_HEAD, TOKEN_ORDERING
from ..families.registry import parse_config
from ..formats.checkpoint import OnRead, check_tensors, observed
from ..formats.safetensors import SafetensorsCheckpoint
from ..weights.assembly import Assembly, AssistantEnds
from ..weights.layer import ignored, tensor_shapes

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_OUTPUTS = (LM_HEAD, EMBEDDING)  # EMBEDDING if output and embedding are tied
UNSCORED = -1e30  # logit of a token outside the best clusters; -inf could make NaN


class AssistantConfig(NamedTuple):
    """The config of an assistant.

    ``decoder``: config of its layers, each of which reads the KV of layer ``kv_of`` of the target.
    ``num_clusters``: number of clusters of the vocabulary, of which ``num_scored`` are scored; 0:
    no clusters.
    """

    decoder: DecoderConfig
    num_clusters: int
    num_scored: int


def is_assistant(path: Path) -> bool:
    """Whether a folder holds an assistant, according to its config.json."""
    file = path / "config.json"
    return file.is_file() and read_json(file).get("model_type") in TYPES


def read_assistant(path: Path, target: DecoderConfig) -> AssistantConfig:
    """Return an assistant's config. Raises `ModelLoadError` if it does not fit the target."""
    fields = Fields(read_json(path / "config.json"), str(path / "config.json"))
    width = fields.positive("backbone_hidden_size")
    if width != target.hidden_size:
        problem = f"is {width}, but the target's hidden size is {target.hidden_size}"
        raise fields.error("backbone_hidden_size", problem)
    from ..fallback.text_config import read_text_config  # transformers takes a second to import

    text = {name: value for name, value in read_text_config(path).items() if value is not None}
    # All layers read the KV of the target; none of them reads the KV of an assistant's layer.
    text["num_kv_shared_layers"] = 0
    inner = Fields(text, f"{fields.where}: text_config")
    config = parse_config(inner)
    if config.vocab_size != target.vocab_size:
        problem = f"is {config.vocab_size}, but the target has {target.vocab_size} tokens"
        raise inner.error("vocab_size", problem)
    layers = tuple(_reading(config, index, target, inner) for index in range(config.num_layers))
    num_clusters, num_scored = _clusters(fields, config.vocab_size)
    return AssistantConfig(replace(config, layers=layers), num_clusters, num_scored)


def _reading(config: DecoderConfig, index: int, target: DecoderConfig, fields: Fields) -> LayerSpec:
    """Return a layer that reads the KV of the target's last layer of the same kind.

    The kinds are layers with and without a window. Raises `ModelLoadError` if the target has no
    such layer, or if its heads differ.
    """
    layer, heads = config.layers[index], config.heads_of(index)
    kind = "full attention" if layer.window is None else "sliding-window attention"
    found = [
        number
        for number, spec in enumerate(target.layers)
        if spec.kv_of is None and spec.has_attention
        if (spec.window is None) == (layer.window is None)
    ]
    if not found:
        raise fields.error("layer_types", f"has {kind}, but no layer of the target has it")
    theirs = target.heads_of(found[-1])
    if heads[1:] != theirs[1:]:
        raise fields.error(
            "per_layer_config",
            f"layer {index} reads {heads.num_kv_heads} KV heads of {heads.head_dim} dimensions, "
            f"but layer {found[-1]} of the target has {theirs.num_kv_heads} of {theirs.head_dim}",
        )
    # A row is at the position of its last key, and it attends to a whole window before that key.
    window = None if layer.window is None else layer.window + 1
    return replace(layer, kv_of=found[-1], window=window)


def _clusters(fields: Fields, vocab_size: int) -> tuple[int, int]:
    """Return the number of clusters of the vocabulary, and how many of them are scored."""
    if not fields.flag("use_ordered_embeddings", False):
        return 0, 0
    count = fields.positive("num_centroids", 2048)
    scored = fields.positive("centroid_intermediate_top_k", 32)
    if vocab_size % count:
        raise fields.error(
            "num_centroids", f"must divide the vocabulary of {vocab_size} tokens, not {count}"
        )
    if scored > count:
        raise fields.error(
            "centroid_intermediate_top_k", f"is {scored}, but there are only {count} clusters"
        )
    return count, scored


# -- its weights ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """A vocabulary that is split into clusters.

    ``ids`` [num_clusters, size]: token ids of each cluster. ``table`` [vocab, hidden]: the output
    matrix.
    """

    ids: Tensor
    table: Tensor
    num_scored: int

    def logits(self, scores: Tensor, hidden: Tensor) -> Tensor:
        """Return logits ``[n, vocab]``, float32, of the tokens in the best-scored clusters.

        ``scores`` [n, num_clusters], ``hidden`` [n, hidden]. Other tokens get `UNSCORED`.
        """
        ids = self.ids[scores.topk(self.num_scored, dim=-1).indices].flatten(1)
        rows = F.embedding(ids, self.table)
        found = torch.matmul(rows, hidden.unsqueeze(-1)).squeeze(-1).float()
        logits = found.new_full((len(hidden), len(self.table)), UNSCORED)
        return logits.scatter_(1, ids, found)


@dataclass(frozen=True, slots=True, eq=False)
class Assistant:
    """An assistant of a target model.

    ``embedding`` [vocab, target's hidden]: the target's embedding. ``decoder``: the assistant's
    layers, which read the target's pool; its output matrix scores all tokens, or ``clusters``.
    """

    decoder: OwnDecoder
    embedding: Table
    pre_projection: PackedLinear
    post_projection: PackedLinear
    clusters: Clusters | None

    @property
    def num_bytes(self) -> int:
        """Size of the assistant's matrices in bytes."""
        weights = self.decoder.weights
        linears = [self.pre_projection, self.post_projection, weights.lm_head]
        linears += [each for layer in weights.layers for each in layer.linears]
        table = 0 if self.clusters is None else self.clusters.table.nbytes
        return table + sum(each.weight.nbytes for each in linears)

    def forward(
        self,
        batch: RaggedBatch,
        pool: KVPool,
        hidden: Tensor,
        draws: SamplingPlan | None = None,
    ) -> ForwardOutput:
        """Compute the tokens of a batch, reading the KV in the target's ``pool``.

        ``hidden`` [num_rows, target's hidden]: for each token, the hidden state of the position
        before it. The output's ``hidden`` has the states to pass along with the next tokens.
        """
        ops = self.decoder.ops
        token_ids = batch.token_ids.to(self.decoder.device)
        embedded = ops.embedding(token_ids, self.embedding)
        inputs = ops.linear(torch.cat((embedded, hidden), dim=-1), self.pre_projection)
        given = replace(batch, token_ids=torch.full_like(batch.token_ids, -1))
        draws = draws if self.clusters is None else None
        found = self.decoder.forward(given, pool, Wanted(draws, inputs=inputs))
        logits = found.logits
        if self.clusters is not None:
            logits = self.clusters.logits(logits, found.hidden[: batch.num_logits])
        return found._replace(hidden=ops.linear(found.hidden, self.post_projection), logits=logits)


def load_assistant(
    path: Path, target: OwnDecoder, *, keeps_packed: bool, on_read: OnRead | None = None
) -> Assistant:
    """Read the assistant in a folder. ``on_read`` is called with every tensor of weights.

    ``keeps_packed``: quantised weights stay as they are stored. Raises `ModelLoadError` if tensors
    are missing, or if the assistant does not fit the target.
    """
    config = read_assistant(path, target.config)
    checkpoint = SafetensorsCheckpoint(path)
    stored = set(checkpoint.shapes)
    output = next((name for name in _OUTPUTS if name in stored), EMBEDDING)
    ends = AssistantEnds(config.decoder, target.config.hidden_size, output, config.num_clusters)
    layers = tensor_shapes(config.decoder).items()
    expected = {name: shape for name, shape in layers if name not in _OUTPUTS} | ends.shapes
    unread = {*_OUTPUTS, *ignored(config.decoder, stored)} - {output}
    check_tensors(checkpoint, expected, ignored=unread)
    read = checkpoint.read if on_read is None else observed(checkpoint.read, on_read)
    ops, layout = target.ops, PageLayout.beside(config.decoder, PageLayout.of(target.config))
    for part in layout.parts:
        if problem := ops.unsuited(part.heads):
            raise ModelLoadError(f"{path}: the target's kernels do not support {problem}")
    assembly = Assembly(
        config.decoder, read, ops, target.dtype, target.device,
        keeps_packed=keeps_packed, layout=layout,
    )  # fmt: skip
    found = assembly.assistant(ends)
    clusters = None
    if found.table is not None:
        ids = _ordering(checkpoint, config).to(target.device)
        clusters = Clusters(ids, found.table, config.num_scored)
    return Assistant(
        OwnDecoder(config.decoder, found.decoder, ops, layout),
        target.weights.embedding,
        found.pre_projection,
        found.post_projection,
        clusters,
    )


def _ordering(checkpoint: SafetensorsCheckpoint, config: AssistantConfig) -> Tensor:
    """Return the token ids of each cluster, ``[num_clusters, size]``."""
    vocab_size = config.decoder.vocab_size
    ids = checkpoint.files.read_integers(TOKEN_ORDERING)
    if sorted(ids.flatten().tolist()) != list(range(vocab_size)):
        problem = f"{TOKEN_ORDERING} must have each of the {vocab_size} token ids once"
        raise ModelLoadError(f"{checkpoint.where}: {problem}")
    return ids.view(config.num_clusters, -1)
