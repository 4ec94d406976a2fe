"""Responses kept in memory for clients to continue them, limited in time and in total size."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import msgspec
from msgspec import Raw
from msgspec.structs import asdict

from ...serving.errors import ApiError
from ...types.shares import Owner, Shares
from .answers import ResponseBody
from .bodies import AnswerItem, Item
from .items import kept_items

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20
MAX_SECONDS = 3600.0  # seconds since the last use
OVERHEAD = 1024  # approximate bytes per response, without its texts
ITEM_BYTES = 256  # approximate bytes of the index entry of an item
Key = tuple[Owner, str]
_decode_items = msgspec.json.Decoder(list[Item]).decode


@dataclass(frozen=True, slots=True)
class Kept:
    """One turn as JSON, with its own input items. Earlier turns are stored separately."""

    previous_id: str | None
    response: bytes
    inputs: bytes
    outputs: bytes
    answer_ids: bytes  # int32 token ids of all outputs
    item_ids: tuple[str, ...]
    is_shown: bool = True  # False: clients can only continue it, not read it

    @property
    def num_bytes(self) -> int:
        """Approximate size in bytes, including the item index."""
        texts = len(self.response) + len(self.inputs) + len(self.outputs) + len(self.answer_ids)
        return OVERHEAD + texts + sum(ITEM_BYTES + len(each) for each in self.item_ids)

    def items(self) -> list[Item]:
        """Return the input items followed by the output items."""
        return _decode_items(self.inputs) + _decode_items(self.outputs)

    def turn(self) -> list[Item]:
        """Return the input and output items. The first output item holds the answer's token ids."""
        outputs = _decode_items(self.outputs)
        if outputs and self.answer_ids:
            ids = array("i", self.answer_ids).tolist()
            outputs[0] = AnswerItem(**asdict(outputs[0]), answer_ids=ids)
        return _decode_items(self.inputs) + outputs


