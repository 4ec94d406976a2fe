"""Flushes that name namespaces, or groups of them."""

from __future__ import annotations

from array import array

import pytest

from foretoken.radix_cache import FlushedNamespaces, RadixTree


class Counted(str):
    """A namespace that counts its comparisons."""

    __slots__ = ()
    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return str.__eq__(self, other)


@pytest.mark.parametrize(
    ("named", "namespace", "is_flushed"),
    [
        ((), None, True),
        ((), "\0group\0a", True),
        ((None,), None, True),
        (("a",), None, False),
        ((None,), "\0group\0a", False),
        (("\0group\0a",), "\0group\0a", True),
        (("\0group",), "\0group\0a", True),
        (("\0group",), "\0group", True),
        (("\0group",), "\0groups\0a", False),
        (("\0group\0a",), "\0group\0b", False),
        (("a",), "a\0b", False),  # a caller's salt, which is in no group
    ],
)
def test_a_flush_drops_what_it_names_and_groups(
    named: tuple[str | None, ...], namespace: str | None, is_flushed: bool
) -> None:
    assert (namespace in FlushedNamespaces(named)) is is_flushed


def test_a_flush_of_many_namespaces_does_not_compare_each_leaf_with_each() -> None:
    tree = RadixTree(1)
    for number in range(50):
        tree.insert(array("q", [number]), array("q", [number]), namespace=Counted(f"leaf-{number}"))
    Counted.num_compared = 0
    assert tree.flush("leaf-7", *(f"other-{number}" for number in range(200))) == array("q", [7])
    assert Counted.num_compared < 200
