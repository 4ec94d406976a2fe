"""Sampling values for GGUF files without any: the values published for the model's family.

A family is identified by the model's architecture and, where necessary, by a string in the chat
template or in the model's name. Files without a chat template are base models and get no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..types.sampling_params import NO_DEFAULTS, SamplingDefaults

Values = Mapping[str, Any]  # sampling values by field of `SamplingDefaults`

_NAMES = ("general.name", "general.basename", "general.base_model.0.name")
_TEMPLATE = "tokenizer.chat_template"
_ARCHITECTURE = "general.architecture"


class _Family(NamedTuple):
    """A model family. An empty ``architectures``, ``mark`` or ``word`` matches every file."""

    name: str
    values: Values
    architectures: tuple[str, ...] = ()
    mark: str = ""  # substring of the chat template
    word: str = ""  # substring of the model's name in lower case

    def fits(self, architecture: str, template: str, names: str) -> bool:
        """Whether a file belongs to this family."""
        return (
            (not self.architectures or architecture in self.architectures)
            and self.mark in template
            and self.word in names
        )


_QWEN2, _QWEN3 = ("qwen2", "qwen2moe", "qwen2vl"), ("qwen3", "qwen3moe", "qwen3next", "qwen3vl")
_CALM: Values = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
_FAMILIES = (  # the first match applies
    # DeepSeek-R1 and its distillations: "Usage Recommendations" of the model card.
    _Family("DeepSeek", {"temperature": 0.6, "top_p": 0.95}, mark="<\uff5cAssistant\uff5c>"),
    # generation_config.json of QwQ-32B.
    _Family("QwQ", {"temperature": 0.6, "top_p": 0.95, "top_k": 40}, _QWEN2, word="qwq"),
    # generation_config.json of Qwen2.5-7B-Instruct and Qwen2.5-Coder-7B-Instruct.
    _Family("Qwen2.5", {**_CALM, "repetition_penalty": 1.05}, _QWEN2),
    # generation_config.json of Qwen3-Coder-30B-A3B-Instruct.
    _Family("Qwen3-Coder", {**_CALM, "repetition_penalty": 1.05}, _QWEN3, mark="<function="),
    # generation_config.json of Qwen3-8B and Qwen3-4B-Thinking-2507.
    _Family("Qwen3", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, _QWEN3, mark="<think>"),
    # generation_config.json of Qwen3-4B-Instruct-2507.
    _Family("Qwen3-Instruct", _CALM, _QWEN3),
    # Model cards of SmolLM2-1.7B-Instruct and SmolLM3-3B.
    _Family("SmolLM", {"temperature": 0.2, "top_p": 0.9}, ("llama",), word="smollm"),
    _Family("SmolLM3", {"temperature": 0.6, "top_p": 0.95}, ("smollm3",)),
    # generation_config.json of Llama-3.2-3B-Instruct, Llama-4-Scout and Llama-2-7b-chat.
    _Family("Llama 3", {"temperature": 0.6, "top_p": 0.9}, mark="<|start_header_id|>"),
    _Family("Llama 4", {"temperature": 0.6, "top_p": 0.9}, ("llama4",)),
    _Family("Llama 2", {"temperature": 0.6, "top_p": 0.9}, ("llama",), mark="<<SYS>>"),
    # generation_config.json of gemma-3-4b-it and gemma-3n-E4B-it.
    _Family("Gemma", {"temperature": 1.0, "top_p": 0.95, "top_k": 64}, mark="<start_of_turn>"),
    _Family("Gemma", {"temperature": 1.0, "top_p": 0.95, "top_k": 64}, ("gemma4",)),
    # Model cards of Magistral-Small, Mistral-Nemo-Instruct, Mistral-Small-3.2 and Devstral-Small.
    _Family("Magistral", {"temperature": 0.7, "top_p": 0.95}, mark="[INST]", word="magistral"),
    _Family("Mistral Nemo", {"temperature": 0.3}, mark="[INST]", word="nemo"),
    _Family("Mistral Small", {"temperature": 0.15}, mark="[INST]", word="mistral-small"),
    _Family("Mistral Small", {"temperature": 0.15}, mark="[INST]", word="mistral small"),
    _Family("Devstral", {"temperature": 0.15}, mark="[INST]", word="devstral"),
    # Mistral's API documentation: temperatures from 0 to 0.7.
    _Family("Mistral", {"temperature": 0.7}, mark="[INST]"),
    # README of openai/gpt-oss: "temperature 1.0 and top_p 1.0".
    _Family("gpt-oss", {"temperature": 1.0, "top_p": 1.0}, ("gpt-oss",)),
    # Model card of LFM2-1.2B.
    _Family(
        "LFM2",
        {"temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05},
        ("lfm2", "lfm2moe"),
    ),
    # generation_config.json of Hunyuan-7B-Instruct.
    _Family(
        "Hunyuan",
        {**_CALM, "repetition_penalty": 1.05},
        ("hunyuan-dense", "hunyuan-moe"),
    ),
)
_USUAL: Values = MappingProxyType({"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05})
"""The defaults of llama.cpp, which users of GGUF files know."""


def family_sampling(file: Path) -> SamplingDefaults:
    """Return the published values for the family of a GGUF file, else the usual values.

    `NO_DEFAULTS` for a file without a chat template. Raises `ModelLoadError` for a damaged file.
    """
    from ...core.model.formats.gguf_metadata import read_values

    found = read_values(file, (*_NAMES, _ARCHITECTURE, _TEMPLATE))
    template = found.get(_TEMPLATE)
    if not isinstance(template, str) or not template:
        return NO_DEFAULTS
    names = " ".join([*(str(found.get(name, "")) for name in _NAMES), file.name]).lower()
    for family in _FAMILIES:
        if family.fits(str(found.get(_ARCHITECTURE, "")), template, names):
            return SamplingDefaults(**family.values, origin=f"published for {family.name}")
    return SamplingDefaults(**_USUAL, origin="usual for GGUF files without values")
