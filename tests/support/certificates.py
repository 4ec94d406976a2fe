"""Certificates for a server on this machine, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> tuple[str, str]:
    """Files of a certificate for 127.0.0.1, signed by itself, and of its key."""
    folder.mkdir(exist_ok=True)
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=foretoken",
        "-addext", "subjectAltName=IP:127.0.0.1",
    )  # fmt: skip
    return cert, key


def make_encrypted_key(key: str, folder: Path) -> str:
    """The same key with a password."""
    encrypted = str(folder / "encrypted.pem")
    _openssl("ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", encrypted)
    return encrypted


def _openssl(*args: str) -> None:
    subprocess.run(["openssl", *args], check=True, capture_output=True, timeout=60)
