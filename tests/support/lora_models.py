"""A tiny model with a tokenizer, adapters beside it, and what transformers says with each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support.adapters import merged, write_adapter
from support.checkpoints import save
from support.embedders import tiny_model, write_tokenizer

RANKS = {"sql": 4, "legal": 8, "poems": 2}


class AdaptedModel:
    """A base in ``folder``/base, and the adapters of `RANKS` in folders of their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = folder / "base"
        self.tokenizer = write_tokenizer(self.base, adds_end=False)
        self.model = tiny_model(len(self.tokenizer))
        save(self.model, self.base)
        self._merged: dict[tuple[str | None, int], Any] = {(None, 0): self.model}
        for name in RANKS:
            self.write(name)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def write(self, name: str, folder: str | None = None, *, version: int = 0) -> str:
        """Write an adapter; another version has other numbers. Returns its folder."""
        path = self.folder / (folder or name)
        write_adapter(path, self.model, rank=RANKS[name], seed=self._seed(name, version))
        return str(path)

    def answer(
        self, name: str | None, ids: Sequence[int], num_new: int, *, version: int = 0
    ) -> list[int]:
        """The greedy tokens of the model with an adapter in its weights."""
        key = (name, version)
        if key not in self._merged and name is not None:
            seed = self._seed(name, version)
            self._merged[key] = merged(self.model, rank=RANKS[name], seed=seed)
        prompt = torch.tensor([list(ids)])
        out = self._merged[key].generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=num_new,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(ids) :].tolist()

    @staticmethod
    def _seed(name: str, version: int) -> int:
        return [*RANKS].index(name) + 1 + 10 * version
