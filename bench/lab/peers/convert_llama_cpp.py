"""The checkpoint as llama.cpp loads it: files such as ``gguf/int8.gguf``, ``gguf/bf16-draft.gguf``.

llama.cpp's converter writes bfloat16 with a made-up vocabulary; if the checkpoint was a GGUF file,
llama.cpp's quantiser widens that file instead. The quantiser also makes the other data types. The
Python of llama.cpp's environment runs this file; the sources and the quantiser are installed there.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOURCE = Path(sys.prefix, "source")
QUANTISER = Path(sys.prefix, "bin", "llama-quantize")
FORMS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_K_M"}


def convert(checkpoint: Path, forms: Sequence[str]) -> None:
    """Write the GGUF file of each form, such as ``int8`` or ``bf16-draft``, unless it exists."""
    for form in forms:
        dtype, _, part = form.partition("-")
        plain = checkpoint / "gguf" / f"{form.replace(dtype, 'bf16')}.gguf"
        out = plain.with_name(f"{form}.gguf")
        if not plain.is_file():
            plain.parent.mkdir(exist_ok=True)
            source = checkpoint / "source.gguf"
            with _whole(plain) as path:
                if source.is_file():
                    _quantise(source, path, "bf16")
                else:
                    write(checkpoint / (part or "target"), path)
        if not out.is_file():
            with _whole(out) as path:
                _quantise(plain, path, dtype)


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename the file to ``out`` when it is complete."""
    part = out.with_suffix(".part")
    yield part
    part.rename(out)


def _quantise(source: Path, out: Path, dtype: str) -> None:
    """Quantise or widen a GGUF file to ``dtype``; its weights may be quantised already."""
    command = [str(QUANTISER), "--allow-requantize", str(source), str(out), FORMS[dtype]]
    subprocess.run(command, check=True)


def write(source: Path, out: Path) -> None:
    """Write a model in bfloat16, without its MTP layers."""
    sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]
    conversion: Any = importlib.import_module("conversion")
    gguf: Any = importlib.import_module("gguf")
    hparams = conversion.ModelBase.load_hparams(source, is_mistral_format=False)
    _as_published(hparams)
    architecture = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
    found = conversion.get_model_class(architecture)

    def set_vocab(model: Any) -> None:  # noqa: ANN401 - a converter
        """Give every token its number in brackets as text, as the other engines' tokenizer does."""
        named = {0: "a", 1: "b", 2: "ab", 3: "\u010a", 4: "\u010a\u010a"}
        count = hparams["vocab_size"]
        writer = model.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([named.get(index, f"[{index}]") for index in range(count)])
        writer.add_token_types([gguf.TokenType.NORMAL] * count)
        writer.add_token_merges(["a b"])

    made = {"model_arch": found.model_arch, "set_vocab": set_vocab, "no_mtp": True}
    converter = type(found.__name__, (found,), made)
    converter(source, gguf.LlamaFileType.MOSTLY_BF16, out, hparams=hparams).write()


def _as_published(hparams: dict[str, Any]) -> None:
    """Give fields the names of published configs; transformers writes newer ones."""
    if dense := hparams.get("mlp_layer_types"):
        hparams.setdefault("first_k_dense_replace", dense.count("dense"))
    if hparams["model_type"] == "granitemoehybrid":
        names = {"full_attention": "attention", "linear_attention": "mamba"}
        hparams["layer_types"] = [names.get(each, each) for each in hparams["layer_types"]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("forms", nargs="+")
    convert(**vars(parser.parse_args()))
