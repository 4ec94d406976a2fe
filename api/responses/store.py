"""Responses that callers asked to have kept, in memory and in bounds."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw
from starlette.requests import Request

from ..errors import ApiError
from ..shapes import Body
from .schema import Item

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20
Owner = bytes
_decode_items = msgspec.json.Decoder(list[Item]).decode
_decode_bodies = msgspec.json.Decoder(list[dict[str, object]]).decode


@dataclass(frozen=True, slots=True)
class Kept:
    """One turn as JSON: its own input items alone, since those before it are kept themselves."""

    previous_id: str | None
    response: bytes
    inputs: bytes
    outputs: bytes
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return len(self.response) + len(self.inputs) + len(self.outputs)


@dataclass(slots=True)
class ResponseStore:
    """The last responses by owner and id; the least recently used goes first.

    Using a response counts as using those before it, which are needed to continue it. The newest
    is kept even if it exceeds ``max_bytes`` by itself.
    """

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    num_bytes: int = field(default=0, init=False)
    _kept: OrderedDict[tuple[Owner, str], Kept] = field(default_factory=OrderedDict, init=False)
    _places: dict[tuple[Owner, str], str] = field(default_factory=dict, init=False)  # of items

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def put(self, owner: Owner, response: Body, inputs: Sequence[Item]) -> None:
        """Keep a response with the items that it answers. O(turns of its conversation)."""
        response_id, previous_id = str(response["id"]), response["previous_response_id"]
        outputs = msgspec.json.encode(response["output"])
        known = [*inputs, *_decode_items(outputs)]
        kept = Kept(
            None if previous_id is None else str(previous_id),
            msgspec.json.encode(response),
            msgspec.json.encode(inputs),
            outputs,
            tuple(item.id for item in known if item.id is not None),
        )
        self._kept[owner, response_id] = kept
        self.num_bytes += kept.num_bytes
        for item_id in kept.item_ids:
            self._places[owner, item_id] = response_id
        self._touch(owner, response_id)
        self._shrink()

    def get(self, owner: Owner, response_id: str) -> Raw | None:
        """The response as it was sent."""
        found = self._kept.get((owner, response_id))
        return None if found is None else Raw(found.response)

    def delete(self, owner: Owner, response_id: str) -> bool:
        """Forget a response; what follows it can no longer be continued."""
        kept = self._kept.pop((owner, response_id), None)
        if kept is None:
            return False
        self.num_bytes -= kept.num_bytes
        for item_id in kept.item_ids:
            if self._places.get((owner, item_id)) == response_id:
                del self._places[owner, item_id]
        return True

    def history(self, owner: Owner, response_id: str) -> list[Item]:
        """The items of all turns up to a response, its output included.

        Raises `ApiError` 400 where one of them is not here.
        """
        items: list[list[Item]] = []
        for kept in reversed(self._turns(owner, response_id)):
            items += [_decode_items(kept.inputs), _decode_items(kept.outputs)]
        self._touch(owner, response_id)
        return [item for each in items for item in each]

    def inputs(self, owner: Owner, response_id: str) -> list[Body] | None:
        """The items that a response answers, those of the turns before it included."""
        if (owner, response_id) not in self._kept:
            return None
        last, *earlier = self._turns(owner, response_id)
        items: list[Body] = []
        for kept in reversed(earlier):
            items += _decode_bodies(kept.inputs) + _decode_bodies(kept.outputs)
        return items + _decode_bodies(last.inputs)

    def item(self, owner: Owner, item_id: str) -> Item | None:
        """An item of any kept turn."""
        response_id = self._places.get((owner, item_id))
        if response_id is None:
            return None
        kept = self._kept[owner, response_id]
        self._touch(owner, response_id)
        both = [*_decode_items(kept.inputs), *_decode_items(kept.outputs)]
        return next(item for item in both if item.id == item_id)

    def _turns(self, owner: Owner, response_id: str) -> list[Kept]:
        """A turn and those before it, the last first."""
        turns: list[Kept] = []
        wanted: str | None = response_id
        while wanted is not None:
            kept = self._kept.get((owner, wanted))
            if kept is None:
                raise _no_previous(wanted)
            turns.append(kept)
            wanted = kept.previous_id
        return turns

    def _touch(self, owner: Owner, response_id: str) -> None:
        path: list[tuple[Owner, str]] = []
        wanted: str | None = response_id
        while wanted is not None and (owner, wanted) in self._kept:
            path.append((owner, wanted))
            wanted = self._kept[owner, wanted].previous_id
        for place in reversed(path):
            self._kept.move_to_end(place)

    def _shrink(self) -> None:
        while len(self._kept) > self.max_responses or self.num_bytes > self.max_bytes:
            if len(self._kept) == 1:
                return
            self.delete(*next(iter(self._kept)))


def owner_of(request: Request, cache_salt: str | None) -> Owner:
    """Whose responses a caller may read: those of its key and of its salt."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    parts = (key, request.headers.get("x-api-key", ""), cache_salt)
    return hashlib.sha256(msgspec.json.encode(parts)).digest()  # keys are not kept


def _no_previous(response_id: str) -> ApiError:
    return ApiError(
        400,
        f"Previous response with id '{response_id}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
