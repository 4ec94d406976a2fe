"""A bounded memory of recent prompts, to explain why a later one missed the cache."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from ....core.interface.extras.adapter import adapter_of, salt_of
from ....core.interface.request import Request, Usage
from ....radix_cache.namespaces import FlushedNamespaces
from ...parsing.reasoning import Thinking
from ...types.request_context import caller, owner_of
from ...types.shares import Owner, Shares

MAX_BYTES = 32 * 2**20
TOKEN_BYTES = 4
MAX_COMPARED = 256  # earlier prompts that one is compared with, the latest
MAX_ALIKE = 32  # prompts whose texts are compared, the latest
OVERHEAD = 2048  # bytes, about, of a remembered prompt with its usage, beside tokens and texts
Kind = Literal["tools", "system", "messages", "format", "prompt"]
Sliced = TypeVar("Sliced", str, "array[int]")
_json = msgspec.json.Encoder(order="deterministic")


class Part(NamedTuple):
    """A part of a body that is part of the prompt."""

    path: str  # as the body calls it, such as messages[3].content
    text: str
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptNote:
    """The parts of a prompt that are remembered besides its tokens.

    ``parts`` in the order of the prompt; without them differences are shown in the decoded tokens.
    ``cache_key`` is ``prompt_cache_key``: it is compared, but isolates nothing. ``thinking``: the
    marks of the model's thoughts.
    """

    parts: Sequence[Part] = ()
    model: str = ""
    cache_key: str | None = None
    thinking: Thinking | None = None
    num_bytes: int = field(init=False, repr=False, compare=False)  # about

    def __post_init__(self) -> None:
        """Count: a conversation of many messages is noted in a thread."""
        texts = sum(_num_bytes(part) for part in self.parts)
        names = sys.getsizeof(self.model) + sys.getsizeof(self.cache_key)
        object.__setattr__(self, "num_bytes", texts + names)


def _num_bytes(part: Part) -> int:
    return sys.getsizeof(part) + sys.getsizeof(part.path) + sys.getsizeof(part.text)


NO_NOTE = PromptNote()


def conversation_parts(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[object] = (),
    *,
    num_system: int = 0,
    format: object = None,
) -> list[Part]:
    """Return the parts of a conversation; objects are written as JSON.

    The first ``num_system`` messages are those that the body has as its ``system`` or
    ``instructions``, and not among its messages.
    """
    parts = [Part("tools", _text(tools), "tools")] if tools else []
    if format is not None:
        parts.append(Part("format", _text(format), "format"))
    for index, message in enumerate(messages):
        path = "system" if index < num_system else f"messages[{index - num_system}]"
        kind: Kind = "system" if message.get("role") in ("system", "developer") else "messages"
        for name, value in message.items():
            if value not in (None, "", []):
                parts.append(Part(f"{path}.{name}", _text(value), kind))
    return parts


def text_parts(prompt: str | Sequence[int]) -> list[Part]:
    """Return the parts of a prompt that is one text; none for token ids."""
    return [Part("prompt", prompt, "prompt")] if isinstance(prompt, str) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else _json.encode(value).decode()


@dataclass(slots=True, kw_only=True, eq=False)
class Remembered:
    """A prompt that is or was served; its usage grows while it is served."""

    response_id: str
    caller: bytes  # hash of an API key
    owner: Owner  # of the key and the salt
    namespace: str | None  # of the cache salt and the adapter
    tokens: bytes  # int32
    note: PromptNote
    time: float  # seconds, on the engine's clock
    reads: bool
    writes: bool
    serial: int  # order of arrival
    usage: Usage = field(repr=False)
    answers: list[bytes] = field(default_factory=list, repr=False)  # int32, of those that ended

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_bytes(self) -> int:
        """Approximate bytes that the entry occupies."""
        names = sys.getsizeof(self.response_id) + sys.getsizeof(self.namespace)
        answers = sum(map(len, self.answers))
        return OVERHEAD + len(self.tokens) + self.note.num_bytes + names + answers

    @property
    def num_compared_bytes(self) -> int:
        """Bytes of its tokens and texts, which a comparison reads at most."""
        return len(self.tokens) + self.note.num_bytes

    def ids(self, start: int, stop: int) -> list[int]:
        """Token ids of a span."""
        return ids_of(self.tokens[max(0, start) * TOKEN_BYTES : stop * TOKEN_BYTES])

    def is_of_other_salt(self, other: Remembered) -> bool:
        """Whether only the salts keep two prompts apart: both have the same adapter, or none."""
        mine, theirs = self.namespace, other.namespace
        return salt_of(mine) != salt_of(theirs) and adapter_of(mine) == adapter_of(theirs)

    def common_len(self, other: Remembered) -> int:
        """Leading tokens that two prompts share. O(tokens), at numpy's speed."""
        length = min(len(self.tokens), len(other.tokens))
        mine = np.frombuffer(self.tokens[:length], np.int32)
        unequal = mine != np.frombuffer(other.tokens[:length], np.int32)
        return int(unequal.argmax()) if unequal.any() else length // TOKEN_BYTES

    def is_like(self, other: Remembered) -> bool:
        """Whether the texts share at least half, counted from either end of each part.

        So a line that is new in every request does not hide the similarity. O(text).
        """
        theirs = {part.path: part.text for part in other.note.parts}
        total = sum(len(part.text) for part in self.note.parts)
        shared = sum(_shared(part.text, theirs.get(part.path, "")) for part in self.note.parts)
        return total > 0 and shared * 2 >= total


