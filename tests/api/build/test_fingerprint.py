"""`Built.fingerprint`: made only on demand, and another one for other weights and options."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.api.build.engine_builder import build
from foretoken.core.config import EngineConfig
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from foretoken.draft.heads.kinds import save_head
from support.checkpoints import make_checkpoint
from support.image_models import save_image_model
from support.native_variants import slow
from support.tiny_heads import random_head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(folder: Path) -> bytes:
    return of(folder)


def of(folder: Path, **options: Any) -> bytes:
    config = EngineConfig(**({"device": "cpu", "draft": "none", "kv_tokens": 512} | options))
    found = build(folder, config, wants_keys=True).fingerprint
    assert found is not None
    return found


CHANGED: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},  # of weights that are stored so, which auto would keep as they are
    {"dtype": "bfloat16"},
    {"exact": "batch"},
    {"page_size": 8},
    {"load_format": "random"},
    {"model_impl": "transformers"},
    {"backend": "torch", "threads": 1},
    {"backend": "torch", "threads": 2},
    {"kv_cache_dtype": "int8"},
)
NATIVE: tuple[dict[str, Any], ...] = (
    {"quantize": "int8"},
    {"quantize": "int4"},
)
SAME: tuple[dict[str, Any], ...] = (
    {},
    {"kv_tokens": 1024, "max_running": 3, "max_batch_tokens": 99},
    {"draft": "radix,suffix", "speculation": 2},
)


def test_options_that_change_bits_of_kv_change_it_and_others_do_not(
    folder: Path, plain: bytes
) -> None:
    options = CHANGED if native_library() is None else (*CHANGED, *NATIVE)
    found = {plain, *(of(folder, **each) for each in options)}
    assert len(found) == 1 + len(options)
    assert {of(folder, **each) for each in SAME} == {plain}


def test_it_does_not_depend_on_where_the_model_lies(
    folder: Path, plain: bytes, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert of(tmp_path / "elsewhere") == plain
    by_modules = [of(each, model_impl="transformers") for each in (folder, tmp_path / "elsewhere")]
    assert by_modules[0] == by_modules[1]


@pytest.mark.parametrize("load_format", ["auto", "random"])
def test_one_field_of_the_config_changes_it(load_format: str, folder: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    values = json.loads((changed / "config.json").read_text())
    values["rope_parameters"]["rope_theta"] += 1.0
    (changed / "config.json").write_text(json.dumps(values))
    assert of(changed, load_format=load_format) != of(folder, load_format=load_format)


def test_one_bit_of_one_weight_changes_it(folder: Path, plain: bytes, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    assert of(changed) != plain


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_the_head_changes_it_and_so_does_each_part_of_it(
    kind: str, folder: Path, plain: bytes, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    save_head(random_head(kind, load_decoder(folder)), head)
    found = {plain, of(folder, draft=str(head))}
    assert of(folder, draft=f"radix,{head}") in found
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"rope_theta": 123.0}))
    found.add(of(folder, draft=str(head)))
    (head / "config.json").write_text(json.dumps(config))
    tensors = load_file(head / "model.safetensors")
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    tensors[name][0, 0] += 1.0
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    found.add(of(folder, draft=str(head)))
    assert len(found) == 4


PROCESS = """
import sys
from foretoken.api.build.engine_builder import build
from foretoken.core.config import EngineConfig

config = EngineConfig(device="cpu", draft="none", kv_tokens=512, model_impl=sys.argv[2])
assert build(sys.argv[1], config).fingerprint is None
loaded = [name for name in sys.modules if name.startswith("foretoken.core.tiers")]
assert not loaded, loaded
print(build(sys.argv[1], config, wants_keys=True).fingerprint.hex())
"""


@pytest.mark.parametrize("impl", ["own", *slow("transformers")])
def test_another_process_makes_the_same_one_and_imports_nothing_until_then(
    impl: str, folder: Path
) -> None:
    command = [sys.executable, "-c", PROCESS, str(folder), impl]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert found.stdout.split()[-1] == of(folder, model_impl=impl).hex()


def test_of_a_model_that_sees_the_tower_counts_and_nothing_that_is_not_read(tmp_path: Path) -> None:
    folder, _ = save_image_model(tmp_path, "llava")
    before = of(folder)
    torch.manual_seed(1)
    assert of(folder) == before
    config = json.loads((folder / "config.json").read_text())
    config["vision_feature_layer"] = -1  # other vectors by the same weights
    (folder / "config.json").write_text(json.dumps(config))
    assert of(folder) != before
