"""A bounded memory of answers: their token ids, by the message's text and the ids before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from ...text.chat_template import REASONING
from ...types.shares import Owner, Shares

MAX_BYTES = 32 * 2**20
OVERHEAD = 768  # approximate bytes per answer, without its ids
DIGEST_BYTES = 16
Digest: TypeAlias = bytes
Key: TypeAlias = tuple[Owner, Digest, Digest]
_json = msgspec.json.Encoder(order="deterministic")


class PrefixDigest:
    """A digest of the token ids before a message, which is updated when ids are appended."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._hash = hashlib.blake2b(array("i", token_ids), digest_size=DIGEST_BYTES)

    def add(self, token_ids: Sequence[int]) -> None:
        """Append token ids. O(token ids)."""
        self._hash.update(array("i", token_ids))

    def after(self, token_ids: Sequence[int]) -> Digest:
        """Return the digest after appending these ids, without changing the object."""
        copied = self._hash.copy()
        copied.update(array("i", token_ids))
        return copied.digest()


def message_digest(message: Mapping[str, Any]) -> Digest | None:
    """Return the digest of an assistant's message as clients see it; None if it is not text.

    It covers content, reasoning and tool calls. Call ids, the order of arguments, and white space
    around the content of a message with calls are ignored.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        return None
    reasoning: object = ""
    for name in REASONING:
        if message.get(name):
            reasoning = message[name]
            break
    calls: list[tuple[object, object]] = []
    if message.get("tool_calls"):
        calls, content = [_call(call) for call in message["tool_calls"]], content.strip()
    try:
        written = _json.encode((content, reasoning, calls))
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(written, digest_size=DIGEST_BYTES).digest()


def _call(call: Mapping[str, Any]) -> tuple[object, object]:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            # arguments that are not JSON are compared as text
            arguments = msgspec.json.decode(arguments)
    return function.get("name"), arguments


class TokenHistory:
    """The token ids of each owner's latest answers, at most ``max_bytes`` together.

    The memory is divided among owners by `Shares`, which decides what to forget when it is full.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._shares: Shares[Key] = Shares(max_bytes)
        self._owners: dict[Owner, dict[Digest, dict[Digest, bytes]]] = {}
        self._salts: dict[Owner, str | None] = {}

    @property
    def num_bytes(self) -> int:
        """Approximate size of the remembered answers in bytes."""
        return self._shares.num_bytes

    def has_any(self, owner: Owner) -> bool:
        """Whether an answer to this owner is remembered."""
        return owner in self._owners

    def put(
        self, owner: Owner, salt: str | None, digest: Digest, prefix: Digest, ids: Sequence[int]
    ) -> None:
        """Remember an answer. O(ids).

        It replaces an answer with the same text after the same token ids.
        """
        key = (owner, digest, prefix)
        self._forget(key)
        data = array("i", ids).tobytes()
        self._owners.setdefault(owner, {}).setdefault(digest, {})[prefix] = data
        self._salts[owner] = salt
        self._shares.add(owner, key, len(data) + OVERHEAD)
        while (excess := self._shares.excess()) is not None:
            self._forget(excess)

    def ids_by_prefix(self, owner: Owner, digest: Digest) -> Mapping[Digest, bytes]:
        """Return the token ids (int32) of an owner's answers whose message has this digest.

        They are indexed by the digest of the ids before each answer, see `PrefixDigest`.
        """
        return dict(self._owners.get(owner, {}).get(digest, {}))

    def touch(self, key: Key) -> None:
        """Mark an answer as recently used, if it is still remembered."""
        owner, digest, prefix = key
        if prefix in self._owners.get(owner, {}).get(digest, {}):
            self._shares.touch(key)

    def flush(self, *salts: str | None) -> None:
        """Forget the answers under these cache salts; all if no salt is given. O(answers)."""
        for owner, salt in list(self._salts.items()):
            if not salts or salt in salts:
                for digest, prefixes in list(self._owners[owner].items()):
                    for prefix in list(prefixes):
                        self._forget((owner, digest, prefix))

    def _forget(self, key: Key) -> None:
        owner, digest, prefix = key
        texts = self._owners.get(owner, {})
        if texts.get(digest, {}).pop(prefix, None) is None:
            return
        self._shares.remove(key)
        if not texts[digest]:
            del texts[digest]
        if not texts:
            del self._owners[owner], self._salts[owner]