def _shared(first: str, second: str) -> int:
    """Characters that two texts have in common at the beginning and at the end."""
    front = common_len(first, second)
    bound = min(len(first), len(second)) - front
    return front + common_len(first[::-1][:bound], second[::-1][:bound])


def common_len(first: Sliced, second: Sliced) -> int:
    """Number of leading characters or token ids that both share, by bisection. O(len)."""
    same, bound = 0, min(len(first), len(second))
    while same < bound:
        middle = (same + bound + 1) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            bound = middle - 1
    return same


class PromptLog:
    """The last prompts of each owner, ``max_bytes`` in all; evicted as in `Shares`."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._shares: Shares[str] = Shares(max_bytes)
        self._prompts: dict[str, Remembered] = {}  # by response id, oldest first
        self._by_owner: dict[Owner, dict[str, Remembered]] = {}  # those that were to be written
        self._by_caller: dict[bytes, dict[str, Remembered]] = {}
        self._num_recorded = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def record(self, response_id: str, request: Request, note: PromptNote, now: float) -> None:
        """Remember a prompt that is submitted. O(prompt).

        A prompt that is not to be written is explained only to a caller that names its response.
        """
        self._forget(response_id)
        self._num_recorded += 1
        prompt = Remembered(
            response_id=response_id,
            caller=caller(),
            owner=owner_of(salt_of(request.namespace)),
            namespace=request.namespace,
            tokens=_int32(request.tokens[: request.prompt_len]),
            note=note,
            time=now,
            reads=request.cache.read and request.sampling.params.prompt_logprobs is None,
            writes=request.cache.write,
            serial=self._num_recorded,
            usage=request.usage,
        )
        self._prompts[response_id] = prompt
        self._by_caller.setdefault(prompt.caller, {})[response_id] = prompt
        if prompt.writes:
            self._by_owner.setdefault(prompt.owner, {})[response_id] = prompt
        self._shares.add(prompt.owner, response_id, prompt.num_bytes)
        self._shrink()

    def add_answer(self, response_id: str, token_ids: Sequence[int]) -> None:
        """Remember an answer to a prompt that is still remembered. O(token ids)."""
        prompt = self._prompts.get(response_id)
        if prompt is None:
            return
        prompt.answers.append(_int32(array("q", token_ids)))
        self._shares.remove(response_id)
        self._shares.add(prompt.owner, response_id, prompt.num_bytes)
        self._shrink()

    def _shrink(self) -> None:
        while (excess := self._shares.excess()) is not None:
            self._forget(excess)

    def find(self, response_id: str) -> Remembered | None:
        """Return the prompt of a response, unless it is forgotten. The caller checks who owns
        it.
        """
        return self._prompts.get(response_id)

    def earlier(self, prompt: Remembered) -> list[Remembered]:
        """Return the owner's last prompts before this one of its adapter, the latest first.

        Among the last `MAX_COMPARED` of the owner.

        O(those), beside the owner's later prompts.
        """
        of_owner = _last_before(prompt, self._by_owner.get(prompt.owner, {}))
        return [each for each in of_owner if each.namespace == prompt.namespace]

    def has_in_other_salt(self, prompt: Remembered, num_tokens: int) -> bool:
        """Whether the caller has an earlier prompt under another salt that begins so.

        Among the caller's last `MAX_COMPARED` prompts before it; O(those), as `earlier`. It is for
        counts only: a caller may be a gateway, whose salts keep its tenants apart.
        """
        probe = prompt.tokens[: num_tokens * TOKEN_BYTES]
        return any(
            other.tokens.startswith(probe) and prompt.is_of_other_salt(other)
            for other in _last_before(prompt, self._by_caller.get(prompt.caller, {}))
        )

    def flush(self, *namespaces: str | None) -> None:
        """Forget the prompts of these cache salts, of all when none is named. O(prompts)."""
        flushed = FlushedNamespaces(namespaces)
        for prompt in list(self._prompts.values()):
            if prompt.namespace in flushed:
                self._forget(prompt.response_id)

    def flush_prefix(self, tokens: array[int], namespace: str | None) -> None:
        """Forget the prompts of a cache salt that begin with these tokens. O(prompts)."""
        front = _int32(tokens)
        for prompt in list(self._prompts.values()):
            if prompt.namespace == namespace and prompt.tokens.startswith(front):
                self._forget(prompt.response_id)

    def _forget(self, response_id: str) -> None:
        prompt = self._prompts.pop(response_id, None)
        if prompt is None:
            return
        self._shares.remove(response_id)
        for groups, name in ((self._by_owner, prompt.owner), (self._by_caller, prompt.caller)):
            group = groups.get(name, {})
            if group.pop(response_id, None) is not None and not group:
                del groups[name]


def _last_before(prompt: Remembered, group: dict[str, Remembered]) -> Iterable[Remembered]:
    """Return the last of a group, which is in order of arrival, that came before a prompt."""
    earlier = (other for other in reversed(group.values()) if other.serial < prompt.serial)
    return islice(earlier, MAX_COMPARED)


def most_similar(
    prompt: Remembered, earlier: Sequence[Remembered], at_least: int
) -> Remembered | None:
    """Return the earlier prompt with the longest common prefix, the latest of equals.

    When none has the first ``at_least`` tokens, the latest whose texts are mostly the same.
    O(prompts), for most differ at once, and O(prompt) for each that is nearer than the last.
    """
    best, probe = None, prompt.tokens[: at_least * TOKEN_BYTES]
    for other in earlier:
        if other.tokens.startswith(probe):
            best, length = other, prompt.common_len(other)
            probe = prompt.tokens[: (length + 1) * TOKEN_BYTES]
            if length == prompt.num_tokens:
                break
    return best or next((o for o in earlier[:MAX_ALIKE] if prompt.is_like(o)), None)


def ids_of(tokens: bytes) -> list[int]:
    """Token ids that are kept as int32."""
    ids: list[int] = np.frombuffer(tokens, np.int32).tolist()
    return ids


def _int32(tokens: array[int]) -> bytes:
    return np.frombuffer(tokens.tobytes(), np.int64).astype(np.int32).tobytes()
