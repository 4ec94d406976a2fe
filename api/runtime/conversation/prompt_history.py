"""A bounded log of recent prompts, which is used to explain why later prompts missed the cache."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
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
MAX_COMPARED = 256  # maximum number of latest prompts to compare with
MAX_ALIKE = 32  # maximum number of latest prompts whose texts are compared
OVERHEAD = 2048  # approximate bytes per prompt, without its tokens and texts
Kind = Literal["tools", "system", "messages", "format", "prompt"]
Sliced = TypeVar("Sliced", str, "array[int]")
_json = msgspec.json.Encoder(order="deterministic")


class Part(NamedTuple):
    """A field of a body that contributes to the prompt."""

    path: str  # path in the body, such as messages[3].content
    text: str
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptNote:
    """Facts about a prompt that are remembered in addition to its tokens.

    ``parts`` are in prompt order; if there are none, differences are shown in decoded tokens.
    ``cache_key``: the request's ``prompt_cache_key``, which is compared but does not isolate
    prompts. ``thinking``: the delimiters of the model's reasoning. ``options``: options of the chat
    template, as JSON by name.
    """

    parts: Sequence[Part] = ()
    model: str = ""
    cache_key: str | None = None
    thinking: Thinking | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    num_bytes: int = field(init=False, repr=False, compare=False)  # approximate size

    def __post_init__(self) -> None:
        """Compute the size now, since notes of long conversations are made in a worker thread."""
        texts = chain(self.parts, chain.from_iterable(self.parts), (self.model, self.cache_key))
        num_bytes = sum(map(sys.getsizeof, texts))
        if self.options:
            num_bytes += sum(map(sys.getsizeof, chain(self.options, self.options.values())))
        object.__setattr__(self, "num_bytes", num_bytes)


NO_NOTE = PromptNote()
# options that change only the end of a prompt
OPENING = ("add_generation_prompt", "continue_final_message")


def conversation_parts(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[object] = (),
    *,
    num_system: int = 0,
    format: object = None,
) -> list[Part]:
    """Return the parts of a conversation. Objects are written as JSON.

    ``num_system``: number of leading messages from the body's ``system`` or ``instructions`` field.
    """
    parts = [Part("tools", _text(tools), "tools")] if tools else []
    if format is not None:
        parts.append(Part("format", _text(format), "format"))
    for index, message in enumerate(messages):
        path = "system" if index < num_system else f"messages[{index - num_system}]"
        kind: Kind = "system" if message.get("role") in ("system", "developer") else "messages"
        parts += [
            Part(f"{path}.{name}", value if type(value) is str else _text(value), kind)
            for name, value in message.items()
            if value not in (None, "", [])
        ]
    return parts


def option_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Return options of a chat template as JSON, by name; options in `OPENING` are left out."""
    if not options:
        return {}
    return {name: _text(value) for name, value in options.items() if name not in OPENING}


def text_parts(prompt: str | Sequence[int]) -> list[Part]:
    """Return the parts of a plain prompt: its text, or no parts for token ids."""
    return [Part("prompt", prompt, "prompt")] if isinstance(prompt, str) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else _json.encode(value).decode()


@dataclass(slots=True, kw_only=True, eq=False)
class Remembered:
    """A prompt that was submitted. ``usage`` changes while its request runs."""

    response_id: str
    caller: bytes  # hash of the API key
    owner: Owner  # hash of the API key and the cache salt
    namespace: str | None  # cache namespace: cache salt and adapter
    tokens: bytes  # int32 token ids
    note: PromptNote
    time: float  # seconds, on the engine's clock
    reads: bool
    writes: bool
    serial: int  # order of arrival
    usage: Usage = field(repr=False)
    # int32 token ids of finished answers
    answers: list[bytes] = field(default_factory=list, repr=False)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_bytes(self) -> int:
        """Approximate size of the entry in bytes."""
        names = sys.getsizeof(self.response_id) + sys.getsizeof(self.namespace)
        answers = sum(map(len, self.answers))
        return OVERHEAD + len(self.tokens) + self.note.num_bytes + names + answers

    @property
    def num_compared_bytes(self) -> int:
        """Maximum number of bytes of tokens and texts that a comparison with the prompt reads."""
        return len(self.tokens) + self.note.num_bytes

    def ids(self, start: int, stop: int) -> list[int]:
        """Return the token ids of a range."""
        return ids_of(self.tokens[max(0, start) * TOKEN_BYTES : stop * TOKEN_BYTES])

    def is_of_other_salt(self, other: Remembered) -> bool:
        """Whether two prompts differ in their cache salts but not in their adapters."""
        mine, theirs = self.namespace, other.namespace
        return salt_of(mine) != salt_of(theirs) and adapter_of(mine) == adapter_of(theirs)

    def common_len(self, other: Remembered) -> int:
        """Return the number of leading tokens that two prompts share. O(tokens), vectorised."""
        length = min(len(self.tokens), len(other.tokens))
        mine = np.frombuffer(self.tokens[:length], np.int32)
        unequal = mine != np.frombuffer(other.tokens[:length], np.int32)
        return int(unequal.argmax()) if unequal.any() else length // TOKEN_BYTES

    def is_like(self, other: Remembered) -> bool:
        """Whether the texts share at least half of their characters.

        Common characters are counted from both ends of each part, so a line that changes with every
        request does not hide the similarity. O(text).
        """
        theirs = {part.path: part.text for part in other.note.parts}
        total = sum(len(part.text) for part in self.note.parts)
        shared = sum(_shared(part.text, theirs.get(part.path, "")) for part in self.note.parts)
        return total > 0 and shared * 2 >= total


