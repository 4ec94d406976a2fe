"""LoRA adapters: from a PEFT folder to updates of a decoder's packed linears.

Source: LoRA (arXiv 2106.09685), rsLoRA (arXiv 2312.03732); the file format is described at
https://huggingface.co/docs/peft. The rows of B are reordered and scaled like the rows of the
weight.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import ModelLoadError, is_out_of_memory, shown
from ...interface.extras.adapter import LoadedAdapter
from ...ops.lora import LoraBlock, LoraUpdate, LoraWeights, PackedLora
from ..decoder import Decoder, OwnDecoder
from ..description.fields import Fields, read_json
from ..description.tensors import LinearSpec
from ..formats.nested import base_names, family_names, text_names
from .files import CONFIG_FILE, WEIGHTS_FILE

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Fields that require more than a low-rank update of linears, and their meanings.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "fully trained modules",
    "lora_bias": "biases of the B matrices",
    "layer_replication": "layers that are computed twice",
    "alora_invocation_tokens": "adapters that are activated within a prompt (aLoRA)",
    "trainable_token_indices": "trained embeddings of single tokens",
    "target_parameters": "updates of single parameters, such as those of experts",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "mixtures of adapters",
}
# These beginnings of `init_lora_weights` mean that training also changed the base's weights.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Keys of rank_pattern and alpha_pattern are regular expressions by the adapter's author, and a
# search may take exponential time. So keys must be names, with escapes and at most a few choices.
MAX_KEYS, MAX_KEY_CHARS = 2048, 256
# Limits on the number of keys with groups, and on the groups and the repeats in each key.
MAX_CHOOSING, MAX_GROUPS, MAX_REPEATS = 64, 2, 1
_ITEM = r"(?:[\w.-]|\\[.\-_dw]|\[\w(?:-?\w)*\])[*+]?"
_GROUP = rf"\((?:\?:)?(?:{_ITEM}|\|)*\)"
_KEY = re.compile(rf"\^?(?:{_ITEM}|{_GROUP}|\|)+\$?")
_CHOICES = frozenset("|*+")
MAX_NUMBER = 1e9  # largest alpha
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")


def load_lora(folder: Path, decoder: Decoder, *, max_rank: int) -> LoadedAdapter:
    """Load an adapter for a decoder.

    Raises `ModelLoadError`, naming the field or the tensor, for files that are missing or damaged,
    that require more than low-rank updates of linears, or that do not fit this model; and if memory
    is short.
    """
    try:
        return _load(folder, decoder, max_rank)
    except (MemoryError, RuntimeError) as failure:
        if isinstance(failure, ModelLoadError) or not is_out_of_memory(failure):
            raise
        raise ModelLoadError(f"not enough memory for the adapter in {folder}") from failure


def _load(folder: Path, decoder: Decoder, max_rank: int) -> LoadedAdapter:
    if not isinstance(decoder, OwnDecoder):
        raise ModelLoadError(
            f"LoRA adapters need foretoken's own decoder, but {decoder.config.model_type} is "
            "computed by transformers' modules"
        )
    settings = LoraSettings(folder)
    tensors = LoraTensors(folder, decoder)
    found = {}
    linears = {packed: spec for packed, spec in decoder.linear_specs.items() if spec.adapts}
    tensors.check_targets(matrix.name for spec in linears.values() for matrix in spec.matrices)
    for packed, spec in linears.items():
        update = _update(spec, tensors, settings, max_rank, decoder.dtype)
        if update is not None:
            found[packed] = update
    packed_parts: dict[object, PackedLora] = {
        packed: decoder.ops.pack_lora(_on(update, decoder.device), decoder.dtype)
        for packed, update in found.items()
    }
    rank = max(block.b.shape[1] for update in found.values() for block in update.blocks)
    digest = hashlib.sha256(settings.content + tensors.digest()).digest()
    weights = LoraWeights(packed_parts)
    return LoadedAdapter(weights, rank, weights.num_bytes, digest)


class LoraSettings:
    """The adapter_config.json of a folder. Raises `ModelLoadError` for unsupported settings."""

    def __init__(self, folder: Path) -> None:
        path = folder / CONFIG_FILE
        if not path.is_file():  # Opening a pipe would wait for a writer.
            raise ModelLoadError(f"{folder} has no {CONFIG_FILE}")
        values = read_json(path)
        self.content = path.read_bytes()
        self._fields = fields = Fields(values, str(path))
        if values.get("peft_type", "LORA") != "LORA":
            raise fields.error("peft_type", f"must be LORA, not {shown(values['peft_type'])}")
        for name, what in _REFUSED.items():
            if values.get(name):
                raise fields.error(name, f"means {what}, which is not supported")
        if values.get("bias", "none") != "none":
            raise fields.error("bias", "must be none: adapters cannot change biases")
        started = values.get("init_lora_weights")
        if isinstance(started, str) and started.lower().startswith(_CHANGED_BASES):
            raise fields.error(
                "init_lora_weights",
                f"is {started}, which also changes the weights of the base model: convert the "
                "adapter to plain LoRA",
            )
        if not _is_number(values.get("lora_alpha")):
            raise fields.error("lora_alpha", "must be a number above 0 and at most 1e9")
        self._rank, self._alpha = fields.positive("r"), fields.above_zero("lora_alpha")
        self._ranks = self._pattern("rank_pattern")
        self._alphas = self._pattern("alpha_pattern")
        self._is_stabilised = bool(values.get("use_rslora"))

    def rank(self, module: str) -> int:
        """Return the rank of the LoRA matrices of a module."""
        return int(_of_module(self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        """Return the factor on a module's matrix B: alpha / rank, or alpha / sqrt(rank)."""
        rank = self.rank(module)
        alpha = float(_of_module(self._alphas, module, self._alpha))
        return alpha / (math.sqrt(rank) if self._is_stabilised else rank)

    def _pattern(self, name: str) -> Mapping[re.Pattern[str], float]:
        found = self._fields.values.get(name) or {}
        if not isinstance(found, dict) or not all(map(_is_number, found.values())):
            problem = "must map names to numbers above 0 and at most 1e9"
            raise self._fields.error(name, problem)
        is_short = len(found) <= MAX_KEYS and all(len(key) <= MAX_KEY_CHARS for key in found)
        if not is_short or sum(not _CHOICES.isdisjoint(key) for key in found) > MAX_CHOOSING:
            raise self._fields.error(
                name,
                f"must have at most {MAX_KEYS} keys of at most {MAX_KEY_CHARS} characters, and at "
                f"most {MAX_CHOOSING} keys with groups or repeats",
            )
        return {self._compiled(name, key): value for key, value in found.items()}

    def _compiled(self, name: str, key: str) -> re.Pattern[str]:
        num_repeats = key.count("*") + key.count("+")
        if _KEY.fullmatch(key) and key.count("(") <= MAX_GROUPS and num_repeats <= MAX_REPEATS:
            with suppress(re.error):
                return re.compile(rf"(.*\.)?({key})")
        raise self._fields.error(
            name,
            f"has {shown(key)}, but a key must be a module name with escapes, at most "
            f"{MAX_GROUPS} groups (a|b) and {MAX_REPEATS} repeated character",
        )


