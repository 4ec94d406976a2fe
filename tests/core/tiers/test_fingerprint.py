"""The fingerprint of KV: another one whenever one input is another, the same one otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from foretoken.core.model.loader import load_decoder
from foretoken.core.model.opening import open_model, read_config
from foretoken.core.ops.machine import identity
from foretoken.core.ops.machine.identity import machine_identity
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.quantize import (
    QuantizedStack,
    QuantizedWeight,
    UnpackedWeight,
    quantize_weight,
)
from foretoken.core.tiers.fingerprint import (
    CODE,
    FINGERPRINT_BYTES,
    HEAD_CODE,
    FingerprintParts,
    HeadParts,
    WeightsDigest,
    code_digest,
    kv_fingerprint,
)
from support.checkpoints import make_checkpoint, make_reference, save
from support.gguf_files import write_gguf
from support.quantized_checkpoints import quantize_checkpoint
from support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

# -- parts ----------------------------------------------------------------------------------------

PARTS = FingerprintParts(
    weights=b"w",
    config="c",
    decoder={"ops": "NativeOps", "library": "a.so"},
    machine={"torch": "2"},
    code=b"c",
    dtype="torch.bfloat16",
    asked_dtype="auto",
    quantize="none",
    exact="spec",
    load_format="auto",
    page_size=16,
    kv_codec="auto",
    head=HeadParts(weights=b"h", config="h"),
    tower={"transformers": "5"},
)
CHANGES: dict[str, list[Any]] = {
    "weights": [b"x", b""],
    "config": ["d"],
    "decoder": [
        PARTS.decoder | {"ops": "TorchOps"},
        PARTS.decoder | {"library": "b.so"},
        PARTS.decoder | {"more": ""},
        {},
    ],
    "machine": [{"torch": "3"}],
    "tower": [{"transformers": "6"}, {}, None],
    "code": [b"d"],
    "dtype": ["torch.float32"],
    "asked_dtype": ["bfloat16"],
    "quantize": ["int8"],
    "exact": ["off"],
    "load_format": ["random"],
    "page_size": [32],
    "kv_codec": ["int8"],
    "head": [None, HeadParts(weights=b"i", config="h"), HeadParts(weights=b"h", config="i")],
}


def test_every_part_changes_the_fingerprint() -> None:
    assert CHANGES.keys() == {field.name for field in fields(FingerprintParts)}
    others = [replace(PARTS, **{name: to}) for name, values in CHANGES.items() for to in values]
    found = {kv_fingerprint(each) for each in (PARTS, *others)}
    assert len(found) == 1 + len(others)
    assert {len(each) for each in found} == {FINGERPRINT_BYTES}


def test_the_order_of_names_does_not_matter() -> None:
    turned = replace(PARTS, decoder=dict(reversed(PARTS.decoder.items())))
    assert kv_fingerprint(turned) == kv_fingerprint(PARTS)


@pytest.mark.parametrize("part", ["config", "rope", "fold", "layer"])
def test_the_text_of_a_config_tells_every_field(part: str, tmp_path: Path) -> None:
    config = read_config(make_checkpoint(tmp_path, "gpt_oss"))
    inner: Any = {"config": config, "rope": config.rope, "fold": config.fold}.get(
        part, config.layers[0]
    )
    texts = {repr(config)}
    for field in fields(inner):
        changed = replace(inner, **{field.name: "another"})
        whole = {"config": changed}.get(part) or replace(
            config, **{part: changed} if part != "layer" else {"layers": (changed,)}
        )
        texts.add(repr(whole))
    assert len(texts) == 1 + len(fields(inner))


def test_the_text_of_a_config_names_no_place_in_memory(tmp_path: Path) -> None:
    for kind in ("gemma4_experts", "glm4_moe", "ministral3"):
        assert " at 0x" not in repr(read_config(make_checkpoint(tmp_path / kind, kind)))


# -- tensors --------------------------------------------------------------------------------------


def digest_of(*weights: tuple[str, Any]) -> bytes:
    found = WeightsDigest()
    for name, weight in weights:
        found(name, weight)
    return found.digest()


def test_the_order_of_reading_does_not_matter_and_names_do() -> None:
    a, b = torch.arange(6.0), torch.arange(6.0) + 1
    assert digest_of(("a", a), ("b", b)) == digest_of(("b", b), ("a", a))
    assert digest_of(("a", a), ("b", b)) == digest_of(("a", a), ("b", b), ("a", a))
    others = [
        digest_of(("a", a), ("b", b)),
        digest_of(("a", b), ("b", a)),
        digest_of(("a", a)),
        digest_of(("b", a)),
        digest_of(),
    ]
    assert len(set(others)) == len(others)


def test_bits_shape_and_dtype_of_a_tensor_matter_and_its_strides_do_not() -> None:
    plain = torch.arange(12, dtype=torch.float32).view(3, 4)
    flipped = plain.clone()
    flipped[1, 2] = torch.nextafter(flipped[1, 2], torch.tensor(9.0))
    negative = plain.clone()
    negative[0, 0] = -0.0
    different = [plain, flipped, negative, plain.view(4, 3), plain.flatten(), plain.bfloat16(),
                 plain.view(torch.int32), plain.sum(), plain[:0]]  # fmt: skip
    found = {digest_of(("a", each)) for each in different}
    assert len(found) == len(different)
    assert digest_of(("a", plain.T.contiguous().T)) == digest_of(("a", plain))
    assert digest_of(("a", plain.clone().requires_grad_())) == digest_of(("a", plain))


def test_every_byte_of_a_large_tensor_matters() -> None:
    different = [torch.zeros(200_001, dtype=torch.uint8) for _ in range(4)]
    for each, place in zip(different, (0, 70_000, 200_000), strict=False):
        each[place] = 1
    assert len({digest_of(("a", each)) for each in different}) == len(different)


def test_every_part_of_a_quantised_weight_matters() -> None:
    weight = quantize_weight(torch.arange(128.0).view(2, 64), "int4")
    scale, factor = weight.scale, torch.ones(2, 1)
    whole = UnpackedWeight("int4_k", weight.values, scale, scale + 1, (factor, factor + 1))
    different = [
        whole,
        replace(whole, kind="int5_k"),
        replace(whole, values=weight.values + 1),
        replace(whole, scale=scale + 1),
        replace(whole, minimum=scale),
        replace(whole, minimum=None),
        replace(whole, factors=(factor + 1, factor)),
        replace(whole, factors=(factor,)),
        weight.values,
    ]
    assert len({digest_of(("a", each)) for each in different}) == len(different)


def test_a_stack_is_digested_as_it_is_unpacked_each_of_it_once() -> None:
    made: list[int] = []
    each = [quantize_weight(torch.arange(64.0).view(2, 32) + i, "int4") for i in range(3)]

    def one(index: int) -> QuantizedWeight:
        made.append(index)
        return each[index]

    def digested(order: list[int], count: int = 3) -> bytes:
        digest = WeightsDigest()
        stack = digest("a", QuantizedStack(count, one))
        assert isinstance(stack, QuantizedStack)
        assert [stack.one(index) for index in order] == [each[index] for index in order]
        return digest.digest()

    whole = digested([0, 1, 2])
    assert made == [0, 1, 2]
    assert digested([2, 0, 1]) == whole
    assert digested([0, 1]) != whole
    assert digested([0, 1, 2], count=4) != whole
    each[1], each[2] = each[2], each[1]
    assert digested([0, 1, 2]) != whole


def test_what_is_digested_is_returned_and_counted() -> None:
    digest, tensor = WeightsDigest(), torch.arange(10)
    assert digest("a", tensor) is tensor
    weight = quantize_weight(torch.ones(2, 32), "int8")
    assert digest("b", weight) is weight
    assert digest.num_bytes == 80 + 64 + 8


# -- checkpoints ----------------------------------------------------------------------------------


def make_gguf(folder: Path, kind: str, matrices: GgmlType, **shape: Any) -> Path:
    source = make_checkpoint(folder / "source", kind, **shape)
    return write_gguf(source, folder / "model.gguf", kind=matrices)


def make_quantized(folder: Path, name: str) -> Path:
    make_checkpoint(folder, "llama", intermediate_size=96, num_hidden_layers=1)
    quantize_checkpoint(folder, name)
    return folder


ONE = {"num_hidden_layers": 1}
STACKED = ONE | {"layer_types": ["sliding_attention"], "num_local_experts": 3}
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "safetensors": lambda folder: make_checkpoint(folder, "qwen3", **ONE),
    "tied": lambda folder: make_checkpoint(folder, "llama_tied", **ONE),
    "keys_as_values": lambda folder: make_checkpoint(folder, "gemma4"),
    "experts": lambda folder: make_checkpoint(folder, "mixtral", **ONE),
    "stacked_experts": lambda folder: make_checkpoint(folder, "gpt_oss", **STACKED),
    "gguf": lambda folder: make_gguf(folder, "llama", GgmlType.Q8_0, intermediate_size=96, **ONE),
    "gguf_fused": lambda folder: make_gguf(folder, "phi3", GgmlType.F16, **ONE),
    "gguf_stacked": lambda folder: make_gguf(
        folder, "gpt_oss", GgmlType.MXFP4, **STACKED, head_dim=64, intermediate_size=64
    ),
    "awq": lambda folder: make_quantized(folder, "awq_32"),
    "gptq": lambda folder: make_quantized(folder, "gptq_act_order"),
    "transformers": lambda folder: save_tiny(folder, "stablelm", **ONE),
}
# A format and the backend that takes it as it is stored.
LOADED = [
    *((name, "torch") for name in CHECKPOINTS if name not in ("awq", "gguf_stacked")),
    *((name, "native") for name in ("gguf", "gguf_stacked", "awq")),
]


def tensors_of(folder: Path) -> dict[str, tuple[Path, int]]:
    """The file and the offset of an item in the middle of each stored tensor."""
    if folder.suffix == ".gguf":
        return {
            each.name: (folder, int(each.data_offset) + int(each.n_bytes) // 2)
            for each in gguf.GGUFReader(folder).tensors
        }
    found = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = file, 8 + length + (start + stop) // 2 // 8 * 8
    return found


def flip(file: Path, at: int) -> None:
    """Turn the lowest bit of a byte."""
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


def loaded(path: Path, backend: str, **options: Any) -> bytes:
    digest = WeightsDigest()
    load_decoder(path, backend=backend, on_read=digest, **options)  # type: ignore[arg-type]
    assert digest.num_bytes > 0
    return digest.digest()


@pytest.mark.parametrize(("name", "backend"), LOADED)
def test_one_bit_of_any_tensor_changes_the_digest(name: str, backend: str, tmp_path: Path) -> None:
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels here")
    path = CHECKPOINTS[name](tmp_path / "model")
    first = loaded(path, backend)
    assert loaded(path, backend) == first
    tensors, found = tensors_of(path), {first}
    if name == "transformers":  # each load tests the model
        tensors = dict(list(tensors.items())[::4])
    for file, at in tensors.values():
        flip(file, at)
        found.add(loaded(path, backend))
        flip(file, at)
    assert len(found) == 1 + len(tensors)
    assert loaded(path, backend) == first


@pytest.mark.parametrize("impl", ["own", "transformers"])
def test_one_file_or_many_with_the_same_tensors_are_equal(impl: str, tmp_path: Path) -> None:
    model = make_reference("qwen3")
    one, many = save(model, tmp_path / "one"), tmp_path / "many"
    save(model, many, max_shard_size="50KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    assert loaded(one, "torch", impl=impl) == loaded(many, "torch", impl=impl)


def test_random_weights_have_no_digest_on_either_path(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    for impl in ("own", "transformers"):
        digest = WeightsDigest()
        load_decoder(folder, load_format="random", impl=impl, on_read=digest)  # type: ignore[arg-type]
        assert digest.num_bytes == 0
        assert digest.digest() == WeightsDigest().digest()


def test_of_transformers_modules_what_no_file_has_is_digested_too(tmp_path: Path) -> None:
    names = list[str]()

    def on_read(name: str, weight: Any) -> Any:
        names.append(name)
        return weight

    load_decoder(CHECKPOINTS["transformers"](tmp_path), on_read=on_read)
    assert {"model.rotary_emb.inv_freq", "model.norm.bias"} <= set(names)


@pytest.mark.parametrize("name", ["safetensors", "gguf_stacked", "awq"])
def test_a_model_that_is_digested_is_the_same_model(name: str, tmp_path: Path) -> None:
    checkpoint = open_model(CHECKPOINTS[name](tmp_path / "model")).checkpoint
    digest = WeightsDigest()
    for tensor in checkpoint.shapes:
        plain, noted = checkpoint.read(tensor), digest(tensor, checkpoint.read(tensor))
        assert type(plain) is type(noted)
        wide = [w if isinstance(w, torch.Tensor) else w.dequantize() for w in (plain, noted)]
        assert torch.equal(*wide)


def test_transformers_version_and_its_config_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CHECKPOINTS["transformers"](tmp_path / "model")
    first = dict(load_decoder(folder).identity)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    assert load_decoder(elsewhere).identity == first
    config = json.loads((elsewhere / "config.json").read_text())
    (elsewhere / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 0.5}))
    changed = dict(load_decoder(elsewhere).identity)
    assert {name for name in first if first[name] != changed[name]} == {"text config"}
    monkeypatch.setattr("transformers.__version__", "0")
    assert load_decoder(folder).identity["transformers"] == "0" != first["transformers"]


# -- kernels, machine, code -----------------------------------------------------------------------


def test_native_kernels_tell_their_library_and_their_products(tmp_path: Path) -> None:
    library = native_library()
    if library is None:
        pytest.skip("no native kernels here")
    ops = [NativeOps(library, products=kind).identity for kind in ("bfloat16", "float32")]
    assert ops[0] != ops[1]
    assert ops[0]["library"].startswith(f"kernels-{library.variant}-")
    assert ops[0]["library"].endswith(".so")
    assert "/" not in ops[0]["library"]
    first, second = (
        load_decoder(make_checkpoint(tmp_path, "qwen3"), backend=name).identity  # type: ignore[arg-type]
        for name in ("native", "torch")
    )
    assert (first["ops"], second["ops"]) == ("NativeOps", "TorchOps")
    assert first["library"] == ops[0]["library"]


def test_triton_kernels_tell_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from foretoken.core.ops.triton.triton_ops import TritonOps

    first = TritonOps().identity
    monkeypatch.setattr(triton, "__version__", "0")
    assert TritonOps().identity != first


MACHINE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "torch": lambda m: m.setattr("torch.__version__", "0"),
    "torch's build": lambda m: m.setattr("torch.version.git_version", "0"),
    "CPU kernels": lambda m: m.setattr("torch.backends.cpu.get_cpu_capability", lambda: "NO AVX"),
    "precision": lambda m: m.setattr("torch.get_float32_matmul_precision", lambda: "medium"),
    "threads": lambda m: m.setattr("torch.get_num_threads", lambda: 77),
    "flags": lambda m: m.setattr(identity, "cpu_flags", lambda: frozenset({"mmx"})),
    "CPU": lambda m: m.setattr(identity, "_cpu_name", lambda: "another"),
    "C library": lambda m: m.setattr("platform.libc_ver", lambda: ("musl", "1")),
    "oneDNN": lambda m: m.setenv("ONEDNN_MAX_CPU_ISA", "SSE41"),
    "MKL": lambda m: m.setenv("MKL_CBWR", "COMPATIBLE"),
}


@pytest.mark.parametrize("change", MACHINE)
def test_another_machine_or_library_is_another(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    first = machine_identity(cpu)
    assert machine_identity(cpu) == first
    MACHINE[change](monkeypatch)
    assert machine_identity(cpu) != first


def test_a_gpu_is_told_by_its_name_and_its_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Card:
        name, major, minor, multi_processor_count = "A", 9, 0, 132

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Card)
    cuda = torch.device("cuda")
    found = [machine_identity(cuda)]
    for field, value in (("name", "B"), ("multi_processor_count", 114), ("minor", 1)):
        with monkeypatch.context() as changed:
            changed.setattr(Card, field, value)
            found.append(machine_identity(cuda))
    monkeypatch.setattr("torch.version.cuda", "0.1")
    found.append(machine_identity(cuda))
    assert all(each not in found[:index] for index, each in enumerate(found))
    assert machine_identity(torch.device("cpu")) not in found


def test_names_and_texts_of_the_code_matter(tmp_path: Path) -> None:
    def digest() -> bytes:
        return code_digest([tmp_path / "a", tmp_path / "b"])

    for name in ("a/x.py", "a/inner/y.py", "b/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = [digest()]
    (tmp_path / "a" / "notes.txt").write_text("no code")
    assert digest() == found[0]
    (tmp_path / "a" / "inner" / "y.py").write_text("other")
    found.append(digest())
    (tmp_path / "b" / "x.py").rename(tmp_path / "b" / "z.py")
    found.append(digest())
    (tmp_path / "b" / "z.py").rename(tmp_path / "a" / "z.py")
    found.append(digest())
    assert len(set(found)) == 4


def test_a_name_is_not_taken_for_a_text(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    (tmp_path / "y.py").write_text("")
    first = code_digest([tmp_path])
    (tmp_path / "y.py").unlink()
    (tmp_path / "x.py").write_text(f"{tmp_path.name}/y.py")
    assert code_digest([tmp_path]) != first


def test_the_code_of_kv_is_where_it_is_looked_for() -> None:
    for folder in (*CODE, *HEAD_CODE):
        assert (folder / "__init__.py").is_file()
    assert code_digest(CODE) != code_digest((*CODE, *HEAD_CODE))
