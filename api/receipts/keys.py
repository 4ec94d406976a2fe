"""Ed25519 keys of receipts: a file of PEM blocks, whose last private key signs.

A key is replaced by appending another one. Earlier keys stay in the file, as private or as public
keys, so that their receipts can still be checked.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ...core.errors import InvalidRequest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

ALGORITHM = "Ed25519"
OTHERS = stat.S_IRWXG | stat.S_IRWXO
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)


class PublicKey(Struct, frozen=True):
    """A public key. ``public_key``: its 32 bytes in base64."""

    key_id: str
    public_key: str


class PublicKeys(Struct, frozen=True, kw_only=True):
    """The keys with which receipts are checked. ``key_id``: the key that signs new receipts."""

    key_id: str
    algorithm: str = ALGORITHM
    keys: list[PublicKey]


@dataclass(frozen=True, slots=True)
class SigningKeys:
    """The private key that signs, and all public keys of the file."""

    private: Ed25519PrivateKey
    public: PublicKeys

    @classmethod
    def load(cls, file: Path) -> SigningKeys:
        """Return the keys of a file, which is created with a new key if it does not exist.

        Raises `InvalidRequest` if the package cryptography is missing, and for a file that other
        users can read, that is a folder, that has no private key, or that cannot be read or
        written.
        """
        require_cryptography()
        try:
            if not file.exists():
                _create(file)
            if not file.is_file():
                raise _wrong(f"{file} is not a file")
            if file.stat().st_mode & OTHERS:
                raise _wrong(f"{file} is readable by other users: run chmod 600 {file}")
            data = file.read_bytes()
        except OSError as error:
            raise _wrong(f"{file}: {error.strerror}") from None
        return cls._of(file, data)

    @classmethod
    def _of(cls, file: Path, data: bytes) -> SigningKeys:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (
            Ed25519PrivateKey,
            Ed25519PublicKey,
        )
        from cryptography.hazmat.primitives.serialization import (
            load_pem_private_key,
            load_pem_public_key,
        )

        private: Ed25519PrivateKey | None = None
        public: dict[str, PublicKey] = {}
        blocks = [*_BLOCK.finditer(data)]
        if len(blocks) < data.count(b"-----BEGIN "):
            raise _wrong(f"{file} has a damaged key: it has no end")
        for block in blocks:
            try:
                if block[1] == b"PUBLIC KEY":
                    key: object = load_pem_public_key(block[0])
                else:
                    key = load_pem_private_key(block[0], None)
            except (ValueError, TypeError, UnsupportedAlgorithm) as error:
                raise _wrong(f"{file} has a damaged key: {error}") from None
            if isinstance(key, Ed25519PrivateKey):
                private, key = key, key.public_key()
            if not isinstance(key, Ed25519PublicKey):
                raise _wrong(f"{file} has a key that is not an {ALGORITHM} key")
            named = named_key(key)
            public[named.key_id] = named
        if private is None:
            raise _wrong(f"{file} has no {ALGORITHM} private key in PEM format")
        signing = named_key(private.public_key())
        return cls(private, PublicKeys(key_id=signing.key_id, keys=[*public.values()]))


def named_key(key: Ed25519PublicKey) -> PublicKey:
    """Return a public key with its id, which is the beginning of its SHA-256."""
    raw = key.public_bytes_raw()
    return PublicKey(hashlib.sha256(raw).hexdigest()[:16], base64.b64encode(raw).decode())


def read_public(found: PublicKeys) -> Mapping[str, Ed25519PublicKey]:
    """Return public keys by their ids. Raises `InvalidRequest` for a damaged key."""
    require_cryptography()
    if found.algorithm != ALGORITHM:
        raise _wrong(f"the keys are of {found.algorithm}, and {ALGORITHM} is supported")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    keys: dict[str, Ed25519PublicKey] = {}
    for each in found.keys:
        try:
            key = Ed25519PublicKey.from_public_bytes(raw_bytes(each.public_key))
        except ValueError:
            raise _wrong(f"the public key {each.key_id} is damaged") from None
        if named_key(key).key_id != each.key_id:
            raise _wrong(f"the public key {each.key_id} has another id")
        keys[each.key_id] = key
    return keys


def raw_bytes(text: str) -> bytes:
    """Return the bytes of a base64 text, which has no other characters. Raises ValueError."""
    return base64.b64decode(text, validate=True)


def require_cryptography() -> None:
    """Raise `InvalidRequest` if the package cryptography is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise _wrong("install the extra: pip install foretoken[receipts]") from None


def _create(file: Path) -> None:
    """Write a new key, readable by its owner only. A file that appears meanwhile is kept."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    pem = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(pem)
            opened.flush()
            os.fsync(opened.fileno())
        try:
            os.link(part, file)
        except FileExistsError:
            return
    finally:
        part.unlink()


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(f"receipts: {message}", param="receipts")
