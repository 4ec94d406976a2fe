"""The checkpoints that all engines read: real shapes, random weights, a pair that agrees.

``eps`` sets how often draft and target agree (see bench/common/shapes.py). With that of ``450m``
0.7 of four draft tokens are accepted; the output of these weights does not collapse to one
repeated token.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Idefics3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ....api.build.model_files import BUILTIN, checked_smollm2
from ....api.text.gguf_tokenizer import load_gguf_tokenizer
from ...common.real_tasks import prompts
from ...common.shapes import (
    glm_flash_1b,
    granite4h_1b,
    lfm2_1b,
    llama32_1b,
    qwen3_06b,
    qwen3_moe_1b,
    qwen25_05b,
    qwen35_08b,
    qwen35_moe_1b,
    write_pair,
)
from .adapters import write_adapters
from .pictures import smolvlm_256m, write_smolvlm

HOME = Path(os.environ.get("FORETOKEN_PEERS", ".venv-peers")).resolve()
"""Folder of environments and checkpoints; by default in the working folder."""


class Experts(NamedTuple):
    """The experts of a mixture, over all layers."""

    num_experts: int
    top_k: int  # of them, for each row
    params: int  # of all of them

    def params_of(self, rows: int) -> float:
        """Parameters that a step reads whose rows choose at random, each for itself.

        ``num_experts * (1 - (1 - top_k / num_experts) ** rows)`` of them are expected to differ.
        """
        return self.params * (1 - (1 - self.top_k / self.num_experts) ** rows)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to make, with random weights. ``config`` makes its config."""

    name: str
    config: Callable[[], PretrainedConfig]
    eps: float = 0.03

    @property
    def vocab_size(self) -> int:
        """Tokens that random prompts are drawn from."""
        return int(self.config().vocab_size)

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return int(self.config().hidden_size)

    @property
    def experts(self) -> Experts | None:
        """Experts of a mixture that has them in all layers; None: there are none."""
        config = self.config()
        count = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
        if not count:
            return None
        kinds = getattr(config, "mlp_layer_types", None) or ["sparse"] * config.num_hidden_layers
        params = 3 * count * kinds.count("sparse") * config.moe_intermediate_size * self.width
        return Experts(count, config.num_experts_per_tok, params)

    def text(self) -> list[int]:
        """Token ids that prompts are cut from; empty where prompts are random."""
        return []

    def tasks(self, kind: str) -> list[list[int]]:
        """Prompts of a kind of task, as token ids; none where the weights are random."""
        raise ValueError(f"{self.name} reads no {kind}")

    @property
    def folder(self) -> Path:
        """Holds ``target`` and ``draft``, and what the engines' converters made of them."""
        return HOME / "checkpoints" / self.name

    def write(self) -> Path:
        """Make the pair, unless it is there; its folder."""
        write_pair(self.folder, self.config(), torch.bfloat16, eps=self.eps)
        for part in ("target", "draft"):
            _tokenizer().save_pretrained(self.folder / part)
        return self.folder


class Alone(Shape):
    """A model without a draft that agrees: of a kind whose layers are of several kinds."""

    def write(self) -> Path:
        """Make ``target``, unless it is there."""
        target = self.folder / "target"
        if not (target / "config.json").is_file():
            torch.manual_seed(0)
            build: Any = AutoModelForCausalLM
            model = build.from_config(self.config(), dtype=torch.bfloat16)
            _tokenizer().save_pretrained(target)
            model.save_pretrained(target)
        return self.folder


class Adapted(Shape):
    """A model with adapters beside it, in the folder of the model without."""

    @property
    def folder(self) -> Path:
        """Folder of the shape whose name stands before the dash."""
        return HOME / "checkpoints" / self.name.removesuffix("-lora")

    def write(self) -> Path:
        """Make the pair and the adapters, unless they are there."""
        folder = Shape.write(self)
        write_adapters(folder, self.config())
        return folder


class Seeing(Shape):
    """A model with an image tower. No draft, and text tokens below those that images have."""

    @property
    def vocab_size(self) -> int:
        """Tokens that random prompts are drawn from."""
        return int(self.config().image_token_id) - 64

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return int(self.config().get_text_config().hidden_size)

    @property
    def experts(self) -> None:
        """None of it is a mixture."""

    def write(self) -> Path:
        """Make ``target``, unless it is there."""
        target, config = self.folder / "target", self.config()
        if isinstance(config, Idefics3Config):
            write_smolvlm(target, config)
        _tokenizer().save_pretrained(target)
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
        """Folder in the package: nothing is made."""
        return BUILTIN

    def write(self) -> Path:
        """Return the folder: nothing is written."""
        return BUILTIN


class SmolLM2(Shape):
    """SmolLM2-135M-Instruct, its 4-bit weights widened to bfloat16 for every engine alike."""

    def tasks(self, kind: str) -> list[list[int]]:
        """The half of the prompts that nothing is tuned on, by the model's chat template."""
        tokenizer = load_gguf_tokenizer(checked_smollm2())
        return [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in prompts(kind, "show")
        ]

    def write(self) -> Path:
        """Write ``target`` and the file that llama.cpp widens itself, unless they are there."""
        file, target = checked_smollm2(), self.folder / "target"
        if not (target / "config.json").is_file():
            build: Any = AutoModelForCausalLM
            model = build.from_config(_smollm2(), dtype=torch.bfloat16)
            load: Any = load_gguf_checkpoint
            read = load(str(file), return_tensors=True, model_to_load=model)
            model.load_state_dict(read["tensors"], strict=False)
            model.tie_weights()
            load_gguf_tokenizer(file).save_pretrained(target)
            model.save_pretrained(target)
            shutil.copy(file, self.folder / "source.gguf")
        return self.folder


def _smollm2() -> PretrainedConfig:
    file = checked_smollm2()
    config: PretrainedConfig = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    return config


def _small(vocab_size: int, *, num_layers: int = 28, width: int = 1024) -> PretrainedConfig:
    """Qwen3-0.6B's shape, cut down."""
    config = qwen3_06b()
    config.vocab_size = vocab_size
    config.num_hidden_layers = num_layers
    config.layer_types = ["full_attention"] * num_layers
    if width != config.hidden_size:
        config.hidden_size, config.intermediate_size = width, 3 * width
        config.num_attention_heads, config.num_key_value_heads = 4, 2
    return config


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        SmolLM2("smollm2", _smollm2),
        Shape("qwen2.5-0.5b", qwen25_05b),
        Shape("llama-3.2-1b", llama32_1b),
        Shape("0.6b", qwen3_06b),
        Adapted("0.6b-lora", qwen3_06b),
        Seeing("smolvlm", smolvlm_256m),
        Shape("moe-1b", qwen3_moe_1b),
        Alone("qwen35-0.8b", qwen35_08b),
        Alone("qwen35-moe-1b", qwen35_moe_1b),
        Alone("lfm2-1b", lfm2_1b),
        Alone("granite4h-1b", granite4h_1b),
        Alone("mla-1b", glm_flash_1b),
        Shape("450m", partial(_small, 8192), eps=0.013),
        Shape("tiny", partial(_small, 2048, num_layers=4, width=256)),
        Adapted("tiny-lora", partial(_small, 2048, num_layers=4, width=256)),
        Seeing("tiny-smolvlm", partial(smolvlm_256m, num_hidden_layers=2)),
        Builtin("builtin", partial(AutoConfig.from_pretrained, str(BUILTIN / "target"))),
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
