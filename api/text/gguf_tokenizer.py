"""The tokenizer and chat template in a GGUF file, built by transformers.

A file names the way in which texts are split before byte pairs are merged (``tokenizer.ggml.pre``),
as in llama.cpp's tables. transformers knows some names, but not those in this module.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...core.errors import ModelLoadError
from ...core.model.formats.files import GGUF

logger = logging.getLogger(__name__)

_NEEDED = {"gpt2": ("merges",), "llama": ("scores",), "t5": ("scores",)}
"""Required parts of a vocabulary besides its tokens, by kind of tokenizer."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS_OF_THREE = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SINGLE_DIGITS = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
# Each pattern splits the pieces of the previous one.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_DIGITS_OF_THREE,)),
    **dict.fromkeys(("hunyuan", "stablelm2", "grok-2", "solar-open"), (_SINGLE_DIGITS,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK),
    "seed-coder": (_SEED,),
}
# Digits are split one by one, the rest as in GPT-2.
SINGLE_DIGITS = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
)
# Names for which transformers' default, GPT-2's splitting, is right.
_LIKE_GPT2 = frozenset(
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat")
)


def check_vocabulary(path: Path) -> None:
    """Raise `ModelLoadError` for a GGUF file that is no model or has an incomplete vocabulary.

    Other paths pass.
    """
    from ...core.model.formats.gguf_metadata import open_parts

    if path.suffix.lower() != GGUF:
        return
    first = open_parts(path)[0]
    kind = str(first.get("tokenizer.ggml.model"))
    for part in ("model", "tokens", *_NEEDED.get(kind, ())):
        if (name := f"tokenizer.ggml.{part}") not in first.values:
            raise ModelLoadError(f"{path} has an incomplete vocabulary: {name} is missing")


def load_gguf_tokenizer(file: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    """Return a fast tokenizer of transformers.

    Raises the errors of transformers, and `ModelLoadError`.
    """
    from transformers import PreTrainedTokenizerFast

    check_vocabulary(file)
    hf = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)
    _split_as_named(hf.backend_tokenizer, file)
    return hf


def _split_as_named(backend: Any, file: Path) -> None:  # noqa: ANN401 - tokenizers is untyped
    from tokenizers import Regex, pre_tokenizers

    from ...core.model.formats.gguf_metadata import read_text

    name = read_text(file, "tokenizer.ggml.pre")
    if name in SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif name in SPLITS:
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[name]]
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pieces])
    elif not splits_as_named(backend, file):
        logger.warning(
            "%s: unknown pre-tokenizer %r (tokenizer.ggml.pre): texts are split as in "
            "GPT-2, and some "
            "may become other tokens than in training",
            file.name,
            name,
        )


def splits_as_named(backend: Any, file: Path) -> bool:  # noqa: ANN401 - tokenizers is untyped
    """Whether the tokenizer splits texts as the file says; False for an unknown name."""
    from ...core.model.formats.gguf_metadata import read_text

    name = read_text(file, "tokenizer.ggml.pre")
    return (
        name in SPLITS
        or name in SINGLE_DIGITS
        or name in _LIKE_GPT2
        or read_text(file, "tokenizer.ggml.model") != "gpt2"
        or "Split(" in repr(backend.pre_tokenizer)  # transformers knows the name
    )
