"""The checkpoints that all engines load: SmolLM2, and real shapes with random weights."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ....api.build.model_files import checked_smollm2
from ....api.text.gguf_tokenizer import load_gguf_tokenizer
from ...common.shapes import PRESETS, shape, write_pair
from ..servers import words

HOME = Path(os.environ.get("FORETOKEN_PEERS", ".venv-peers")).resolve()
"""Folder of environments and checkpoints, by default in the working directory."""
NUM_BYTES = 256  # Number of byte tokens, which are the first ids of a made-up vocabulary.


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A preset of shapes.toml with random weights and, if ``eps`` is given, a draft.

    ``eps`` sets how often the draft agrees (see bench/common/shapes.py). With the ``eps`` of
    ``qwen3-450m``, 0.7 of four draft tokens are accepted on average, and answers do not collapse to
    one repeated token.
    """

    name: str
    eps: float | None = None
    has_text = False

    @property
    def has_draft(self) -> bool:
        """Whether the checkpoint has a draft model."""
        return self.eps is not None

    @property
    def folder(self) -> Path:
        """Folder of ``target``, ``draft`` and the files that the engines' converters write."""
        return HOME / "checkpoints" / self.name

    @property
    def target(self) -> Path:
        """Folder of the model, as transformers saves it."""
        return self.folder / "target"

    @property
    def draft(self) -> Path:
        """Folder of the draft model, as transformers saves it."""
        return self.folder / "draft"

    def prompt(self, num_tokens: int, seed: int) -> str | list[int]:
        """Return random token ids; the vocabulary cannot encode text."""
        ids = range(NUM_BYTES, shape(self.name).vocab_size)
        return random.Random(seed).choices(ids, k=num_tokens)

    def write(self) -> None:
        """Make the model or the pair, unless it exists."""
        if (self.target / "tokenizer.json").is_file():
            return
        config = shape(self.name)
        if self.eps is not None:
            write_pair(self.folder, config, torch.bfloat16, eps=self.eps)
        else:
            torch.manual_seed(0)
            build: Any = AutoModelForCausalLM
            build.from_config(config, dtype=torch.bfloat16).save_pretrained(self.target)
        for folder in (self.draft, self.target) if self.has_draft else (self.target,):
            numbered_tokenizer(config.vocab_size).save_pretrained(folder)


class SmolLM2(Checkpoint):
    """SmolLM2-135M-Instruct, with its 4-bit weights widened to bfloat16 for every engine."""

    has_text = True

    def prompt(self, num_tokens: int, seed: int) -> str:
        """Return random words."""
        return words(num_tokens, seed)

    def write(self) -> None:
        """Write ``target``, and a copy of the GGUF file for llama.cpp, unless they exist."""
        file = checked_smollm2()
        widen(file, self.target)
        if not (copy := self.folder / "source.gguf").is_file():
            shutil.copy(file, copy)


def widen(file: Path, folder: Path) -> None:
    """Write a GGUF file's weights in bfloat16 and its tokenizer, unless the folder has them."""
    if (folder / "config.json").is_file():
        return
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    build: Any = AutoModelForCausalLM
    model = build.from_config(config, dtype=torch.bfloat16)
    load: Any = load_gguf_checkpoint
    read = load(str(file), return_tensors=True, model_to_load=model)
    model.load_state_dict(read["tensors"], strict=False)
    model.tie_weights()
    load_gguf_tokenizer(file).save_pretrained(folder)
    model.save_pretrained(folder)


# Names of pairs and their eps.
PAIRS = {"qwen3-0.6b": 0.03, "qwen3-450m": 0.013, "qwen3-tiny": 0.03}
CHECKPOINTS = {"smollm2": SmolLM2("smollm2")} | {
    name: Checkpoint(name, PAIRS.get(name)) for name in PRESETS
}


def numbered_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and ids in brackets, so that every answer has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    vocab |= {f"[{index}]": index for index in range(NUM_BYTES, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
