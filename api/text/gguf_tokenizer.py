"""The tokenizer and chat template that a GGUF file carries, built by transformers from the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Values of ``tokenizer.ggml.pre`` whose digits stand alone, which transformers does not know:
# llama.cpp splits these by "\p{N}" and then as GPT-2 does.
SINGLE_DIGITS = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
)


def load_gguf_tokenizer(file: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    """A fast tokenizer of transformers. Raises what transformers raises."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)
    if _pre_tokenizer_name(file) in SINGLE_DIGITS:
        hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return hf


def _pre_tokenizer_name(file: Path) -> str:
    from ...core.model.formats.gguf import read_text

    return read_text(file, "tokenizer.ggml.pre")
