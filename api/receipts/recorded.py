"""Receipts of recorded responses, as ``foretoken verify --receipt`` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...core.errors import ForetokenError, InvalidRequest
from ...core.options.checks import MAX_INT
from .keys import PublicKeys, read_public
from .receipt import (
    Receipt,
    Statement,
    check_adapter,
    check_answer,
    check_seed,
    digest_of,
    opened,
    refused,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

Keys = Mapping[str, "Ed25519PublicKey"]
SEEDS = ("seed", "sampling_seed", "random_seed")  # names of the seed in bodies


class CheckedReceipts:
    """Checks the receipts of recorded choices with the public keys of a file.

    Raises `InvalidRequest` for a file that is not the body of GET /v1/receipts/key.
    """

    def __init__(self, keys: Path) -> None:
        self._keys = read_keys(keys)
        self._digests: dict[str, str] = {}  # digests of models by the place of the receipt

    def changes(
        self,
        request: Mapping[str, Any],
        response: Mapping[str, Any],
        choice: Mapping[str, Any],
        where: str,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Check the receipt of a choice; return fields of the request that repeat it alone.

        The receipt knows the seed, also if the request had none. ``where``: the place of the
        choice, for errors. ``adapter``: name of the adapter with which it is verified. Raises
        `InvalidRequest`.
        """
        try:
            statement = statement_of(response, choice, self._keys)
            check_adapter(statement, adapter)
            most = request.get("n") or 1
            num_choices = most if isinstance(most, int) and most > 0 else 1
            number, index = divmod(statement.index, num_choices)
            seeds = {name: request[name] for name in SEEDS if request.get(name) is not None}
            check_seed(statement, next(iter(seeds.values()), None), index)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}", param="receipt") from None
        self._digests[where] = statement.model_digest
        return {**dict.fromkeys(seeds), "n": 1, "seed": statement.seed, "index": number}

    def check_model(self, model: Path) -> None:
        """Raise `InvalidRequest` unless all receipts are of the model in the folder ``model``."""
        own = digest_of(model)
        for where, digest in self._digests.items():
            if digest != own:
                message = f"{where}: {refused('it is of a model whose files differ')}"
                raise InvalidRequest(message, param="receipt")


def read_keys(file: Path) -> Keys:
    """Return the public keys of a file that holds the body of GET /v1/receipts/key.

    Raises `InvalidRequest` for another file.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=PublicKeys)
    except OSError as error:
        raise ForetokenError(f"{file}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"{file} is not the body of GET /v1/receipts/key: {error}"
        raise InvalidRequest(message, param="receipt") from None
    return read_public(found)


def statement_of(response: Mapping[str, Any], choice: Mapping[str, Any], keys: Keys) -> Statement:
    """Return what the receipt of a recorded choice states, after it was checked.

    Raises `InvalidRequest` if the response has no receipt of the choice, and for a receipt that was
    altered, or that is one of another answer.
    """
    index, receipts = choice.get("index"), response.get("receipts")
    try:
        known = msgspec.convert(receipts, list[Receipt])
    except msgspec.ValidationError:
        raise refused("the response has no list of receipts") from None
    mine = next((each for each in known if each.index == index), None)
    if mine is None:
        raise refused(f"there is none of choice {index}")
    statement = opened(mine, keys)
    if response.get("id") != statement.id:
        raise refused(f"it is of the response {statement.id}")
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list):
        raise refused("the response has no token_ids: record it with return_token_ids")
    if not all(type(each) is int and 0 <= each <= MAX_INT for each in token_ids):
        raise refused("the response has token_ids that no answer can have")
    check_answer(statement, mine.index, token_ids, choice.get("finish_reason"))
    return statement
