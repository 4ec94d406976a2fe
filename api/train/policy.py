"""LoraPolicy: a checkpoint with low-rank adapters that torch trains, and its merged weights."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typing_extensions import override

from .rollouts import Tokens

FILE = "model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A frozen linear plus a low-rank update, which is 0 at first.

    LoRA: Low-Rank Adaptation of Large Language Models (Hu et al., 2021).
    """

    def __init__(
        self, base: nn.Linear, rank: int, scale: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        bound = 1 / math.sqrt(base.in_features)
        uniform = torch.rand(rank, base.in_features, generator=generator)
        self.a = nn.Parameter((2 * uniform - 1) * bound)  # [rank, in_features]
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        added: Tensor = nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        base: Tensor = self.base(x)
        return base + added * self.scale

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return what the adapter adds to the weight: [out_features, in_features]."""
        return (self.b @ self.a) * self.scale


class LoraPolicy:
    """transformers' model of a folder in float32, with an adapter on each linear of its layers.

    ``folder`` has its weights in one safetensors file. The same seed makes the same adapters.
    Raises ValueError for a folder whose linears have other names.
    """

    def __init__(self, folder: Path, *, rank: int = 16, alpha: float = 32.0, seed: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        self._folder = folder
        self._base = load_file(folder / FILE)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.requires_grad_(False).train(mode=False)
        generator = torch.Generator().manual_seed(seed)
        self._adapters: dict[str, LoraLinear] = {}  # by the name of the weight that they change
        for name, module in [*self.model.named_modules()]:
            parent, _, kind = name.rpartition(".")
            if kind in TARGETS and isinstance(module, nn.Linear):
                adapter = LoraLinear(module, rank, alpha / rank, generator)
                setattr(self.model.get_submodule(parent), kind, adapter)
                self._adapters[f"{name}.weight"] = adapter
        if not self._adapters or not self._adapters.keys() <= self._base.keys():
            raise ValueError(f"{folder} has no linears named {', '.join(TARGETS)}")

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the trained tensors, in a fixed order."""
        for adapter in self._adapters.values():
            yield adapter.a
            yield adapter.b

    def logprobs(self, given: Sequence[Tokens]) -> list[Tensor]:
        """Return torch's log-probabilities of the answers' tokens: [len(answer)] per entry."""
        lens = [len(each.prompt) + len(each.answer) for each in given]
        ids = torch.zeros(len(given), max(lens) - 1, dtype=torch.long)
        for row, each in zip(ids, given, strict=True):
            tokens = torch.tensor([*each.prompt, *each.answer][:-1])
            row[: len(tokens)] = tokens
        # Rows of padding follow those that are read, and attention is causal: no mask is needed.
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        read = [
            hidden[number, len(each.prompt) - 1 : size - 1]
            for number, (each, size) in enumerate(zip(given, lens, strict=True))
        ]
        answers = torch.tensor([token for each in given for token in each.answer])
        chosen = torch.log_softmax(self.model.lm_head(torch.cat(read)), dim=-1)
        found = chosen.gather(1, answers[:, None]).squeeze(1)
        return [*torch.split(found, [len(each.answer) for each in given])]

    def write(self, out: Path) -> str:
        """Write the folder with the adapters merged into its weights; return the file's SHA-256.

        Tensors keep their names, shapes and dtypes, as `AsyncLLM.update_weights` requires.
        """
        out.mkdir(parents=True, exist_ok=True)
        for each in self._folder.iterdir():
            if each.suffix != ".safetensors" and each.is_file():
                shutil.copyfile(each, out / each.name)
        tensors = {name: self._merged(name, weight) for name, weight in self._base.items()}
        # An engine may have mapped the former file, which must keep its bytes: replace the name.
        part = out / f"{FILE}.part"
        save_file(tensors, part, {"format": "pt"})
        part.replace(out / FILE)
        with (out / FILE).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        adapter = self._adapters.get(name)
        if adapter is None:
            return weight
        return (weight.float() + adapter.delta()).to(weight.dtype)
