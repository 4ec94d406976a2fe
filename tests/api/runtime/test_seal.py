"""Seal: what is sealed comes back for its owner alone, and only unaltered."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.api.runtime.compaction.seal import BrokenSeal, Seal

OWNER, DATA = b"owner", b"a summary"


@given(data=st.binary(max_size=300), owner=st.binary(max_size=40))
def test_sealed_data_is_opened_by_the_same_secret(data, owner):
    text = Seal("secret").close(owner, data)
    assert Seal("secret").open(owner, text) == data
    assert data not in base64.urlsafe_b64decode(text)[49:] or len(data) < 4


def test_the_same_data_is_sealed_differently_each_time():
    seal = Seal("secret")
    assert seal.close(OWNER, DATA) != seal.close(OWNER, DATA)


@pytest.mark.parametrize(
    ("seal", "owner"),
    [(Seal("other"), OWNER), (Seal(), OWNER), (Seal(""), OWNER), (Seal("secret"), b"else")],
)
def test_another_secret_or_owner_opens_nothing(seal, owner):
    text = Seal("secret").close(OWNER, DATA)
    with pytest.raises(BrokenSeal):
        seal.open(owner, text)


def test_each_changed_byte_is_noticed():
    seal = Seal("secret")
    sealed = bytearray(base64.urlsafe_b64decode(seal.close(OWNER, DATA)))
    for index in range(len(sealed)):
        changed = bytes([*sealed[:index], sealed[index] ^ 1, *sealed[index + 1 :]])
        with pytest.raises(BrokenSeal):
            seal.open(OWNER, base64.urlsafe_b64encode(changed).decode())


@pytest.mark.parametrize("text", ["", "A", "AAAA", "ä", "a b", "AQ==", "x" * 200, "=" * 8])
def test_what_was_never_sealed_is_refused(text):
    with pytest.raises(BrokenSeal):
        Seal("secret").open(OWNER, text)


def test_a_part_of_a_sealed_text_is_refused():
    text = Seal("secret").close(OWNER, DATA)
    for end in range(len(text)):
        with pytest.raises(BrokenSeal):
            Seal("secret").open(OWNER, text[:end])
