"""A new process over the folder of an old one goes on where it ended, and says the same."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from foretoken.api.build.engine_builder import build
from foretoken.api.build.kv import kept_kv
from foretoken.api.build.kv import tiers as kv_tiers
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library, variants
from foretoken.core.scheduling import page_loads
from foretoken.core.tiers.stores.slab_store import SlabStore
from foretoken.draft.heads.kinds import save_head
from support.checkpoints import make_checkpoint
from support.forked import run_forked
from support.tiny_heads import random_head
from support.tiny_pair import write_pair

pytestmark = pytest.mark.slow

PROMPTS = [[random.Random(seed).randrange(4, 256) for _ in range(100)] for seed in range(4)]
SIZES = {"kv_tokens": 256, "max_model_len": 160, "threads": 1}  # of four times as much
PAGE_SIZE = 16
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 20, "logit_bias": {7: 4.0}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets, a draft model and heads, made as they are asked for."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    target, _ = write_pair(folder, vocab_size=256)
    decoder = load_decoder(target, dtype="bfloat16", backend="torch")
    for kind in ("block", "eagle3"):
        save_head(random_head(kind, decoder), folder / kind)
    sizes = {"vocab_size": 256, "vocab_size_per_layer_input": 256}
    make_checkpoint(folder / "gemma4", "gemma4_shared", **sizes)
    make_checkpoint(folder / "hybrid", "qwen3_5", vocab_size=256)
    return folder


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of 256 MiB: the first would take all the room, and push out what others have left."""
    assert SlabStore.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(SlabStore.__init__.__kwdefaults__, "slab_bytes", 1 << 20)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups and loads that a busy machine holds up for seconds are waited for."""
    monkeypatch.setattr(page_loads, "LOOKUP_SECONDS", 60.0)
    monkeypatch.setattr(page_loads, "LATE_SECONDS", 60.0)


class Run:
    """Answers of a process; ``options`` are those of the engine."""

    def __init__(
        self, model: Path, disk: Path | None, *, num_rounds: int = 1, **options: Any
    ) -> None:
        options = {"dtype": "bfloat16", "speculation": "off", "draft": "none"} | SIZES | options
        kv_disk = None if disk is None else f"{disk}:16MiB"
        config = EngineConfig(kv_disk=kv_disk, **options)
        self.tokens: list[list[int]] = []
        self.requests = [_request(index) for index in [*range(len(PROMPTS))] * num_rounds]
        asyncio.run(self._serve(model, config))

    async def _serve(self, model: Path, config: EngineConfig) -> None:
        engine = build(model, config).engine
        await engine.start()
        try:
            for request in self.requests:
                tokens: list[int] = []
                async for delta in engine.submit(request):
                    tokens += delta.token_ids
                self.tokens.append(tokens)
            verdict = await engine.audit()
            assert verdict["ok"], verdict
        finally:
            await engine.close(drain_seconds=10.0)

    @property
    def loaded(self) -> list[int]:
        return [each.usage.loaded_tokens for each in self.requests]

    @property
    def cached(self) -> list[int]:
        return [each.usage.cached_tokens for each in self.requests]


def _request(index: int) -> Request:
    params = SamplingParams(max_tokens=8, ignore_eos=True, **PARAMS[index])
    prompt = PROMPTS[index]
    return Request(
        request_id=str(index),
        tokens=array("q", prompt),
        sampling=SamplingMetadata(params=params, seed=index, prompt_len=len(prompt)),
    )


def test_states_come_back_from_host_memory_and_change_no_token(folder: Path) -> None:
    """The pool has room for two of the four prompts."""
    run = Run(folder / "hybrid", None, kv_host="8MiB", num_rounds=2)
    first, second = run.tokens[: len(PROMPTS)], run.tokens[len(PROMPTS) :]
    assert second == first
    assert run.loaded == [0] * len(PROMPTS) + [96] * len(PROMPTS)


@pytest.mark.parametrize(
    "options", [{"kv_remote": "mooncake://127.0.0.1:1?lend=1GiB"}, {"kv_transfer": "nixl"}]
)
def test_tiers_that_keep_no_states_are_refused_by_name(
    options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "check_reachable", lambda *_: MagicMock())
    monkeypatch.setattr(kept_kv, "_kv_transfer", MagicMock())
    with pytest.raises(InvalidRequest, match="models with recurrent states") as refusal:
        build(folder / "hybrid", EngineConfig(device="cpu", **SIZES, **options))
    assert refusal.value.param == next(iter(options))


needs_native = pytest.mark.skipif(native_library() is None, reason="no native kernels here")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("target", {"kv_cache_dtype": "int8"}),
    "torch": ("target", {"backend": "torch", "dtype": "float32"}),
    "transformers": ("target", {"model_impl": "transformers"}),
    "mixed layers": ("gemma4", {}),
    "recurrent states": ("hybrid", {}),
    "2 ranks": ("target", {"tp": 2, "device": "cpu", "threads": 1}),
    "draft model": ("target", {"draft": "draft", "speculation": 4}),
    "block head": ("target", {"draft": "block", "speculation": 4}),
    "eagle head": ("target", {"draft": "eagle3", "speculation": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_finds_what_was_computed_and_changes_no_token(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    name, options = KINDS[kind]
    if (draft := options.get("draft")) is not None:
        options = options | {"draft": str(folder / draft)}
    first, second = (Run(folder / name, tmp_path, **options) for _ in range(2))
    assert first.loaded == [0] * len(PROMPTS)
    assert second.tokens == first.tokens
    assert second.cached == second.loaded == [96] * len(PROMPTS)
    if draft is not None:
        proposed = [
            [each.usage.proposed_tokens for each in run.requests] for run in (first, second)
        ]
        assert sum(proposed[0]) > 0


# -- who finds nothing ----------------------------------------------------------------------------


@pytest.fixture
def left(folder: Path, tmp_path: Path) -> Path:
    """A folder that a process has left."""
    Run(folder / "target", tmp_path / "disk")
    return tmp_path / "disk"


def test_the_same_model_in_another_folder_finds_everything(
    folder: Path, left: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "target", tmp_path / "copy")
    assert Run(tmp_path / "copy", left).loaded == [96] * len(PROMPTS)


def test_a_model_with_one_byte_changed_finds_nothing_and_destroys_nothing(
    folder: Path, left: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "target", tmp_path / "other")
    with (tmp_path / "other" / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)  # the least significant one of a weight
        (byte,) = file.read(1)
        file.seek(-4, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert Run(tmp_path / "other", left).loaded == [0] * len(PROMPTS)
    assert Run(folder / "target", left).loaded == [96] * len(PROMPTS)


OTHERS: Mapping[str, dict[str, Any]] = {
    "page size": {"page_size": 32},
    "KV type": {"kv_cache_dtype": "int8"},
    "backend": {"backend": "torch"},
    "exactness": {"exact": "batch"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_way_to_compute_or_to_lay_out_pages_finds_nothing(
    other: str, folder: Path, left: Path
) -> None:
    assert Run(folder / "target", left, **OTHERS[other]).loaded == [0] * len(PROMPTS)


def test_another_head_finds_nothing_of_a_heads_records(folder: Path, tmp_path: Path) -> None:
    drafts: Sequence[str] = [str(folder / "block"), str(folder / "eagle3"), "none"]
    for draft in drafts:
        speculation = "off" if draft == "none" else 4
        run = Run(folder / "target", tmp_path, draft=draft, speculation=speculation)
        assert run.loaded == [0] * len(PROMPTS)


def print_loaded(model: str, disk: str) -> None:
    """Print what a process of its own loads."""
    print(Run(Path(model), Path(disk)).loaded)
    sys.stdout.flush()


@needs_native
@pytest.mark.skipif(len(variants()) < 2, reason="this machine runs one variant of the kernels")
def test_another_machines_kernels_find_nothing(folder: Path, left: Path) -> None:
    done = run_forked(
        print_loaded,
        str(folder / "target"),
        str(left),
        env={**os.environ, "FORETOKEN_NATIVE_VARIANT": variants()[1]},
    )
    assert done.stdout.strip() == str([0] * len(PROMPTS)), done.stderr
