"""Receipts of recorded responses: which ones are refused, without a server."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from foretoken.api.receipts.keys import PublicKey, PublicKeys, SigningKeys, read_public
from foretoken.api.receipts.receipt import VERSION, Receipt, Statement, digest_of, hash_of, sign
from foretoken.api.receipts.recorded import CheckedReceipts
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.core.sampling.seeds import sibling_seed

ANSWERS = [[5, 6, 7], [8, 9]]
SEEDS = 5, sibling_seed(5, 1)


@pytest.fixture
def keys(tmp_path: Path) -> SigningKeys:
    return SigningKeys.load(tmp_path / "keys.pem")


def receipt_of(keys: SigningKeys, index: int, *, adapter: str | None = None) -> Receipt:
    ids = ANSWERS[index]
    statement = Statement(
        version=VERSION, id="a", index=index, created=0, model="m", model_digest="0",
        adapter=adapter, release="", kernels="", options={}, prompt_sha256="", sampling={},
        seed=SEEDS[index], answer_sha256=hash_of(ids), num_tokens=len(ids), finish_reason="stop",
    )  # fmt: skip
    return sign(statement, keys.public.key_id, keys.private)


def response_of(keys: SigningKeys, **options: Any) -> dict[str, Any]:
    receipts = [receipt_of(keys, index, **options) for index in range(len(ANSWERS))]
    choices = [
        {"index": index, "token_ids": [*ids], "finish_reason": "stop"}
        for index, ids in enumerate(ANSWERS)
    ]
    found: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode({"id": "a", "choices": choices, "receipts": receipts})
    )
    return found


def check(
    tmp_path: Path,
    keys: SigningKeys,
    response: dict[str, Any],
    adapter: str | None = None,
    seed: object = None,
    name: str = "seed",
) -> list[dict[str, Any]]:
    file = tmp_path / "keys.json"
    file.write_bytes(msgspec.json.encode(keys.public))
    checked = CheckedReceipts(file)
    request = {"n": 2, name: seed}
    return [
        checked.changes(request, response, each, "here", adapter) for each in response["choices"]
    ]


def test_each_choice_is_repeated_with_its_seed(tmp_path: Path, keys: SigningKeys) -> None:
    found = check(tmp_path, keys, response_of(keys))
    assert found == [{"n": 1, "seed": seed, "index": 0} for seed in SEEDS]


def test_receipts_of_exchanged_choices_are_refused(tmp_path: Path, keys: SigningKeys) -> None:
    response = response_of(keys)
    for each in (*response["choices"], *response["receipts"]):
        each["index"] = 1 - each["index"]
    with pytest.raises(InvalidRequest, match="it is of choice"):
        check(tmp_path, keys, response)


def test_receipts_of_another_seed_than_the_requests_are_refused(
    tmp_path: Path, keys: SigningKeys
) -> None:
    with pytest.raises(InvalidRequest, match="its seed is 5"):
        check(tmp_path, keys, response_of(keys), seed=6)
    with pytest.raises(InvalidRequest, match="its seed is 5"):
        check(tmp_path, keys, response_of(keys), seed="5")
    found = check(tmp_path, keys, response_of(keys), seed=5)
    assert [each["seed"] for each in found] == [*SEEDS]
    assert check(tmp_path, keys, response_of(keys), seed=5 - 2**64)


@pytest.mark.parametrize("token_id", [2**63, 2**80, -1, 1.0, True, "5"])
def test_impossible_token_ids_are_refused(
    tmp_path: Path, keys: SigningKeys, token_id: object
) -> None:
    response = response_of(keys)
    response["choices"][0]["token_ids"][0] = token_id
    with pytest.raises(InvalidRequest, match="no answer can have"):
        check(tmp_path, keys, response)


@pytest.mark.parametrize("name", ["sampling_seed", "random_seed"])
def test_a_seed_has_several_names(tmp_path: Path, keys: SigningKeys, name: str) -> None:
    with pytest.raises(InvalidRequest, match="its seed is 5"):
        check(tmp_path, keys, response_of(keys), seed=6, name=name)
    found = check(tmp_path, keys, response_of(keys), seed=5, name=name)
    assert [each["seed"] for each in found] == [*SEEDS]
    assert all(each[name] is None for each in found)


@pytest.mark.parametrize(("stated", "used"), [("sql", None), (None, "sql"), ("sql", "poems")])
def test_receipts_of_another_adapter_are_refused(
    tmp_path: Path, keys: SigningKeys, stated: str | None, used: str | None
) -> None:
    with pytest.raises(InvalidRequest, match="would be verified with"):
        check(tmp_path, keys, response_of(keys, adapter=stated), used)
    assert check(tmp_path, keys, response_of(keys, adapter=stated), stated)


def test_a_receipt_of_another_version_names_its_version(tmp_path: Path, keys: SigningKeys) -> None:
    payload = '{"version":2,"prompt":"hi"}'
    signature = base64.b64encode(keys.private.sign(payload.encode())).decode()
    response = response_of(keys)
    response["receipts"][0] |= {"payload": payload, "signature": signature}
    with pytest.raises(InvalidRequest, match="its version is 2, and 1 is supported"):
        check(tmp_path, keys, response)


@pytest.mark.parametrize("change", ["{}A", "\n{}", "{}\n", "!{}"])
def test_base64_with_other_characters_is_refused(
    tmp_path: Path, keys: SigningKeys, change: str
) -> None:
    response = response_of(keys)
    first = response["receipts"][0]
    first["signature"] = change.format(first["signature"])
    with pytest.raises(InvalidRequest, match="it was altered"):
        check(tmp_path, keys, response)
    (key,) = keys.public.keys
    changed = PublicKey(key.key_id, change.format(key.public_key))
    with pytest.raises(InvalidRequest, match="is damaged"):
        read_public(PublicKeys(key_id=key.key_id, keys=[changed]))


def test_keys_of_another_algorithm_are_refused(keys: SigningKeys) -> None:
    with pytest.raises(InvalidRequest, match="the keys are of RSA"):
        read_public(structs.replace(keys.public, algorithm="RSA"))


def test_a_key_file_must_be_a_file(tmp_path: Path) -> None:
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir(mode=0o700)
    os.mkfifo(pipe, 0o600)
    for each in (folder, pipe):
        with pytest.raises(InvalidRequest, match="is not a file"):
            SigningKeys.load(each)


def test_files_with_unread_keys_are_refused(tmp_path: Path, keys: SigningKeys) -> None:
    file = tmp_path / "keys.pem"
    whole = file.read_bytes()
    locked = whole.replace(b"PRIVATE KEY", b"ENCRYPTED PRIVATE KEY")
    for more in (whole[:-30], locked, b"-----BEGIN OTHER-----\nAAAA\n-----END OTHER-----\n"):
        file.write_bytes(whole + more)
        with pytest.raises(InvalidRequest, match="damaged key"):
            SigningKeys.load(file)


def test_a_model_without_weights_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ForetokenError, match="weights"):
        digest_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert len(digest_of(tmp_path)) == 64
