"""A checkpoint in bfloat16 by llama.cpp's own converter, without a vocabulary.

Run by convert_llama_cpp.py with that converter and its ``gguf`` on the path.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any


def convert(source: Path, out: Path, tower: Path | None = None) -> None:
    """Write ``out``; MTP layers are left out. ``tower``: the file for an image tower, if asked."""
    conversion: Any = importlib.import_module("conversion")
    gguf: Any = importlib.import_module("gguf")
    hparams = conversion.ModelBase.load_hparams(source, is_mistral_format=False)
    _as_published(hparams)
    architecture = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
    found = conversion.get_model_class(architecture)

    def set_vocab(model: Any) -> None:  # noqa: ANN401 - a converter
        if tower is not None:
            _name_image_tokens(model.gguf_writer, gguf, hparams["text_config"]["vocab_size"])
            return
        model.gguf_writer.add_tokenizer_model("none")
        model.gguf_writer.add_vocab_size(hparams["vocab_size"])

    bare = {"model_arch": found.model_arch, "set_vocab": set_vocab, "no_mtp": True}
    converter = type(found.__name__, (found,), bare)
    converter(source, gguf.LlamaFileType.MOSTLY_BF16, out, hparams=hparams).write()
    if tower is not None:
        fresh = conversion.ModelBase.load_hparams(source, is_mistral_format=False)
        kind = conversion.ModelType.MMPROJ
        architecture = conversion.get_model_architecture(fresh, kind)
        found = conversion.get_model_class(architecture, mmproj=True)
        found(source, gguf.LlamaFileType.MOSTLY_BF16, tower, hparams=fresh).write()


def _name_image_tokens(writer: Any, gguf: Any, count: int) -> None:  # noqa: ANN401 - of llama.cpp
    """A vocabulary without texts but those that llama.cpp looks up for images."""
    named = {49152: "<global-img>", 49189: "<fake_token_around_image>", 49190: "<image>"}
    named |= {0: "a", 1: "b", 2: "ab", 3: "\u010a", 4: "\u010a\u010a"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([named.get(index, f"[{index}]") for index in range(count)])
    kinds = [
        gguf.TokenType.CONTROL if index >= 49152 else gguf.TokenType.NORMAL
        for index in range(count)
    ]
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])


def _as_published(hparams: dict[str, Any]) -> None:
    """Fields as published configs have them, of which transformers writes newer forms."""
    if "text_config" in hparams:
        hparams["text_config"]["architectures"] = ["LlamaForCausalLM"]
    if dense := hparams.get("mlp_layer_types"):
        hparams.setdefault("first_k_dense_replace", dense.count("dense"))
    if hparams["model_type"] == "granitemoehybrid":
        names = {"full_attention": "attention", "linear_attention": "mamba"}
        hparams["layer_types"] = [names.get(each, each) for each in hparams["layer_types"]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tower", type=Path)
    convert(**vars(parser.parse_args()))
