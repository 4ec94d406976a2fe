"""Tokenizers of GGUF files: built for any architecture, texts split as the file says."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from tokenizers import pre_tokenizers

from foretoken.api.text.gguf_tokenizer import SINGLE_DIGITS, SPLITS, load_gguf_tokenizer
from foretoken.core.model.formats.gguf_architectures import ALIASES, ARCHITECTURES

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = "It's 12345 x_y\n\n你好 ok"


def write(file: Path, architecture: str, pre: str) -> Path:
    """A vocabulary of bytes, one pair and an end."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = [*ALPHABET, "he", "<end>"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages[0]['content'] }}<end>")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def pieces(file: Path) -> list[str]:
    """Cut the text into the pieces within which pairs are merged."""
    hf = load_gguf_tokenizer(file)
    found = hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    return [TEXT[begin:end] for _, (begin, end) in found]


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *ALIASES])
def test_every_architecture_has_a_tokenizer_and_a_template(
    architecture: str, tmp_path: Path
) -> None:
    hf = load_gguf_tokenizer(write(tmp_path / "model.gguf", architecture, "qwen2"))
    ids = hf.encode("hehe<end>")
    assert ids == [len(ALPHABET), len(ALPHABET), len(ALPHABET) + 1]
    assert hf.decode(ids, skip_special_tokens=True) == "hehe"
    chat = hf.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "hi<end>"


HAN = "你好"
EXPECTED = {
    "glm4": ["It", "'s", " ", "123", "45", " x", "_y", "\n\n", HAN, " ok"],
    "hunyuan": ["It", "'s", " ", *"12345", " x", "_y", "\n\n", HAN, " ok"],
    "hunyuan-dense": ["It", "'s", " ", "123", "45", " x", "_y", "\n\n", HAN, " ok"],
    "seed-coder": ["It", "'s", " ", *"12345", " x", "_y", "\n\n", HAN, " ok"],
    "command-r": ["It", "'s", " ", *"12345", " x", "_", "y", "\n", "\n", HAN, " ok"],
    "olmo": ["It", "'s", " 12345", " x", "_", "y", "\n", "\n", HAN, " ok"],
}


@pytest.mark.parametrize("pre", EXPECTED)
def test_texts_are_split_as_the_file_says(pre: str, tmp_path: Path) -> None:
    assert pieces(write(tmp_path / "model.gguf", "qwen2", pre)) == EXPECTED[pre]


def test_a_split_that_nobody_knows_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for pre in ("qwen2", *SPLITS, *SINGLE_DIGITS, "gpt-2"):
        load_gguf_tokenizer(write(tmp_path / "model.gguf", "llama", pre))
    assert not caplog.records
    load_gguf_tokenizer(write(tmp_path / "model.gguf", "llama", "of-tomorrow"))
    assert "unknown pre-tokenizer 'of-tomorrow'" in caplog.text
