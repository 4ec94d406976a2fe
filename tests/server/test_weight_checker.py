"""Checksums of the served weights, and updates from shared memory, by routes and by the SDK."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.build.updates.new_weights import SharedWeights
from foretoken.api.build.updates.refusal import WeightsRefused
from support.new_weights import FILE, digest, retrained
from support.plain_http import Answer, get, post
from support.server_process import Server, running

TARGET = BUILTIN / "target"
FLAGS = [
    "--kv-tokens", "4096", "--max-model-len", "512", "--threads", "1", "--allow-weight-updates",
]  # fmt: skip
BODY: dict[str, Any] = {"prompt": "def area(", "max_tokens": 24, "temperature": 1.5, "seed": 3}
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return retrained(TARGET, tmp_path_factory.mktemp("weights") / "new")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(FLAGS, model=str(TARGET)) as server:
        yield server


def fill(block: SharedMemory, data: bytes) -> None:
    assert block.buf is not None
    block.buf[: len(data)] = data


@pytest.fixture
def block(new: Path) -> Iterator[SharedMemory]:
    data = (new / FILE).read_bytes()
    block = SharedMemory(create=True, size=len(data))
    fill(block, data)
    yield block
    block.close()
    block.unlink()


def change(url: str, info: dict[str, Any], **finish: Any) -> Answer:
    assert post(url, "/start_weight_update", {}).status == 200
    taken = post(url, "/update_weights", {"update_info": info})
    assert taken.status == 200, taken.content
    return post(url, "/finish_weight_update", finish)


def checksum(url: str) -> Any:
    found = post(url, "/weights_checker", {"action": "checksum"})
    assert found.status == 200, found.content
    return found.json


def served(url: str) -> tuple[Any, ...]:
    """Everything that a refused update must not change."""
    found = checksum(url)
    version = get(url, "/is_paused").json["weight_version"]
    choices = post(url, "/v1/completions", BODY).json["choices"]
    return found["ranks"], found["per_engine_checksum"], version, choices


def test_checksums_follow_the_weights_and_a_comparison_names_what_differs(
    server: Server, new: Path
) -> None:
    url = server.url
    change(url, {"path": str(TARGET)})
    first = checksum(url)
    (rank,) = first["ranks"]
    assert rank["per_gpu_checksum"] == first["per_engine_checksum"]
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in rank["checksums"].values())
    equal = post(url, "/weights_checker", {"action": "compare", "path": str(TARGET)}).json
    assert (equal["success"], equal["different"]) == (True, [])
    other = post(url, "/weights_checker", {"action": "compare", "path": str(new)}).json
    assert other["success"] is False
    assert set(other["different"]) <= set(rank["checksums"])
    change(url, {"path": str(new)}, weight_version="b")
    second = checksum(url)
    assert second["weight_version"] == "b"
    assert second["per_engine_checksum"] != first["per_engine_checksum"]
    changed = {
        name
        for name, value in second["ranks"][0]["checksums"].items()
        if value != rank["checksums"][name]
    }
    assert changed == set(other["different"])
    change(url, {"path": str(TARGET)})
    assert checksum(url)["per_engine_checksum"] == first["per_engine_checksum"]


def lacking(tensors: dict[str, Tensor]) -> None:
    del tensors[NORM]


def extra(tensors: dict[str, Tensor]) -> None:
    tensors["model.extra.weight"] = torch.zeros(2)


def misshapen(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


def retyped(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] = tensors[NORM].double().half()


def nan(tensors: dict[str, Tensor]) -> None:
    tensors[NORM][0] = float("nan")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lacking, f"lack tensors: {NORM}"),
        (extra, "does not have tensors: model.extra.weight"),
        (misshapen, f"another shape than in the served model: {NORM}"),
        (retyped, f"another dtype than in the served model: {NORM}"),
        (nan, f"NaN or infinite: {NORM}"),
    ],
)
def test_bad_tensors_are_refused_by_name_and_the_old_version_serves_on(
    server: Server, tmp_path: Path, edit: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    before = served(server.url)
    refused = change(server.url, {"path": str(retrained(TARGET, tmp_path / "bad", edit))})
    assert refused.status == 400
    assert message in refused.error["message"]
    assert served(server.url) == before


def test_a_wrong_digest_of_a_folder_is_refused(server: Server, new: Path) -> None:
    before = served(server.url)
    refused = change(server.url, {"path": str(new), "sha256": {FILE: "0" * 64}})
    assert (refused.status, refused.error["param"]) == (400, "sha256")
    assert served(server.url) == before


def test_an_update_from_shared_memory_equals_one_from_a_folder(
    server: Server, new: Path, block: SharedMemory
) -> None:
    url, size = server.url, (new / FILE).stat().st_size
    change(url, {"path": str(TARGET)})
    info = {"shared_memory": block.name, "size": size}
    finished = change(url, info, sha256=digest(new / FILE), weight_version="shared")
    assert (finished.status, finished.json) == (200, {"weight_version": "shared"})
    equal = post(url, "/weights_checker", {"action": "compare", "path": str(new)}).json
    assert equal["success"] is True
    change(url, {"path": str(TARGET)})
    before = served(url)
    fill(block, bytes(block.size))  # the server no longer reads the block
    assert served(url) == before


def test_shared_memory_that_does_not_hold_the_weights_is_refused_by_name(
    server: Server, new: Path, block: SharedMemory
) -> None:
    url, size = server.url, (new / FILE).stat().st_size
    before = served(url)
    assert change(url, {"shared_memory": "psm_none", "size": size}).error["message"] == (
        "there is no shared memory named psm_none"
    )
    wrong = change(url, {"shared_memory": block.name, "size": size - 1})
    assert f"has {size} bytes, not {size - 1}" in wrong.error["message"]
    assert change(url, {"shared_memory": "../etc", "size": 8}).error["param"] == "shared_memory"
    other = change(url, {"shared_memory": block.name, "size": size}, sha256="0" * 64)
    assert other.error["param"] == "sha256"
    fill(block, (2**40).to_bytes(8, "little"))
    damaged = change(url, {"shared_memory": block.name, "size": size})
    assert f"the shared memory {block.name} is damaged" in damaged.error["message"]
    assert post(url, "/start_weight_update", {}).status == 200
    unsized = post(url, "/update_weights", {"update_info": {"shared_memory": block.name}})
    assert unsized.error["param"] == "update_info.size"
    assert post(url, "/finish_weight_update", {}).status == 400
    assert served(url) == before


def test_the_checker_needs_a_folder_to_compare_and_the_admin_key(server: Server) -> None:
    assert post(server.url, "/weights_checker", {"action": "compare"}).error["param"] == "path"
    assert post(server.url, "/weights_checker", {"action": "reset"}).status == 400
    with running([*FLAGS, "--api-key", "user", "--admin-key", "admin"]) as keyed:
        user = {"authorization": "Bearer user"}
        assert post(keyed.url, "/weights_checker", {}, user).status == 403


def test_the_synchronous_client_has_the_same_methods(new: Path, block: SharedMemory) -> None:
    options: dict[str, Any] = {"kv_tokens": 4096, "max_model_len": 512, "threads": 1}
    params = SamplingParams(max_tokens=16, seed=1)
    with LLM(TARGET, **options, allow_weight_updates=True, draft="self") as llm:
        old, first = llm.generate("def area(", params).token_ids, llm.weight_checksums()
        assert any(name.startswith("draft.") for name in first.tensors)
        llm.pause("keep")
        assert llm.is_paused
        assert llm.update_weights(new, weight_version="n") == llm.weight_version == "n"
        llm.resume()
        assert not llm.is_paused
        changed = llm.generate("def area(", params).token_ids
        assert changed != old
        second = llm.weight_checksums()
        assert second.target != first.target
        drafts = [name for name in first.tensors if name.startswith("draft.")]
        assert any(first.tensors[name] != second.tensors[name] for name in drafts)
        assert llm.weight_differences(new) == []
        llm.update_weights(TARGET)
        third = llm.weight_checksums()
        assert (third.target, third.tensors) == (first.target, first.tensors)
        size = (new / FILE).stat().st_size
        assert llm.update_weights_from_shared_memory(block.name, size) == "3"
        assert llm.generate("def area(", params).token_ids == changed
        assert llm.weight_checksums().tensors == second.tensors
        with pytest.raises(WeightsRefused, match="no shared memory"):
            llm.update_weights_from_shared_memory("psm_none", 8)


def test_names_of_shared_memory_lead_nowhere_else() -> None:
    for name in ("", "a/b", "..", "/../x", "a\0b", "x" * 300):
        with pytest.raises(WeightsRefused) as refused:
            SharedWeights(name, 8).checked_files()
        assert refused.value.param == "shared_memory"
