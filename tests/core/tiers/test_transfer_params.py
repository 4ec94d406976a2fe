"""kv_transfer_params: written by P, carried by anyone, read by D, and whose they are is checked."""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from foretoken.core.interface.extras.request_extras import NO_TRANSFER, Transfer
from foretoken.core.interface.extras.transfers import PageOffer, PoolMemory, Region
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.tiers.keys import PageKeys, chain_keys, root_key
from foretoken.core.tiers.transfer_params import VALID_SECONDS, TransferParams
from foretoken.radix_cache import PrefixCache

FINGERPRINT = b"f" * 32
MEMORY = PoolMemory(b"\0agent", "DRAM", (Region(2**46, 96), Region(2**45, 8)), 2**44)
TOKENS = array("q", range(43))


class Side:
    """One engine's end of transfers."""

    def __init__(
        self,
        *,
        gives: bool = False,
        takes: bool = False,
        secret: str = "secret",
        fingerprint: bytes = FINGERPRINT,
        row_bytes: tuple[int, ...] = (96, 8),
    ) -> None:
        self.now = 1000.0
        self.ended: list[PageOffer] = []
        self.cache = PrefixCache(64, 4)
        keys = PageKeys(fingerprint, 64, 4)
        self.cache.tree.add_observer(keys)
        self.params = TransferParams(
            secret,
            fingerprint,
            self.cache,
            keys,
            memory=MEMORY if gives else None,
            end_offer=self.ended.append if takes else None,
            row_bytes=row_bytes,
            clock=lambda: self.now,
        )

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.cache.transfers.refused)


def computed(side: Side, tokens: array[int] = TOKENS, namespace: str | None = None) -> Request:
    """A request whose prompt was computed for another engine."""
    lease = side.cache.acquire(tokens, namespace=namespace)
    assert side.cache.extend(lease, len(tokens))
    side.cache.release(lease, tokens, len(tokens))
    sampling = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=len(tokens))
    request = Request(request_id="cmpl-1", tokens=tokens, sampling=sampling, namespace=namespace)
    held = side.cache.transfers.hold(tokens, len(tokens) - 1, namespace=namespace)
    request.transfer = Transfer(handed=held)
    return request


def carried(params: dict[str, Any]) -> Any:
    """The parameters as a router passes them on."""
    return json.loads(json.dumps(params | {"a_routers_own": {"x": 1}}))


@pytest.mark.parametrize("namespace", [None, "salt"])
def test_what_p_writes_d_reads(namespace: str | None) -> None:
    p, d = Side(gives=True), Side(takes=True)
    request = computed(p, namespace=namespace)
    params = p.params.write(request)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    offer = d.params.read(carried(params)).offer
    held = request.transfer.handed
    assert offer is not None
    assert held is not None
    assert (offer.name, list(offer.page_ids)) == (held.name, held.page_ids.tolist())
    assert (offer.memory, offer.word, offer.nonce) == (MEMORY, 2**44 + 8 * held.slot, held.nonce)
    assert offer.key == [*chain_keys(root_key(FINGERPRINT, namespace), TOKENS, 4)][-1]
    assert d.params.check(offer, len(TOKENS))
    assert (d.refused, d.ended) == ({}, [])


def test_a_prompt_of_which_nothing_is_held_has_parameters_that_name_no_pages() -> None:
    p, d = Side(gives=True), Side(takes=True)
    params = p.params.write(computed(p, array("q", range(4))))
    assert (params["do_remote_prefill"], params["remote_block_ids"]) == (False, [])
    assert d.params.read(carried(params)) is NO_TRANSFER
    assert d.refused == {}


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(params: dict[str, Any]) -> None:
        *names, last = path
        for name in names:
            params = params[name]
        params[last] = value

    return change