def _shared(first: str, second: str) -> int:
    """Return the number of characters in the common prefix and the common suffix."""
    front = common_len(first, second)
    bound = min(len(first), len(second)) - front
    return front + common_len(first[::-1][:bound], second[::-1][:bound])


def common_len(first: Sliced, second: Sliced) -> int:
    """Return the length of the common prefix, found by bisection. O(len)."""
    same, bound = 0, min(len(first), len(second))
    while same < bound:
        middle = (same + bound + 1) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            bound = middle - 1
    return same


class PromptLog:
    """The latest prompts of each owner, at most ``max_bytes`` together.

    The memory is divided among owners by `Shares`, which decides what to forget when it is full.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._shares: Shares[str] = Shares(max_bytes)
        self._prompts: dict[str, Remembered] = {}  # by response id, oldest first
        self._by_owner: dict[Owner, dict[str, Remembered]] = {}  # prompts that may be cached
        self._by_caller: dict[bytes, dict[str, Remembered]] = {}
        self._num_recorded = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def record(self, response_id: str, request: Request, note: PromptNote, now: float) -> None:
        """Remember a submitted prompt. O(prompt).

        A prompt that must not be cached is compared with later prompts only if a caller names its
        response.
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
        """Remember an answer to a prompt, unless the prompt was evicted. O(token ids)."""
        prompt = self._prompts.get(response_id)
        if prompt is None:
            return
        answer = array("i", token_ids).tobytes()
        prompt.answers.append(answer)
        self._shares.grow(response_id, len(answer))
        self._shrink()

    def _shrink(self) -> None:
        while (excess := self._shares.excess()) is not None:
            self._forget(excess)

    def find(self, response_id: str) -> Remembered | None:
        """Return the prompt of a response, else None. The caller must check the owner."""
        return self._prompts.get(response_id)

    def earlier(self, prompt: Remembered) -> list[Remembered]:
        """Return the owner's earlier prompts with the same adapter, latest first.

        Considers the owner's last `MAX_COMPARED` prompts before this one. O(`MAX_COMPARED` + later
        prompts).
        """
        of_owner = _last_before(prompt, self._by_owner.get(prompt.owner, {}))
        return [each for each in of_owner if each.namespace == prompt.namespace]

    def has_in_other_salt(self, prompt: Remembered, num_tokens: int) -> bool:
        """Whether the caller has an earlier prompt with the same beginning under another salt.

        Considers the caller's last `MAX_COMPARED` prompts before this one. The result may only be
        counted, not shown: a caller may be a gateway that separates its tenants by salts.
        """
        probe = prompt.tokens[: num_tokens * TOKEN_BYTES]
        return any(
            other.tokens.startswith(probe) and prompt.is_of_other_salt(other)
            for other in _last_before(prompt, self._by_caller.get(prompt.caller, {}))
        )

    def flush(self, *namespaces: str | None) -> None:
        """Forget the prompts in ``namespaces``; all if no namespace is given. O(prompts)."""
        flushed = FlushedNamespaces(namespaces)
        for prompt in list(self._prompts.values()):
            if prompt.namespace in flushed:
                self._forget(prompt.response_id)

    def flush_prefix(self, tokens: array[int], namespace: str | None) -> None:
        """Forget the prompts of a namespace that begin with these tokens. O(prompts)."""
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
    """Yield the last `MAX_COMPARED` prompts of a group that arrived before ``prompt``.

    The latest one comes first.
    """
    earlier = (other for other in reversed(group.values()) if other.serial < prompt.serial)
    return islice(earlier, MAX_COMPARED)


def most_similar(
    prompt: Remembered, earlier: Sequence[Remembered], at_least: int
) -> Remembered | None:
    """Return the earlier prompt with the longest common prefix; the latest one on a tie.

    If no prompt shares the first ``at_least`` tokens, return the latest with mostly the same text,
    or None. O(prompts), plus O(prompt) for each better match.
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
    """Return the token ids stored as int32 bytes."""
    ids: list[int] = np.frombuffer(tokens, np.int32).tolist()
    return ids


def _int32(tokens: array[int]) -> bytes:
    return np.frombuffer(tokens.tobytes(), np.int64).astype(np.int32).tobytes()
