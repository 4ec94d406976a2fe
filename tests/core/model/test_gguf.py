"""GGUF files: each quantised type as its own package reads it, each family as in safetensors."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.formats.gguf import GgufFile
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.opening import open_model, read_config
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.structs.linear import NativeLinear
from foretoken.core.ops.quantize import QuantizedWeight
from foretoken.core.ops.weights import PackedTable, whole_table
from support.checkpoints import ModelDriver, make_checkpoint
from support.gguf_files import write_gguf as write

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = list(range(3, 23))
# K-quants take rows of 256, the others of 32.
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
DEQUANTISED = [
    kind
    for kind in GgmlType
    if kind in gguf.quants._type_traits and kind not in (GgmlType.F32, GgmlType.F16)
]


def logits_of(path: Path, **options: Any) -> torch.Tensor:
    driver = ModelDriver(load_decoder(path, **options), num_pages=4)
    return driver.prefill(driver.add(IDS), len(IDS))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", **SHAPE)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "llama_biased", "qwen2", "qwen3_biased"])
def test_a_family_says_what_its_safetensors_say(family, tmp_path):
    folder = make_checkpoint(tmp_path / "plain", family)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    (folder / "config.json").write_text(json.dumps(config))
    file = write(folder, tmp_path / "model.gguf")
    assert torch.equal(logits_of(file), logits_of(folder))
    assert read_config(file).eos_token_ids == (2,)


def test_a_folder_with_one_file_is_that_file(llama, tmp_path):
    file = write(llama, tmp_path / "model.gguf")
    assert open_model(tmp_path).checkpoint.where == file
    write(llama, tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match=r"several GGUF files \(model.gguf, other.gguf\)"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_every_quantised_type_has_the_values_of_its_own_package(kind, tmp_path):
    """Random bytes stand for the types that the package reads but does not write."""
    file = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    shape = (6, 512 // size * num_bytes)
    raw = generator.integers(0, 256, shape, dtype=np.uint8)
    with contextlib.suppress(NotImplementedError):
        raw = gguf.quantize(generator.standard_normal((6, 512)).astype(np.float32), kind)
    writer.add_context_length(64)
    writer.add_embedding_length(512)
    writer.add_block_count(1)
    writer.add_feed_forward_length(512)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 512), np.float32))
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        found = GgufFile(file).read("model.layers.0.mlp.down_proj.weight")
        values = found.dequantize() if isinstance(found, QuantizedWeight) else found.float()
        expected = torch.from_numpy(gguf.dequantize(raw, kind))
    same = (values == expected) | (values.isnan() & expected.isnan())
    assert values.shape == (6, 512)
    assert same.all()


# To the kernels' kinds.
PACKED = {GgmlType.Q4_0: 14, GgmlType.Q4_1: 4, GgmlType.Q8_0: 5, GgmlType.MXFP4: 12}
PACKED |= {GgmlType.Q5_0: 15, GgmlType.Q5_1: 16}
K_TYPES = {GgmlType.Q4_K: 8, GgmlType.Q5_K: 9, GgmlType.Q6_K: 10, GgmlType.IQ4_NL: 11}
K_TYPES |= {GgmlType.IQ4_XS: 13}
FACTORS_AT = {GgmlType.Q4_K: (0, 2), GgmlType.Q5_K: (0, 2), GgmlType.Q6_K: (208,)}  # bytes


@pytest.mark.parametrize("kind", K_TYPES, ids=lambda kind: kind.name)
def test_types_nobody_writes_are_kept_packed_and_lose_nothing(kind, llama, tmp_path, monkeypatch):
    """The package does not write them: random values with small numbers that blocks share."""
    if native_library() is None:
        pytest.skip("no native kernels here")
    draw = np.random.default_rng(int(kind))
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]

    def blocks(values, _):
        shape = (*values.shape[:-1], values.shape[-1] // size, num_bytes)
        raw = draw.integers(0, 256, shape, dtype=np.uint8)
        for at in FACTORS_AT.get(kind, (0,)):
            small = (draw.standard_normal(shape[:-1]) * 1e-4).astype(np.float16)
            raw[..., at : at + 2] = small[..., None].view(np.uint8)
        return raw.reshape(*values.shape[:-1], -1)

    monkeypatch.setattr(gguf, "quantize", blocks)
    file = write(llama, tmp_path / "packed.gguf", kind=kind)
    decoder = load_decoder(file, backend="native")
    layer = decoder.weights.layers[0]
    packed = [*layer.linears, decoder.weights.lm_head]
    assert all(isinstance(w, NativeLinear) and w.struct.kind == K_TYPES[kind] for w in packed)
    wide = logits_of(file, dtype="float32", backend="torch")
    found = logits_of(file, backend="native")
    rounded = logits_of(file, dtype="bfloat16", backend="native")
    assert (found - wide).norm() < 1.5 * (rounded - wide).norm()


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_what_kernels_can_is_kept_packed_and_loses_nothing(kind, llama, tmp_path):
    if native_library() is None:
        pytest.skip("no native kernels here")
    file = write(llama, tmp_path / "packed.gguf", kind=kind)
    decoder = load_decoder(file, backend="native")
    layer = decoder.weights.layers[0]
    packed = [*layer.linears, decoder.weights.lm_head]
    assert all(isinstance(w, NativeLinear) and w.struct.kind == PACKED[kind] for w in packed)
    wide = logits_of(file, dtype="float32", backend="torch")
    found = logits_of(file, backend="native")
    rounded = logits_of(file, dtype="bfloat16", backend="native")
    assert (found - wide).norm() < 1.5 * (rounded - wide).norm()


def test_a_dtype_that_is_asked_for_holds_all_weights_in_it(llama, tmp_path):
    file = write(llama, tmp_path / "packed.gguf", kind=GgmlType.Q4_1)
    for dtype in ("float32", "bfloat16"):
        decoder = load_decoder(file, dtype=dtype, backend="torch")
        assert decoder.dtype == getattr(torch, dtype)
    if native_library() is not None:
        decoder = load_decoder(file, dtype="float32", backend="native", quantize="int8")
        assert decoder.weights.layers[0].mixer.o.struct.kind == 2
        plain = load_decoder(file, dtype="float32", backend="native")
        assert plain.weights.layers[0].mixer.o.struct.kind == 0


def test_types_that_are_mixed_within_a_matrix_stay_packed(llama, tmp_path):
    """Files of medium size keep values of attention at more bits than queries and keys."""
    if native_library() is None:
        pytest.skip("no native kernels here")

    def kind_of(name: str) -> GgmlType:
        wide = ("attn_v", "ffn_up", "token_embd")
        return GgmlType.Q8_0 if any(each in name for each in wide) else GgmlType.Q5_0

    file = write(llama, tmp_path / "mixed.gguf", kind=kind_of)
    decoder = load_decoder(file, backend="native")
    layer = decoder.weights.layers[0]
    for packed in (layer.mixer.qkv, layer.mlp.gate_up):
        assert packed.struct.kind == 15
        assert packed.others.struct.kind == 5
        assert packed.others.others is None
    wide = logits_of(file, dtype="float32", backend="torch")
    rounded = logits_of(file, dtype="bfloat16", backend="native")
    assert (logits_of(file, backend="native") - wide).norm() < 1.5 * (rounded - wide).norm()


def test_a_quantised_embedding_and_its_output_are_one_packed_weight(llama, tmp_path):
    if native_library() is None:
        pytest.skip("no native kernels here")
    file = write(llama, tmp_path / "packed.gguf", kind=GgmlType.Q8_0)
    weights = load_decoder(file, backend="native").weights
    assert isinstance(weights.embedding, PackedTable)
    is_tied = read_config(file).tie_embeddings
    assert (weights.embedding.weight is weights.lm_head) == is_tied
    plain = load_decoder(file, backend="torch", dtype="bfloat16").weights.embedding
    assert torch.equal(whole_table(weights.embedding), plain)


def test_a_matrix_of_which_a_part_is_not_packed_is_cast(llama, tmp_path, monkeypatch):
    if native_library() is None:
        pytest.skip("no native kernels here")
    file = write(llama, tmp_path / "mixed.gguf", kind=GgmlType.Q8_0)
    read = GgufFile.read

    def values_wide(self: GgufFile, name: str) -> torch.Tensor | QuantizedWeight:
        found = read(self, name)
        return found.dequantize() if name.endswith("v_proj.weight") else found

    monkeypatch.setattr(GgufFile, "read", values_wide)
    layer = load_decoder(file, backend="native").weights.layers[0]
    assert layer.mixer.qkv.struct.kind in (1, 6)  # bfloat16, by whichever products
    assert layer.mixer.o.struct.kind == 5


def test_llama3s_frequencies_are_divided_as_the_file_says(llama, tmp_path, monkeypatch):
    file = tmp_path / "scaled.gguf"
    divisors = np.linspace(1.0, 8.0, 32, dtype=np.float32)
    plain = read_config(write(llama, tmp_path / "plain.gguf"))
    add = gguf.GGUFWriter.write_header_to_file

    def with_divisors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)
        add(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
    write(llama, file)
    rope = read_config(file).rope
    assert rope.divisors == tuple(divisors.tolist())
    assert plain.rope.divisors == ()
    assert not torch.equal(logits_of(file), logits_of(tmp_path / "plain.gguf"))


def test_an_architecture_nobody_knows_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "grok")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"architecture 'grok' is not supported; .*llama"):
        load_decoder(tmp_path / "other.gguf")


@pytest.mark.parametrize("size", [0, 3, 100, 3000])
def test_a_file_that_was_cut_is_refused(size, llama, tmp_path):
    file = write(llama, tmp_path / "whole.gguf")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"whole\.gguf"):
        load_decoder(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="no such file"):
        load_decoder(tmp_path / "none.gguf")


def test_partial_rotation_is_refused(llama, tmp_path):
    more = {"llama__rope__dimension_count": ("add_uint32", 16)}
    file = write(llama, tmp_path / "partial.gguf", **more)
    with pytest.raises(ModelLoadError, match="partial_rotary_factor"):
        load_decoder(file)
