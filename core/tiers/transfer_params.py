"""TransferParams: ``kv_transfer_params``, which clients carry from one engine to another.

P is the engine that computes a prompt, D the engine that continues the request. The fields are
named as in vLLM; fields that only foretoken has are in ``foretoken``. All fields are signed: a
client that could forge them could make an engine read any memory, and use any KV for a prompt.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ...radix_cache import HeldPages, PrefixCache
from ..interface.extras.request_extras import NO_TRANSFER, Transfer
from ..interface.extras.transfers import (
    PageOffer,
    PoolMemory,
    Refusal,
    Region,
)
from ..interface.request import Request
from .keys import PageKeys

VALID_SECONDS = 30  # time for which parameters are valid
NAME_CHARS = 64
MAC_PURPOSE = b"foretoken kv_transfer_params"

Address = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]


class OwnParams(Struct, forbid_unknown_fields=True, frozen=True):
    """The fields in ``foretoken``: location and identity of the pages.

    Byte strings are encoded as base64 or hex.
    """

    fingerprint: str  # hex; fingerprint of the KV
    key: str  # hex; key of the last page
    agent: str  # base64; metadata by which other processes can connect to the pool's process
    kind: Literal["DRAM", "VRAM"]
    parts: list[tuple[Address, Count]]
    words: Address
    slot: Count
    nonce: str  # hex, because not every reader of JSON supports integers of 63 bits
    until: int  # time of expiry in seconds since 1970
    mac: str = ""  # hex; signature of all other fields


class Params(Struct, frozen=True):
    """The fields of ``kv_transfer_params`` that D reads; routers may add other fields."""

    remote_request_id: Annotated[str, Meta(max_length=NAME_CHARS)]
    remote_block_ids: list[Count]
    foretoken: OwnParams


class TransferParams:
    """Writer of parameters for an engine that computes prompts, and reader for one that continues.

    Only the event loop's thread may call the methods. ``secret``: shared by the whole cluster.
    ``memory``: this engine's pool; None if the engine gives no pages. ``end_offer``: function that
    tells a peer that it may free the pages of an offer; None if the engine takes no pages.
    ``row_bytes``: bytes per row of each part of a page's record.
    """

    def __init__(
        self,
        secret: str,
        fingerprint: bytes,
        cache: PrefixCache,
        keys: PageKeys,
        *,
        memory: PoolMemory | None,
        end_offer: Callable[[PageOffer], None] | None,
        row_bytes: tuple[int, ...],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = hmac.digest(secret.encode(), MAC_PURPOSE, "sha256")
        self._fingerprint = fingerprint.hex()
        self._locks, self._keys = cache.transfers, keys
        self._page_size = cache.page_size
        self._memory, self._end_offer, self._row_bytes = memory, end_offer, row_bytes
        self._engine_id = "" if memory is None else hashlib.sha256(memory.agent).hexdigest()[:32]
        self._clock = clock

    # -- P --------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether no further page can be held."""
        return self._locks.is_full

    def is_prefill(self, params: Mapping[str, Any] | None) -> bool:
        """Whether ``params`` ask to compute a prompt for another engine, and this engine can."""
        has_pool = self._memory is not None
        return has_pool and params is not None and params.get("do_remote_decode") is True

    def is_held(self, part: HeldPages) -> bool:
        """Whether the pages of ``part`` are still held, so that another engine may read them."""
        return self._locks.is_held(part.name)

    def hold_part(self, request: Request) -> HeldPages | None:
        """Hold the computed pages of a prompt that another engine wants.

        Returns None if too little room would be left to hold the whole prompt. O(num_computed).
        """
        return self._locks.hold(
            request.tokens,
            request.num_computed,
            namespace=request.namespace,
            num_spare=request.prompt_len // self._page_size,
        )

    def write(self, request: Request, part: HeldPages | None = None) -> dict[str, Any]:
        """Return the parameters of an answer, with the held pages if any are held.

        ``part``: pages from `hold_part` to name instead of the pages of the whole prompt.
        """
        held, memory = part or request.transfer.handed, self._memory
        params: dict[str, Any] = {
            "do_remote_prefill": held is not None,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [],
            "remote_host": None,
            "remote_port": None,
        }
        if held is None or memory is None:
            return params
        own = OwnParams(
            fingerprint=self._fingerprint,
            key=self._keys.key(held.page_ids[-1]).hex(),
            agent=base64.b64encode(memory.agent).decode(),
            kind=memory.kind,
            parts=[(part.address, part.num_bytes) for part in memory.parts],
            words=memory.words,
            slot=held.slot,
            nonce=f"{held.nonce:x}",
            until=int(self._clock()) + VALID_SECONDS,
        )
        found = Params(held.name, held.page_ids.tolist(), own)
        signed = msgspec.structs.replace(own, mac=self._mac(found))
        return params | {
            "remote_request_id": found.remote_request_id,
            "remote_block_ids": found.remote_block_ids,
            "foretoken": msgspec.to_builtins(signed),
        }

    def drop(self, request: Request) -> None:
        """Free the held pages of a request whose answer no client receives."""
        request.transfer = msgspec.structs.replace(request.transfer, hands_over=False)
        if request.transfer.handed is not None:
            self.release(request.transfer.handed.name)

    def release(self, name: str) -> None:
        """Free the pages of a transfer that no engine reads; an unknown name is ignored."""
        self._locks.end(name)

    # -- D --------------------------------------------------------------------------------------

    def read(self, params: Mapping[str, Any] | None) -> Transfer:
        """Return the transfer that the parameters of a request ask for.

        Unusable parameters are counted and ignored; then the prompt is computed.
        """
        if not params:
            return NO_TRANSFER
        if self.is_prefill(params):
            return Transfer(hands_over=True)
        if params.get("do_remote_prefill") is not True:
            if params.get("do_remote_decode") is True:
                self._refuse("role")
            return NO_TRANSFER
        found = self._offer(params)
        if isinstance(found, PageOffer):
            return Transfer(offer=found)
        self._refuse(found)
        return NO_TRANSFER

    def check(self, offer: PageOffer, num_tokens: int) -> bool:
        """Whether an offer fits a prompt of ``num_tokens`` tokens; other offers are ended."""
        if len(offer.page_ids) <= max(0, num_tokens - 1) // self._page_size:
            return True
        self._refuse("out_of_range")
        self.end(offer)
        return False

    def end(self, offer: PageOffer) -> None:
        """Tell a peer that its offered pages will not be read: no request uses the offer."""
        if self._end_offer is not None:
            self._end_offer(offer)

    def _refuse(self, cause: Refusal) -> None:
        self._locks.refused[cause] += 1

    def _offer(self, params: Mapping[str, Any]) -> PageOffer | Refusal:
        if self._end_offer is None:
            return "role"
        try:
            found = msgspec.convert(params, Params)
            own = found.foretoken
            agent, key = base64.b64decode(own.agent, validate=True), bytes.fromhex(own.key)
            nonce = int(own.nonce, 16)
        except (msgspec.ValidationError, ValueError):
            return "unsigned"
        if not hmac.compare_digest(self._mac(found).encode(), own.mac.encode()):
            return "unsigned"
        if own.until < self._clock():
            return "expired"
        parts = tuple(Region(*part) for part in own.parts)
        memory = PoolMemory(agent, own.kind, parts, own.words)
        offer = PageOffer(
            found.remote_request_id, memory, key, found.remote_block_ids, own.slot, nonce
        )
        if own.fingerprint == self._fingerprint and self._rows_are_ours(parts):
            return offer if offer.page_ids else "out_of_range"
        self.end(offer)
        return "fingerprint"

    def _rows_are_ours(self, parts: tuple[Region, ...]) -> bool:
        return tuple(part.num_bytes for part in parts) == self._row_bytes

    def _mac(self, params: Params) -> str:
        """Return the signature of all fields except the signature, in hex."""
        unsigned = msgspec.structs.replace(params.foretoken, mac="")
        data = msgspec.json.encode(msgspec.structs.replace(params, foretoken=unsigned))
        return hmac.digest(self._key, data, "sha256").hex()
