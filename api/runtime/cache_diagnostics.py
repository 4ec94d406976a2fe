"""Why a prompt missed the cache.

A prompt is compared with the most similar earlier prompt of the same API key and cache salt, so no
tenant learns of another's prompts. A request may also name the response to compare with.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, get_args

import msgspec

from ...core.interface.extras.adapter import salt_of
from ..parsing.reasoning import Thinking
from ..types.results import Body
from .conversation.normalize import RULES, TOOL_ORDER, steady
from .conversation.prompt_history import (
    Kind,
    Part,
    PromptLog,
    Remembered,
    common_len,
    ids_of,
    most_similar,
)

AROUND = 30  # characters that are shown on each side of a difference
AROUND_TOKENS = 8
TAIL_TOKENS = 32  # around the place where an answer and its thought begin
MOST_TOKENS = 4  # times the tokens of an answer that its text is encoded to, at most
Cause = Literal[
    "hit",  # all there was to read was read; the rest is new
    "changed",  # it differs from the prompt that it is compared with
    "volatile_line",  # it differs in a line of the system prompt that changes by itself
    "tools_changed",  # it differs in its tools
    "reencoded",  # the other's answer came back as text, which has other tokens
    "thinking_stripped",  # a thought of an answer before is not in it any more
    "evicted",  # it was cached, and had to make room
    "flushed",  # it was cached, and someone emptied the cache
    "late",  # a tier had it, and computing it took less time
    "state_not_kept",  # its KV was cached, the recurrent state behind it was not
    "unsound",  # a tier had it, and what it gave was damaged or missing
    "not_written",  # the other prompt was not cached: not yet, or it asked not to be
    "not_read",  # this one asked not to read, or for log-probabilities of the prompt
    "other_salt",  # the response that was named, of the same key, has another cache salt
    "too_short",  # no whole page before the last token
    "first_seen",  # nothing like it is remembered
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
LOSSES: Mapping[str, str] = {
    "changed": "the prompt is another one",
    "volatile_line": "a line of the system prompt changes by itself",
    "tools_changed": "the tools are others",
    "reencoded": "an answer came back as text, which has other tokens",
    "thinking_stripped": "the chat template left a thought out",
    "evicted": "the rest had to make room",
    "flushed": "the rest was flushed",
    "late": "the rest came too late from a tier",
    "state_not_kept": "the recurrent state behind the rest was not kept",
    "unsound": "a tier gave damaged pages",
    "not_written": "the rest was not in the cache yet",
    "not_read": "the request read no more",
    "other_salt": "the earlier response has another cache salt",
}
"""The causes by which tokens that might have been reused were computed, in words."""
CHANGED: tuple[Cause, ...] = ("changed", "volatile_line", "tools_changed")
NUMBER = re.compile(r"\w*\d[\w.:+-]*")  # counters, times, ids: a word with a digit
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first part in which two prompts differ, with the text around; None: missing."""

    path: str
    kind: Kind
    before: str | None
    now: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChange:
    """The first token in which a prompt differs from another one and its answer."""

    position: int  # in the prompt
    before_id: int
    before: str
    now_id: int
    now: str

    def body(self) -> Body:
        """Return the part of the body of an explanation."""
        before, now = (self.before_id, self.before), (self.now_id, self.now)
        pairs = {"before": before, "now": now}
        tokens = {name: {"id": each[0], "text": each[1]} for name, each in pairs.items()}
        return {"position": self.position, **tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The cached tokens of a prompt, and the reason for those that were not cached."""

    cause: Cause
    prompt_tokens: int
    cached_tokens: int
    compared_with: str | None = None  # id of a response
    compared_tokens: int = 0  # of its prompt
    reusable_tokens: int = 0  # at the beginning of both prompts
    first_difference: Difference | None = None
    first_token: TokenChange | None = None  # in which they differ
    rule: str | None = None  # of ``--normalize``, which would have made both prompts one there
    seconds_ago: float | None = None  # when it was evicted or flushed, if that is known
    model_changed: bool = False
    cache_key_changed: bool = False
    # Whole pages whose KV was cached, and the tokens behind which a recurrent state was kept.
    pages_matched: int | None = None
    resumed_at: int | None = None

    @property
    def missed_tokens(self) -> int:
        """Tokens behind the first difference, which no cache can have; 0 without a comparison."""
        return 0 if self.compared_with is None else self.prompt_tokens - self.reusable_tokens

    def body(self) -> Body:
        """Return the body of ``usage.cache_explanation`` and ``GET /cache/explain``."""
        change = self.first_difference
        shown = change and {"path": change.path, "before": change.before, "now": change.now}
        return {
            "cause": self.cause,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "compared_with": self.compared_with,
            "reusable_tokens": self.reusable_tokens,
            "missed_tokens": self.missed_tokens,
            "first_difference": shown,
            "first_token": None if self.first_token is None else self.first_token.body(),
            "rule": self.rule,
            "seconds_ago": None if self.seconds_ago is None else round(self.seconds_ago, 3),
            "model_changed": self.model_changed,
            "prompt_cache_key_changed": self.cache_key_changed,
            "pages_matched": self.pages_matched,
            "resumed_at": self.resumed_at,
        }


class Explainer:
    """Explains cache hits from a log of prompts. ``page_size``: tokens of a page."""

    def __init__(self, log: PromptLog, page_size: int, decode: Decode) -> None:
        self._log = log
        self._page_size = page_size
        self._decode = decode

    def explain(self, prompt: Remembered, previous: Remembered | None = None) -> Explanation:
        """Explain an admitted prompt, compared with ``previous`` or the most similar one."""
        if previous is not None and previous.namespace != prompt.namespace:
            found = replace(_unexplained(prompt), compared_with=previous.response_id)
            if salt_of(previous.namespace) != salt_of(prompt.namespace):
                return replace(found, cause="other_salt")
            return replace(found, cause="first_seen", model_changed=True)  # by another adapter
        return self.explain_among(prompt, [] if previous else self._log.earlier(prompt), previous)

    def explain_among(
        self,
        prompt: Remembered,
        earlier: Sequence[Remembered],
        previous: Remembered | None = None,
    ) -> Explanation:
        """`explain` with the ``earlier`` prompts of its owner; any thread may do so.

        O(prompts + prompt), and O(its text) for each of a few prompts where none begins as it does.
        """
        found = _unexplained(prompt)
        other = previous or most_similar(prompt, earlier, self._page_size)
        why: Cause | None = None
        if other is not None:
            found, why = self._compare(found, prompt, other)
        cause, loss = self._cause(found, why, prompt, other), prompt.usage.cache_loss
        if cause == "changed" and other is not None:
            cause, rule = change_of(other.note.parts, prompt.note.parts)
            found = replace(found, rule=rule)
        if cause == "state_not_kept":
            matched = prompt.usage.matched_tokens // self._page_size
            found = replace(found, pages_matched=matched, resumed_at=found.cached_tokens)
        ago = prompt.time - loss.time if loss is not None and cause == loss.cause else None
        return replace(found, cause=cause, seconds_ago=ago if ago is None else max(0.0, ago))

    def find(self, response_id: str, previous_id: str | None = None) -> Explanation | None:
        """`explain` by ids; None if one is unknown or belongs to another caller."""
        prompt = self._log.find(response_id)
        previous = None if previous_id is None else self._log.find(previous_id)
        if prompt is None or (previous is None and previous_id is not None):
            return None
        if previous is not None and previous.caller != prompt.caller:
            return None
        return self.explain(prompt, previous)

    def _compare(
        self, found: Explanation, prompt: Remembered, other: Remembered
    ) -> tuple[Explanation, Cause | None]:
        """Note the tokens that they share and the first that differs; also its cause, if known."""
        reusable, why, change = prompt.common_len(other), None, None
        if reusable == other.num_tokens:
            why, change = self._of_answers(prompt, other)
        elif reusable < prompt.num_tokens:
            before = other.ids(reusable, reusable + TAIL_TOKENS)
            why, change = self._departure(prompt, reusable, before)
        if change is not None:
            reusable = change.position
        return replace(
            found,
            compared_with=other.response_id,
            compared_tokens=other.num_tokens,
            reusable_tokens=reusable,
            first_difference=self._difference(prompt, other, reusable),
            first_token=change,
            model_changed=prompt.note.model != other.note.model,
            cache_key_changed=prompt.note.cache_key != other.note.cache_key,
        ), why

    def _cause(
        self, found: Explanation, why: Cause | None, prompt: Remembered, other: Remembered | None
    ) -> Cause:
        known = self.known_cause(prompt)
        if known is not None:
            return known
        if other is None:
            return "first_seen"
        common = self._whole(min(found.reusable_tokens, prompt.num_tokens - 1))
        if found.cached_tokens < common:
            return "evicted" if _was_written(other, prompt) else "not_written"
        if why is not None:
            return why
        return "hit" if _grew(prompt, other, found.reusable_tokens) else "changed"

    def known_cause(self, prompt: Remembered) -> Cause | None:
        """Return the cause that needs no comparison with another prompt, None where it needs one.

        O(1).
        """
        readable = self._whole(prompt.num_tokens - 1)
        if not readable:
            return "too_short"
        if prompt.usage.cached_tokens >= readable:
            return "hit"
        if not prompt.reads:
            return "not_read"
        loss = prompt.usage.cache_loss
        return None if loss is None else loss.cause

    def _of_answers(
        self, prompt: Remembered, other: Remembered
    ) -> tuple[Cause | None, TokenChange | None]:
        """Return the cause and the place where a prompt that goes on from another leaves its
        answer.

        Nothing where the answer is there as its tokens, or is another one. O(answer).
        """
        start = other.num_tokens
        for data in other.answers:
            answer = ids_of(data)
            now = prompt.ids(start, start + MOST_TOKENS * len(answer))
            at = common_len(array("q", answer), array("q", now))
            if at >= min(len(answer), len(now)):
                return None, None
            why, change = self._departure(prompt, start + at, answer[at:])
            said = self._decode(answer).rstrip()
            if why is not None or (said and self._decode(now).startswith(said)):
                return why or "reencoded", change
        return None, None

    def _departure(
        self, prompt: Remembered, position: int, before: Sequence[int]
    ) -> tuple[Cause | None, TokenChange]:
        """Return the tokens where a prompt differs from another, and why, if it lost a thought
        there.

        ``before``: tokens of the other from there on.
        """
        now = prompt.ids(position, position + TAIL_TOKENS)
        change = TokenChange(
            position=position,
            before_id=before[0],
            before=self._decode(before[:1]),
            now_id=now[0],
            now=self._decode(now[:1]),
        )
        marks = prompt.note.thinking
        if marks is None:
            return None, change
        head = prompt.ids(position - TAIL_TOKENS, position)
        texts = [self._decode([*head, *ids]) for ids in (before[:TAIL_TOKENS], now)]
        is_lost = _loses_thought(marks, self._decode(head), *texts)
        return ("thinking_stripped" if is_lost else None), change

    def _whole(self, num_tokens: int) -> int:
        return num_tokens // self._page_size * self._page_size

    def _difference(self, now: Remembered, before: Remembered, at: int) -> Difference | None:
        """Return the difference of the parts, or else of the tokens."""
        is_same_talk = _extends(now.note.parts, before.note.parts)
        if not (is_same_talk and at < before.num_tokens - TAIL_TOKENS):
            found = first_difference(before.note.parts, now.note.parts)
            if found is not None or at == now.num_tokens == before.num_tokens:
                return found
        first, last = at - AROUND_TOKENS, at + AROUND_TOKENS
        texts = [self._decode(each.ids(first, last))[: 2 * AROUND] for each in (before, now)]
        return Difference("prompt", "prompt", *texts)


def _was_written(other: Remembered, prompt: Remembered) -> bool:
    """Whether ``other`` was published when ``prompt`` came: its prompt was computed by then."""
    usage = other.usage
    wait = usage.time_to_first_token
    if not wait and usage.cached_tokens + usage.cache_write_tokens:  # no token was wanted
        wait = usage.total_time
    return other.writes and 0 < wait <= prompt.time - other.time


def _grew(now: Remembered, before: Remembered, reusable: int) -> bool:
    """Whether one prompt extends the other, as conversations do, but for how its answer opens."""
    return reusable == before.num_tokens or (
        reusable >= before.num_tokens - TAIL_TOKENS and _extends(now.note.parts, before.note.parts)
    )


def _extends(now: Sequence[Part], before: Sequence[Part]) -> bool:
    return bool(before) and list(now[: len(before)]) == list(before)


def _loses_thought(marks: Thinking, head: str, before: str, now: str) -> bool:
    """Whether a thought begins behind ``head`` in the text before, and not in the one now.

    Both texts have the head. A template that opened the thought may write an empty one now.
    """
    if _begins(marks.begin, head, before):
        return not _begins(marks.begin, head, now)
    is_open = head.rstrip().endswith(marks.begin + marks.label)
    return is_open and _begins(marks.end, head, now) and not _begins(marks.end, head, before)


def _begins(mark: str, head: str, text: str) -> bool:
    """Whether a mark is the next text behind ``head``, which may have the beginning of it."""
    at = text.find(mark, max(0, len(head) - len(mark) + 1))
    return at >= 0 and not text[len(head) : at].strip()


def _unexplained(prompt: Remembered) -> Explanation:
    cached = prompt.usage.cached_tokens
    return Explanation(cause="first_seen", prompt_tokens=prompt.num_tokens, cached_tokens=cached)


def first_pair(
    before: Sequence[Part], now: Sequence[Part]
) -> tuple[Part | None, Part | None] | None:
    """Return the first parts that differ, None for one that is missing; None if all are equal."""
    for old, new in zip_longest(before, now):
        if old != new:
            return old, new
    return None


def change_of(before: Sequence[Part], now: Sequence[Part]) -> tuple[Cause, str | None]:
    """Return the cause of a prompt that differs, and the rule of ``--normalize`` for it.

    O(text).
    """
    old, new = first_pair(before, now) or (None, None)
    if "tools" in {part.kind for part in (old, new) if part is not None}:
        if old is None or new is None or old.kind != new.kind:
            return "tools_changed", None
        is_order = _sorted(old.text) == _sorted(new.text)
        return "tools_changed", TOOL_ORDER if is_order else None
    if old is None or new is None or old.path != new.path or new.kind != "system":
        return "changed", None
    for rule in RULES:
        if steady(old.text, [rule])[0] == steady(new.text, [rule])[0]:
            return "volatile_line", rule.name
    is_steady = NUMBER.sub("0", steady(old.text)[0]) == NUMBER.sub("0", steady(new.text)[0])
    return ("volatile_line" if is_steady else "changed"), None


def _sorted(tools: str) -> list[bytes]:
    return sorted(msgspec.json.encode(tool) for tool in msgspec.json.decode(tools))


def first_difference(before: Sequence[Part], now: Sequence[Part]) -> Difference | None:
    """Return the first part that differs; None if all are equal."""
    match first_pair(before, now):
        case Part() as old, Part() as new if old.path == new.path:
            at = common_len(old.text, new.text)
            return Difference(new.path, new.kind, _around(old.text, at), _around(new.text, at))
        case old, Part() as new:
            return Difference(new.path, new.kind, old and _begin(old), _begin(new))
        case Part() as gone, None:
            return Difference(gone.path, gone.kind, _begin(gone), None)
        case _:
            return None


def _begin(part: Part) -> str:
    return part.text[: 2 * AROUND]


def _around(text: str, at: int) -> str:
    return text[max(0, at - AROUND) : at + AROUND]


# -- the fields of the clients' own APIs --------------------------------------------------------


def openai_diagnostics(found: Explanation | None) -> Body:
    """``prompt_cache_diagnostics`` of a Responses body; None: the named response is unknown.

    Reasons that this API lacks (evicted, flushed) are "unavailable". All are in ``explanation``.
    """
    if found is None:
        return {"type": "comparison_response_not_found"}
    if found.cause == "hit":
        return {"type": "cache_hit", "explanation": found.body()}
    reason = _openai_reason(found)
    if reason is None:
        return {"type": "unavailable", "explanation": found.body()}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": found.prompt_tokens - found.reusable_tokens,
        "comparison_reusable_tokens": found.reusable_tokens,
        "explanation": found.body(),
    }


def _openai_reason(found: Explanation) -> str | None:
    if found.model_changed:
        return "model_changed"
    if found.cause not in CHANGED:
        return None
    kind = found.first_difference.kind if found.first_difference is not None else "prompt"
    return {"tools": "tools_changed", "format": "text_format_changed"}.get(kind, "input_changed")


def anthropic_diagnostics(found: Explanation | None) -> Body | None:
    """``diagnostics`` of a message; None for ``found``: the named message is unknown.

    Null means that nothing diverged. Reasons that this API lacks are "unavailable".
    """
    if found is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if found.cause == "hit":
        return None
    if found.cause not in CHANGED and not found.model_changed:
        return {"cache_miss_reason": {"type": "unavailable"}}
    missed = max(0, min(found.compared_tokens, found.prompt_tokens) - found.cached_tokens)
    reason = {"type": _anthropic_type(found), "cache_missed_input_tokens": missed}
    return {"cache_miss_reason": reason}


def _anthropic_type(found: Explanation) -> str:
    if found.model_changed:
        return "model_changed"
    kind = found.first_difference.kind if found.first_difference is not None else "messages"
    return {"tools": "tools_changed", "system": "system_changed"}.get(kind, "messages_changed")
