"""``--ssl-certfile`` and ``--ssl-keyfile``: what cannot be used ends the start with one line.

A client over TLS: tests/server/test_cli_contract.py.
"""

from __future__ import annotations

import shutil

import pytest

from foretoken.api.cli import commands
from support.certificates import make_certificate, make_encrypted_key

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the files")


def failed(capsys, *args: str) -> str:
    assert commands.main(["serve", "builtin", "--port", "0", *args]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("foretoken serve: ssl_")
    return error


@pytest.fixture(autouse=True)
def loads_nothing(monkeypatch):
    def build(*_args: object) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr("foretoken.api.runtime.engine_client._build", build)


def test_files_that_are_missing_are_named(capsys, tmp_path) -> None:
    cert, key = make_certificate(tmp_path)
    gone = str(tmp_path / "gone.pem")
    assert f"ssl_certfile: {gone}: No such file" in failed(capsys, "--ssl-certfile", gone)
    args = ("--ssl-certfile", cert, "--ssl-keyfile", gone)
    assert f"ssl_keyfile: {gone}: No such file" in failed(capsys, *args)
    assert "ssl_keyfile needs ssl_certfile" in failed(capsys, "--ssl-keyfile", key)


def test_files_that_do_not_go_together_are_named(capsys, tmp_path) -> None:
    cert, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path / "other")
    args = ("--ssl-certfile", cert, "--ssl-keyfile", other)
    assert "key values mismatch" in failed(capsys, *args)
    assert cert in failed(capsys, "--ssl-certfile", cert), "without its key"
    assert key in failed(capsys, "--ssl-certfile", key)


def test_a_key_with_a_password_is_refused_and_none_is_asked_for(capsys, tmp_path) -> None:
    cert, key = make_certificate(tmp_path)
    encrypted = make_encrypted_key(key, tmp_path)
    error = failed(capsys, "--ssl-certfile", cert, "--ssl-keyfile", encrypted)
    assert "the key must have no password" in error
