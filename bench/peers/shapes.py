"""The checkpoints that all engines read: real shapes, random weights, a pair that agrees.

``eps`` sets how often draft and target agree (see `bench.pairs`). With that of ``450m`` 0.7 of four
draft tokens are accepted; the output of these weights does not collapse to one repeated token.
"""

from __future__ import annotations

import argparse
import inspect
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from ...api.models import BUILTIN
from ..pairs import qwen3_06b, write_pair

HOME = Path(os.environ.get("FORETOKEN_PEERS", ".venv-peers")).resolve()
"""Where environments and checkpoints are made: in the working folder, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to make. ``vocab_size`` is what random prompts are drawn from."""

    name: str
    vocab_size: int
    num_layers: int = 28
    width: int = 1024
    eps: float = 0.03

    def text(self) -> list[int]:
        """What prompts are cut from; nothing where they are random."""
        return []

    @property
    def folder(self) -> Path:
        """Holds ``target`` and ``draft``, and what the engines' converters made of them."""
        return HOME / "checkpoints" / self.name

    def config(self) -> Qwen3Config:
        """Qwen3-0.6B's, cut down where the shape says so."""
        config = qwen3_06b()
        config.vocab_size = self.vocab_size
        config.num_hidden_layers = self.num_layers
        config.layer_types = ["full_attention"] * self.num_layers
        if self.width != config.hidden_size:
            config.hidden_size, config.intermediate_size = self.width, 3 * self.width
            config.num_attention_heads, config.num_key_value_heads = 4, 2
        return config

    def write(self) -> Path:
        """Make the pair, unless it is there; its folder."""
        write_pair(self.folder, self.config(), torch.bfloat16, eps=self.eps)
        for part in ("target", "draft"):
            _tokenizer().save_pretrained(self.folder / part)
        return self.folder


class Builtin(Shape):
    """The pair that comes with the package. Prompts are cut from the standard library's code."""

    def text(self) -> list[int]:
        """Token ids of a module."""
        tokenizer = Tokenizer.from_file(str(BUILTIN / "target" / "tokenizer.json"))
        ids: list[int] = tokenizer.encode(inspect.getsource(argparse)).ids
        return ids

    @property
    def folder(self) -> Path:
        """In the package: nothing is made."""
        return BUILTIN

    def write(self) -> Path:
        """Nothing to do."""
        return BUILTIN


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("0.6b", 151936),
        Shape("450m", 8192, eps=0.013),
        Shape("tiny", 2048, num_layers=4, width=256),
        Builtin("builtin", 4096, num_layers=6, width=256),
    )
}
"""``450m`` has a small vocabulary, so that its draft of one layer costs a twentieth."""


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and an end: some engines do not start without a tokenizer. Nobody uses it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<end>"
    )