def _is_number(value: object) -> bool:
    """Whether a value can be an alpha or a rank; False for NaN."""
    return isinstance(value, int | float) and value is not True and 0 < value <= MAX_NUMBER


def _of_module(pattern: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    """Return the value of the first key that matches the end of a module's name, as in PEFT."""
    keys = (key for key in pattern if key.fullmatch(module))
    return next((pattern[key] for key in keys), default)


class LoraTensors:
    """The LoRA matrices A and B in a folder, by the decoder's module names."""

    def __init__(self, folder: Path, decoder: OwnDecoder) -> None:
        self.where = folder / WEIGHTS_FILE
        if not self.where.is_file():
            raise _no_weights(folder)
        try:
            with safe_open(self.where, framework="pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{self.where} cannot be read: {error}") from error
        pairs: dict[str, dict[str, Tensor]] = {}
        for name, tensor in sorted(stored.items()):
            module, side = self._split(name)
            pairs.setdefault(module, {})[side] = self._checked(name, tensor)
        names = _model_names(pairs, decoder)
        absent = sorted(set(pairs) - set(names.values()))
        if absent:
            raise ModelLoadError(f"{self.where}: the text model has no module {absent[0]}")
        self._pairs = {name: pairs[module] for name, module in names.items()}
        self._stored = names
        if not pairs:
            raise ModelLoadError(f"{self.where} has no tensors")
        self._content = stored

    def check_targets(self, known: Iterator[str]) -> None:
        """Raise `ModelLoadError` for a module outside ``known``."""
        others = sorted(set(self._pairs) - set(known))
        if others:
            raise ModelLoadError(
                f"{self.where}: target {self._stored[others[0]]} is not supported: adapters may "
                "only change the matrices of attention and of MLPs without experts"
            )

    def pair(self, name: str) -> tuple[str, Tensor, Tensor] | None:
        """Return a module's stored name, its A and its B; None if the adapter does not change it.

        Raises `ModelLoadError` if one of the two is missing.
        """
        pair = self._pairs.get(name)
        if pair is None:
            return None
        stored = self._stored[name]
        for side in "AB":
            if side not in pair:
                raise ModelLoadError(f"{self.where}: {stored} lacks lora_{side}")
        return stored, pair["A"], pair["B"]

    def digest(self) -> bytes:
        """Return a digest of the names and the content of all tensors."""
        made = hashlib.sha256()
        for name, tensor in sorted(self._content.items()):
            made.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            made.update(tensor.contiguous().view(torch.uint8).numpy())
        return made.digest()

    def _split(self, name: str) -> tuple[str, str]:
        found = _TENSOR.fullmatch(name)
        if found is None:
            what = "a DoRA magnitude" if "lora_magnitude" in name else "not an A or B matrix"
            what = "an update of an embedding" if "lora_embedding" in name else what
            raise ModelLoadError(f"{self.where}: {name} is {what}, which is not supported")
        return found[1], found[2]

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _DTYPES or tensor.dim() != 2:
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise ModelLoadError(f"{self.where}: {name} is {kind}, but must be a matrix of floats")
        if not tensor.isfinite().all():
            raise ModelLoadError(f"{self.where}: {name} has values that are NaN or infinite")
        return tensor


def _no_weights(folder: Path) -> ModelLoadError:
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    if pickles:
        return ModelLoadError(
            f"{folder} has {pickles[0].name}, a pickle file, which could run any code; only "
            f"{WEIGHTS_FILE} is loaded"
        )
    return ModelLoadError(f"{folder} has no {WEIGHTS_FILE}")


def _model_names(modules: Collection[str], decoder: OwnDecoder) -> dict[str, str]:
    """Map the name of each module in the files to the decoder's name.

    Names saved from a transformers class without an output matrix lack the prefix of other names.
    """
    config = decoder.config
    endings = {f"{'model.' * module.startswith('layers.')}{module}.": module for module in modules}
    base = text_names if any(map(_is_nested, endings)) else base_names
    pairs = config.stored_names
    found = family_names(pairs, base, endings) if pairs else base(endings)
    return {name.removesuffix("."): endings[stored] for name, stored in found.items()}


def _is_nested(name: str) -> bool:
    return not name.startswith("model.layers.")


def _update(
    spec: LinearSpec,
    tensors: LoraTensors,
    settings: LoraSettings,
    max_rank: int,
    dtype: torch.dtype,
) -> LoraUpdate | None:
    """Return the update of a packed linear; None if none of its matrices is changed."""
    starts = list(accumulate((matrix.rows for matrix in spec.matrices), initial=0))
    order = torch.arange(starts[-1]) if spec.order is None else spec.order
    all_a, blocks, num_ranks = [], [], 0
    for (name, count, factor), start in zip(spec.matrices, starts, strict=False):
        pair = tensors.pair(name)
        if pair is None:
            continue
        module, a, b = pair
        rank = settings.rank(module)
        if rank > max_rank:
            raise ModelLoadError(
                f"{tensors.where}: {module} has rank {rank}, above --max-lora-rank {max_rank}"
            )
        expected = ((rank, spec.in_features), (count, rank))
        if (a.shape, b.shape) != expected:
            raise ModelLoadError(
                f"{tensors.where}: {module} has A {list(a.shape)} and B {list(b.shape)}, but with "
                f"rank {rank} this model needs {list(expected[0])} and {list(expected[1])}"
            )
        scaled = b.float() * (settings.scale(module) * factor)
        if not all(each.to(dtype).isfinite().all() for each in (a, scaled)):
            raise ModelLoadError(
                f"{tensors.where}: {module} has values that are too large, once scaled, for "
                f"{str(dtype).removeprefix('torch.')}"
            )
        blocks += [
            LoraBlock(first, num_ranks, scaled[order[first:stop] - start])
            for first, stop in _runs((order >= start) & (order < start + count))
        ]
        all_a.append(a.float())
        num_ranks += rank
    if not all_a:
        return None
    return LoraUpdate(torch.cat(all_a), tuple(blocks), len(order))


def _runs(of_part: Tensor) -> list[tuple[int, int]]:
    """Return the start and stop of each run of true values in ``of_part`` [outputs]."""
    edges = torch.diff(of_part.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()
    places = edges.flatten().tolist()
    return list(zip(places[::2], places[1::2], strict=True))


def _on(update: LoraUpdate, device: torch.device) -> LoraUpdate:
    blocks = tuple(block._replace(b=block.b.to(device)) for block in update.blocks)
    return update._replace(a=update.a.to(device), blocks=blocks)
