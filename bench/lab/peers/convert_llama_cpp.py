"""The checkpoint as llama.cpp reads it: ``gguf/int8.gguf`` or ``gguf/bf16-draft.gguf``, as asked.

A Qwen2, Qwen3 or Llama in bfloat16 is written as it is, without a vocabulary (the workers speak
token ids); other families by llama.cpp's own converter, which is in the source of
llama-cpp-python; what was a GGUF file at first, llama.cpp widens itself. The other forms are made
from that by its own quantiser.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

FORMS = {
    "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
"""Names of a layer's tensors in both formats."""
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def convert(checkpoint: Path, forms: Sequence[str]) -> None:
    """Write what is not there."""
    for form in forms:
        dtype, _, part = form.partition("-")
        plain = checkpoint / "gguf" / f"{form.replace(dtype, 'bf16')}.gguf"
        out = plain.with_name(f"{form}.gguf")
        if not plain.is_file():
            plain.parent.mkdir(exist_ok=True)
            source = checkpoint / "source.gguf"
            with _whole(plain) as path:
                if source.is_file():
                    _quantize(source, path, llama_cpp.LLAMA_FTYPE_MOSTLY_BF16)
                else:
                    _write(checkpoint / (part or "target"), path)
        if not out.is_file():
            with _whole(out) as path:
                _quantize(plain, path, FORMS[dtype])
    for adapter in sorted((checkpoint / "adapters").glob("*")):
        _convert_adapter(checkpoint, adapter)


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A path to write to; the file gets its name when it is complete."""
    part = out.with_suffix(".part")
    yield part
    part.rename(out)


def _write(source: Path, out: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    if family not in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        _write_by_llama_cpp(source, out)
        return
    writer = gguf.GGUFWriter(out, family.replace("_", ""))
    _write_shape(writer, config)
    for name, tensor in _stacked(_tensors(source / "model.safetensors")):
        if family == "llama" and ("attn_q." in name or "attn_k." in name):
            tensor = _neighbours(tensor, _head_dim(config))
        if tensor.ndim == 1 or "ffn_gate_inp" in name:  # norms and routers are kept in fp32
            writer.add_tensor(name, (tensor.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(tensor).view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _convert_adapter(checkpoint: Path, adapter: Path) -> None:
    """Convert an adapter by llama.cpp's own script, unless it is there."""
    out = checkpoint / "gguf" / f"adapter-{adapter.name}.gguf"
    if out.is_file():
        return
    script = _source() / "convert_lora_to_gguf.py"
    base = ["--base", str(checkpoint / "target"), "--outtype", "bf16"]
    with _whole(out) as path:
        command = [sys.executable, str(script), *base, "--outfile", str(path), str(adapter)]
        subprocess.run(command, check=True)


def _write_by_llama_cpp(source: Path, out: Path) -> None:
    """Convert any family that llama.cpp's converter knows, in a process with its own ``gguf``."""
    home = _source()
    path = os.pathsep.join((str(home), str(home / "gguf-py")))
    script = Path(__file__).with_name("convert_bare.py")
    command = [sys.executable, str(script), str(source), str(out)]
    if "vision_config" in json.loads((source / "config.json").read_text(encoding="utf-8")):
        command += ["--tower", str(out.with_name("mmproj.gguf"))]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})


def _source() -> Path:
    """Folder of llama.cpp's source, fetched once into the environment."""
    home = Path(sys.prefix, "source")
    name = f"llama-cpp-python=={llama_cpp.__version__}"
    if not home.is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        only = ["--no-deps", "--no-binary", ":all:", "--dest", sys.prefix, name]
        subprocess.run([*pip, *only], check=True)
        (archive,) = Path(sys.prefix).glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(home, filter="data")
    (found,) = home.glob("*/vendor/llama.cpp")
    return found


def _neighbours(weight: Any, head_dim: int) -> Any:  # noqa: ANN401 - an array
    """Rows of a head so that those rotated together are neighbours, as its Llama wants them."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    theta = config.get("rope_parameters", config)["rope_theta"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Names as llama.cpp has them and bfloat16 bits as uint16, from a safetensors file."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8:start]))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{path}: {name} is {entry['dtype']}, not BF16")
        begin, end = entry["data_offsets"]
        bits = data[start + begin : start + end].view(np.uint16)
        yield _name(name), bits.reshape(entry["shape"])


def _stacked(tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Experts of a layer, which are one by one, in one tensor."""
    experts: dict[str, dict[int, Any]] = {}
    for name, tensor in tensors:
        before, is_expert, number = name.partition("#")
        if is_expert:
            experts.setdefault(before, {})[int(number)] = tensor
        else:
            yield name, tensor
    for name, found in experts.items():
        yield name, np.stack([found[number] for number in sorted(found)])


def _name(name: str) -> str:
    name, _, kind = name.rpartition(".")  # "weight" or "bias"
    if name in OUTER:
        return f"{OUTER[name]}.{kind}"
    index, _, inner = name.removeprefix("model.layers.").partition(".")
    if inner.startswith("mlp.experts."):
        number, _, part = inner.removeprefix("mlp.experts.").partition(".")
        return f"blk.{index}.{NAMES[f'mlp.{part}']}_exps.{kind}#{number}"
    return f"blk.{index}.{NAMES[inner]}.{kind}"


def _quantize(source: Path, out: Path, form: int) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = form
    params.nthread = 2
    params.allow_requantize = True  # of 4 bits widened to 16
    code = llama_cpp.llama_model_quantize(bytes(source), bytes(out), params)
    if code != 0:
        raise SystemExit(f"{out}: the quantiser returned {code}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("forms", nargs="+")
    convert(**vars(parser.parse_args()))
