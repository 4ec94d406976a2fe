"""Seal: encrypted data that clients keep for the server; only the server can read or write it.

The cipher is a stream of SHAKE-256 over the key and a random nonce; HMAC-SHA256 over the owner, the
nonce and the ciphertext is checked before anything is decrypted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os

VERSION = b"\x01"
NONCE_BYTES = 16
TAG_BYTES = 32
HEAD_BYTES = len(VERSION) + NONCE_BYTES + TAG_BYTES
SECRET_BYTES = 32


class BrokenSeal(ValueError):  # noqa: N818 - a seal that is broken is the error
    """Raised for sealed data that was altered, or sealed with another key or for another owner."""


class Seal:
    """Encrypts and authenticates data with a secret.

    Without a secret, a random one is used, so that data can be opened only by the same object.
    """

    def __init__(self, secret: str = "") -> None:
        key = secret.encode("utf-8", "surrogatepass") or os.urandom(SECRET_BYTES)
        self._cipher_key = hmac.digest(key, b"foretoken seal: cipher", "sha256")
        self._tag_key = hmac.digest(key, b"foretoken seal: tag", "sha256")

    def close(self, owner: bytes, data: bytes) -> str:
        """Return sealed data as URL-safe base64, which only ``owner`` can open. O(data)."""
        nonce = os.urandom(NONCE_BYTES)
        hidden = self._masked(nonce, data)
        sealed = VERSION + nonce + self._tag(owner, nonce, hidden) + hidden
        return base64.urlsafe_b64encode(sealed).decode()

    def open(self, owner: bytes, text: str) -> bytes:
        """Return the data of a sealed text. Raises `BrokenSeal`. O(text)."""
        try:
            sealed = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        except ValueError:
            raise BrokenSeal from None
        head, hidden = sealed[:HEAD_BYTES], sealed[HEAD_BYTES:]
        nonce, tag = head[len(VERSION) : -TAG_BYTES], head[-TAG_BYTES:]
        is_whole = len(head) == HEAD_BYTES and head.startswith(VERSION)
        if not is_whole or not hmac.compare_digest(tag, self._tag(owner, nonce, hidden)):
            raise BrokenSeal
        return self._masked(nonce, hidden)

    def _masked(self, nonce: bytes, data: bytes) -> bytes:
        """Encrypt or decrypt data."""
        stream = hashlib.shake_256(self._cipher_key + nonce).digest(len(data))
        mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
        return mixed.to_bytes(len(data), "big")

    def _tag(self, owner: bytes, nonce: bytes, hidden: bytes) -> bytes:
        parts = hashlib.sha256(owner).digest() + VERSION + nonce + hidden
        return hmac.digest(self._tag_key, parts, "sha256")
