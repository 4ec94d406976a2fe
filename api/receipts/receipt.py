"""Receipt: what a server states about one answer, as signed JSON."""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ...core.errors import ForetokenError, InvalidRequest
from ...core.sampling.seeds import sibling_seed
from .keys import raw_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

VERSION = 1


class Statement(Struct, kw_only=True, frozen=True):
    """The statement of a receipt.

    - ``id``, ``index``: id of the response and number of the choice. ``created``: seconds since
      1970.
    - ``model``: name of the model, ``model_digest``: SHA-256 of the hashes of its files,
      ``adapter``: name of the LoRA adapter.
    - ``release``, ``kernels``, ``options``: release of foretoken, kernels, and options of the
      engine that may change a token.
    - ``prompt_sha256``, ``answer_sha256``: SHA-256 of the token ids, each as a
      64-bit little-endian integer.
    - ``sampling``, ``seed``: the parameters that determine tokens, and the seed of this choice.
    - ``num_tokens``, ``finish_reason``: length of the answer, and why it ended.
    """

    version: int
    id: str
    index: int
    created: int
    model: str
    model_digest: str
    adapter: str | None
    release: str
    kernels: str
    options: dict[str, Any]
    prompt_sha256: str
    sampling: dict[str, Any]
    seed: int
    answer_sha256: str
    num_tokens: int
    finish_reason: str


class _Versioned(Struct):
    """The field that statements of all versions have."""

    version: int


class Receipt(Struct, kw_only=True, frozen=True):
    """A signed statement. ``payload``: the `Statement` in JSON; ``signature``: base64, Ed25519.

    The signature is of the payload's bytes, so the payload must be kept as it is.
    """

    index: int
    key_id: str
    payload: str
    signature: str


def sign(statement: Statement, key_id: str, key: Ed25519PrivateKey) -> Receipt:
    """Return the signed receipt of a statement."""
    payload = msgspec.json.encode(statement)
    signature = base64.b64encode(key.sign(payload)).decode()
    return Receipt(
        index=statement.index, key_id=key_id, payload=payload.decode(), signature=signature
    )


def opened(receipt: Receipt, keys: Mapping[str, Ed25519PublicKey]) -> Statement:
    """Return what a receipt states.

    Raises `InvalidRequest` if the receipt was altered, or signed with an unknown key.
    """
    from cryptography.exceptions import InvalidSignature

    key = keys.get(receipt.key_id)
    if key is None:
        raise refused(f"its key {receipt.key_id} is not among the given keys")
    try:
        key.verify(raw_bytes(receipt.signature), receipt.payload.encode())
    except (InvalidSignature, ValueError):
        raise refused("it was altered: the signature does not match") from None
    try:
        version = msgspec.json.decode(receipt.payload, type=_Versioned).version
        if version != VERSION:  # other versions may have other fields
            raise refused(f"its version is {version}, and {VERSION} is supported")
        return msgspec.json.decode(receipt.payload, type=Statement)
    except msgspec.DecodeError as error:
        raise refused(f"its payload is not a statement: {error}") from None


def check_answer(
    statement: Statement, index: int, token_ids: Sequence[int], finish_reason: object
) -> None:
    """Raise `InvalidRequest` if the receipt is one of another answer."""
    if statement.index != index:
        raise refused(f"it is of choice {statement.index}")
    if hash_of(token_ids) != statement.answer_sha256:
        raise refused("it is of another answer: the hash of the token ids differs")
    if finish_reason != statement.finish_reason:
        raise refused(f"its answer ended with {statement.finish_reason}, not {finish_reason}")


def check_adapter(statement: Statement, adapter: str | None) -> None:
    """Raise `InvalidRequest` if the answer had another adapter; None: the base model."""
    if statement.adapter != adapter:
        asked, own = adapter or "the base model", statement.adapter or "the base model"
        raise refused(f"it is of {own}, but the answer would be verified with {asked}")


def check_seed(statement: Statement, seed: object, index: int) -> None:
    """Raise `InvalidRequest` if the request has a ``seed``, and the answer another seed.

    ``index``: number of the choice among the choices of its prompt.
    """
    if seed is None:
        return
    if not isinstance(seed, int) or statement.seed != sibling_seed(seed % 2**64, index):
        raise refused(f"its seed is {statement.seed}, which does not follow from the request's")


def hash_of(token_ids: Sequence[int]) -> str:
    """Return the SHA-256 of token ids as 64-bit little-endian integers, in hexadecimal."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()


def digest_of(model: Path) -> str:
    """Return the SHA-256 of the hashes of a model's config and weights, in hexadecimal.

    It takes as long as reading all these files. Raises `ForetokenError` if there are no weights.
    """
    from ..certify.identity import weight_hashes  # loads torch

    try:
        hashes = weight_hashes(model)
    except OSError as error:
        raise ForetokenError(f"receipts: {error}") from None
    if all(each["file"] == "config.json" for each in hashes):
        raise ForetokenError(f"receipts need the model's weights, and {model} has none")
    return hashlib.sha256(msgspec.json.encode(hashes)).hexdigest()


def refused(reason: str) -> InvalidRequest:
    """Return the error of a receipt that cannot be accepted."""
    return InvalidRequest(f"the receipt is refused: {reason}", param="receipt")
