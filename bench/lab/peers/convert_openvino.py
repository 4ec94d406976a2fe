"""The checkpoint as OpenVINO loads it:

``openvino/int8`` or ``openvino/bf16-draft``, for example.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openvino as ov
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import AutoTokenizer

FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},  # Stored in 16 bits; the worker requests computation in bfloat16.
    "int8": {"bits": 8, "sym": True},
    "int4": {"bits": 4, "sym": True, "group_size": 32, "ratio": 1.0},
}


def convert(checkpoint: Path, forms: Sequence[str]) -> None:
    """Write the model of each form, such as ``int8`` or ``bf16-draft``, unless it exists."""
    for form in forms:
        out = checkpoint / "openvino" / form
        dtype, _, part = form.partition("-")
        if not (out / "openvino_detokenizer.xml").is_file():
            _export(checkpoint / (part or "target"), out, FORMS[dtype])


def _export(source: Path, out: Path, form: dict[str, Any]) -> None:
    config = OVWeightQuantizationConfig(**form) if form else None
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, load_in_8bit=False, quantization_config=config, compile=False
    )
    model.save_pretrained(out)
    both = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    for made, name in zip(both, ("tokenizer", "detokenizer"), strict=True):
        ov.save_model(made, out / f"openvino_{name}.xml")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("forms", nargs="+")
    convert(**vars(parser.parse_args()))