FORGERIES = {
    "another page": put("remote_block_ids", value=[1] * 10),
    "no page": put("remote_block_ids", value=[]),
    "negative pages": put("remote_block_ids", value=[-1] * 10),
    "pages of text": put("remote_block_ids", value="0"),
    "another transfer": put("remote_request_id", value="x"),
    "another address": put("foretoken", "parts", value=[[1, 96], [2, 8]]),
    "an address too many": put("foretoken", "words", value=2**64),
    "another agent": put("foretoken", "agent", value="AAAA"),
    "no base64": put("foretoken", "agent", value="%"),
    "another key": put("foretoken", "key", value="00"),
    "a longer time": put("foretoken", "until", value=10**9),
    "another nonce": put("foretoken", "nonce", value="1"),
    "no nonce": put("foretoken", "nonce", value="xyz"),
    "another slot": put("foretoken", "slot", value=9),
    "another fingerprint": put("foretoken", "fingerprint", value="00"),
    "no signature": put("foretoken", "mac", value=""),
    "a signature that is no ASCII": put("foretoken", "mac", value="\u00e9"),
    "one of vLLM's": lambda params: params.pop("foretoken"),
    "nothing of ours": put("foretoken", value=7),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_whatever_is_changed_on_the_way_is_refused(forgery: str) -> None:
    p, d = Side(gives=True), Side(takes=True)
    params = carried(p.params.write(computed(p)))
    assert d.params.read(copy.deepcopy(params)).offer is not None
    FORGERIES[forgery](params)
    assert d.params.read(params) is NO_TRANSFER
    assert (d.refused, d.ended) == ({"unsigned": 1}, [])


def test_another_secret_signs_nothing() -> None:
    p, d = Side(gives=True, secret="another"), Side(takes=True)
    assert d.params.read(carried(p.params.write(computed(p)))) is NO_TRANSFER
    assert d.refused == {"unsigned": 1}


@pytest.mark.parametrize(
    "options", [{"fingerprint": b"g" * 32}, {"row_bytes": (96,)}, {"row_bytes": (96, 9)}], ids=str
)
def test_pages_that_something_else_computed_are_refused_and_freed(options: Any) -> None:
    p, d = Side(gives=True), Side(takes=True, **options)
    request = computed(p)
    assert d.params.read(carried(p.params.write(request))) is NO_TRANSFER
    assert d.refused == {"fingerprint": 1}
    held = request.transfer.handed
    assert [each.name for each in d.ended] == [held and held.name]


def test_parameters_are_good_for_a_while() -> None:
    p, d = Side(gives=True), Side(takes=True)
    params = carried(p.params.write(computed(p)))
    d.now += VALID_SECONDS
    assert d.params.read(params).offer is not None
    d.now += 1
    assert d.params.read(params) is NO_TRANSFER
    assert d.refused == {"expired": 1}


def test_more_pages_than_the_prompt_has_are_refused_and_freed() -> None:
    p, d = Side(gives=True), Side(takes=True)
    offer = d.params.read(carried(p.params.write(computed(p)))).offer
    assert offer is not None
    assert d.params.check(offer, 41)
    assert not d.params.check(offer, 40), "the last token is computed"
    assert (d.refused, d.ended) == ({"out_of_range": 1}, [offer])


def test_a_role_does_what_it_is_for() -> None:
    p, d, both = Side(gives=True), Side(takes=True), Side(gives=True, takes=True)
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    assert p.params.read(wanted).hands_over
    assert both.params.read(wanted).hands_over
    assert d.params.read(wanted) is NO_TRANSFER
    assert d.refused == {"role": 1}
    params = carried(p.params.write(computed(p)))
    assert p.params.read(params) is NO_TRANSFER
    assert p.refused == {"role": 1}
    assert both.params.read(params).offer is not None
    for nothing in (None, {}, {"do_remote_prefill": "yes"}, {"x": 1}):
        assert both.params.read(nothing) is NO_TRANSFER
    assert both.refused == {}


def test_pages_of_a_transfer_without_a_reader_are_freed_by_its_name() -> None:
    p = Side(gives=True)
    name = p.params.write(computed(p))["remote_request_id"]
    p.params.release("unknown")
    assert len(p.cache.transfers) == 1
    p.params.release(name)
    assert len(p.cache.transfers) == 0


def test_pages_of_an_answer_that_reaches_nobody_are_free() -> None:
    p = Side(gives=True)
    request = computed(p)
    p.params.drop(request)
    p.params.drop(request)
    assert len(p.cache.transfers) == 0
    request.transfer = NO_TRANSFER
    p.params.drop(request)
    assert not request.transfer.hands_over


def test_parts_of_a_prompt_that_is_computed_are_held_one_after_the_other() -> None:
    p, d = Side(gives=True), Side(takes=True)
    request = computed(p)
    p.params.drop(request)
    request.transfer, request.num_computed = NO_TRANSFER, 22
    part = p.params.hold_part(request)
    assert part is not None
    assert len(part.page_ids) == 5, "whole pages"
    offer = d.params.read(carried(p.params.write(request, part))).offer
    assert offer is not None
    assert offer.key == [*chain_keys(root_key(FINGERPRINT, None), TOKENS, 4)][4]
    request.num_computed = 30
    assert p.params.is_held(part), "it is still read"
    p.params.release(part.name)
    assert not p.params.is_held(part)
    later = p.params.hold_part(request)
    assert later is not None
    assert len(later.page_ids) == 7
    p.cache.transfers.end(later.name)
    p.cache.transfers.max_pages = 16
    assert p.params.hold_part(request) is None, "the whole prompt would have no room"