class ResponseStore:
    """Recent responses by owner and id, in a bounded memory that `Shares` divides among owners.

    Using a response also counts as using the responses before it, which are needed to continue it.
    A single response is kept even if it exceeds ``max_bytes``. A response that was not used for
    ``max_seconds`` is dropped.
    """

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock, self._max_seconds = clock, max_seconds
        # time of the last use; least recently used first
        self._used: OrderedDict[Key, float] = OrderedDict()
        self._kept: dict[Key, Kept] = {}
        self._ids_by_item: dict[Key, str] = {}  # response id by item id
        self._shares: Shares[Key] = Shares(max_bytes, max_responses)

    @property
    def num_bytes(self) -> int:
        """Approximate size of all responses in bytes."""
        return self._shares.num_bytes

    def __len__(self) -> int:
        """Number of stored responses."""
        return len(self._kept)

    def put(
        self,
        owner: Owner,
        response: ResponseBody,
        inputs: Sequence[Item],
        answer_ids: Sequence[int] = (),
        *,
        is_shown: bool = True,
    ) -> None:
        """Store a response with its input items. O(items of its conversation).

        An input item whose id already occurs in the conversation gets a new id. ``answer_ids``:
        token ids of the output, if they can be rendered in place of its text. ``is_shown``: whether
        `get` and `inputs` find the response.
        """
        response_id, previous_id = response.id, response.previous_response_id
        inputs = _renamed(inputs, self._item_ids(owner, previous_id))
        known = [*inputs, *response.output]
        kept = Kept(
            previous_id,
            msgspec.json.encode(response),
            msgspec.json.encode(inputs),
            msgspec.json.encode(response.output),
            array("i", answer_ids).tobytes(),
            tuple(item.id for item in known if item.id is not None),
            is_shown,
        )
        self.delete(owner, response_id)
        self._expire()
        self._kept[owner, response_id] = kept
        self._shares.add(owner, (owner, response_id), kept.num_bytes)
        for item_id in kept.item_ids:
            self._ids_by_item[owner, item_id] = response_id
        self._touch(owner, response_id)
        self._shrink()

    def get(self, owner: Owner, response_id: str) -> Raw | None:
        """Return the response as it was sent; None if it is unknown."""
        self._expire()
        found = self._kept.get((owner, response_id))
        return None if found is None or not found.is_shown else Raw(found.response)

    def delete(self, owner: Owner, response_id: str) -> bool:
        """Delete a response. Return whether it was stored. Later responses can no longer be
        continued.
        """
        kept = self._kept.pop((owner, response_id), None)
        if kept is None:
            return False
        self._shares.remove((owner, response_id))
        self._used.pop((owner, response_id), None)
        for item_id in kept.item_ids:
            if self._ids_by_item.get((owner, item_id)) == response_id:
                del self._ids_by_item[owner, item_id]
        return True

    def history(self, owner: Owner, response_id: str) -> list[Item]:
        """Return the items of all turns up to a response, including its output and token ids.

        Raises `ApiError` 400 if one of the turns is no longer stored.
        """
        self._expire()
        items: list[Item] = []
        for kept in reversed(self._turns(owner, response_id)):
            items += kept.turn()
        self._touch(owner, response_id)
        return items

    def inputs(self, owner: Owner, response_id: str) -> list[Item] | None:
        """Return the input items of a response, including earlier turns; None if it is unknown.

        Turns before one that is no longer stored are left out.
        """
        self._expire()
        found = self._kept.get((owner, response_id))
        if found is None or not found.is_shown:
            return None
        last, *earlier = self._path(owner, response_id)
        items: list[Item] = []
        for kept in reversed(earlier):
            items += kept.items()
        return items + _decode_items(last.inputs)

    def item(self, owner: Owner, item_id: str) -> Item | None:
        """Return an item of any stored turn; None if it is unknown."""
        self._expire()
        response_id = self._ids_by_item.get((owner, item_id))
        if response_id is None:
            return None
        kept = self._kept[owner, response_id]
        self._touch(owner, response_id)
        return next(item for item in kept.items() if item.id == item_id)

    def _turns(self, owner: Owner, response_id: str) -> list[Kept]:
        """Return a turn and all turns before it, latest first.

        Raises `ApiError` if one of them is no longer stored.
        """
        turns = self._path(owner, response_id)
        missing = turns[-1].previous_id if turns else response_id
        if missing is not None:
            raise _no_previous(missing)
        return turns

    def _path(self, owner: Owner, response_id: str | None) -> list[Kept]:
        """Return a turn and the stored turns before it, latest first."""
        turns: list[Kept] = []
        wanted = response_id
        while wanted is not None and (kept := self._kept.get((owner, wanted))) is not None:
            turns.append(kept)
            wanted = kept.previous_id
        return turns

    def _item_ids(self, owner: Owner, response_id: str | None) -> set[str]:
        return {each for kept in self._path(owner, response_id) for each in kept.item_ids}

    def _touch(self, owner: Owner, response_id: str) -> None:
        turns = self._path(owner, response_id)
        ids = [response_id, *(kept.previous_id for kept in turns if kept.previous_id is not None)]
        now = self._clock()
        for each in reversed(ids[: len(turns)]):
            self._shares.touch((owner, each))
            self._used[owner, each] = now
            self._used.move_to_end((owner, each))

    def _expire(self) -> None:
        """Delete responses that were not used for too long. O(deleted)."""
        oldest = self._clock() - self._max_seconds
        while self._used and (first := next(iter(self._used.items())))[1] <= oldest:
            self.delete(*first[0])

    def _shrink(self) -> None:
        while len(self._kept) > 1 and (excess := self._shares.excess()) is not None:
            self.delete(*excess)


def _renamed(items: Sequence[Item], taken: set[str]) -> list[Item]:
    """Return the items with unique ids, which pagination requires."""
    renamed: list[Item] = []
    for item in items:
        if item.id in taken:
            [item] = kept_items([msgspec.structs.replace(item, id=None)])
        if item.id is not None:
            taken.add(item.id)
        renamed.append(item)
    return renamed


def _no_previous(response_id: str) -> ApiError:
    return ApiError(
        400,
        f"Previous response with id '{response_id}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
