"""Explanations of prefix cache misses.

A prompt is compared with the most similar earlier prompt of the same API key and cache salt, so no
tenant learns about another tenant's prompts. A request may also name the response to compare with.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Literal, get_args

import msgspec

from ...core.interface.extras.adapter import salt_of
from ..parsing.reasoning import Thinking
from ..text.executor import Worker
from ..text.tokenizer import APART_BYTES
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

AROUND = 30  # number of characters shown on each side of a difference
AROUND_TOKENS = 8
TAIL_TOKENS = 32  # number of tokens examined where an answer or its reasoning begins
MOST_TOKENS = 4  # maximum number of prompt tokens compared per token of an answer
Cause = Literal[
    "hit",  # every cached page was read; the rest is new
    "changed",  # the prompt differs from the earlier prompt
    "volatile_line",  # a system prompt line that changes with every request differs
    "tools_changed",  # the tools differ
    "reencoded",  # an earlier answer was sent back as text and encodes to other tokens
    "thinking_stripped",  # the reasoning of an earlier answer was removed
    "evicted",  # the pages were evicted
    "flushed",  # the pages were flushed by a caller
    "late",  # recomputing was faster than loading from a tier
    "state_not_kept",  # the KV was cached, but the recurrent state at its end was not
    "unsound",  # a tier returned damaged or missing pages
    "not_written",  # the earlier prompt was not cached yet, or its request disabled cache writes
    "not_read",  # the request disabled cache reads or asked for prompt logprobs
    "other_salt",  # the response to compare with, of the same API key, has another cache salt
    "too_short",  # the prompt has no whole page before its last token
    "first_seen",  # no similar prompt is known
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
LOSSES: Mapping[str, str] = {
    "changed": "the prompt differs",
    "volatile_line": "a line of the system prompt changes with every request",
    "tools_changed": "the tools differ",
    "reencoded": "an answer was sent back as text and encodes to other tokens",
    "thinking_stripped": "the chat template removed the reasoning of an answer",
    "evicted": "the rest was evicted",
    "flushed": "the rest was flushed",
    "late": "loading the rest from a tier would have taken too long",
    "state_not_kept": "the recurrent state at the end of the rest was not kept",
    "unsound": "a tier returned damaged pages",
    "not_written": "the rest was not cached yet",
    "not_read": "the request disabled cache reads",
    "other_salt": "the earlier response has another cache salt",
}
"""Causes for which reusable tokens were computed again, in words."""
CHANGED: tuple[Cause, ...] = ("changed", "volatile_line", "tools_changed")
EFFORT = frozenset({"reasoning_effort", "enable_thinking"})  # options that set the effort
NUMBER = re.compile(r"\w*\d[\w.:+-]*")  # a word with a digit: counters, times, ids
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first part in which two prompts differ, with the text around the difference.

    ``before`` or ``now`` is None if that prompt lacks the part.
    """

    path: str
    kind: Kind
    before: str | None
    now: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChange:
    """The first token in which a prompt differs from an earlier prompt and its answer."""

    position: int  # index of the token in the prompt
    before_id: int
    before: str
    now_id: int
    now: str

    def body(self) -> Body:
        """Return the change as it appears in the body of an explanation."""
        before, now = (self.before_id, self.before), (self.now_id, self.now)
        pairs = {"before": before, "now": now}
        tokens = {name: {"id": each[0], "text": each[1]} for name, each in pairs.items()}
        return {"position": self.position, **tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The number of cached tokens of a prompt, and why its other tokens were not cached."""

    cause: Cause
    prompt_tokens: int
    cached_tokens: int
    compared_with: str | None = None  # response id of the earlier prompt
    compared_tokens: int = 0  # tokens of the earlier prompt
    reusable_tokens: int = 0  # common prefix of both prompts, in tokens
    first_difference: Difference | None = None
    first_token: TokenChange | None = None  # first differing token
    # name of the ``--normalize`` rule that would have removed the difference
    rule: str | None = None
    seconds_ago: float | None = None  # seconds since the eviction or flush, if known
    model_changed: bool = False
    cache_key_changed: bool = False
    options_changed: frozenset[str] = frozenset()  # names of the chat template's options
    is_shorter: bool = False  # whether the prompt has fewer parts than the compared one
    # pages_matched: whole pages with cached KV. resumed_at: tokens before the kept recurrent state.
    pages_matched: int | None = None
    resumed_at: int | None = None

    @property
    def missed_tokens(self) -> int:
        """Number of tokens from the first difference on; 0 if no other prompt was compared."""
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
    """Explains cache hits and misses from a log of prompts. ``page_size`` is in tokens."""

    def __init__(self, log: PromptLog, page_size: int, decode: Decode) -> None:
        self._log = log
        self._page_size = page_size
        self._decode = decode

    def explain(self, prompt: Remembered, previous: Remembered | None = None) -> Explanation:
        """Explain a submitted prompt by comparing it with ``previous``.

        If ``previous`` is None, the most similar earlier prompt is used.
        """
        if previous is not None and previous.namespace != prompt.namespace:
            found = replace(_unexplained(prompt), compared_with=previous.response_id)
            if salt_of(previous.namespace) != salt_of(prompt.namespace):
                return replace(found, cause="other_salt")
            # the other prompt used another adapter
            return replace(found, cause="first_seen", model_changed=True)
        return self.explain_among(prompt, [] if previous else self._log.earlier(prompt), previous)

    def explain_among(
        self,
        prompt: Remembered,
        earlier: Sequence[Remembered],
        previous: Remembered | None = None,
    ) -> Explanation:
        """Explain a prompt by comparing it with ``previous``.

        If ``previous`` is None, the most similar prompt of ``earlier`` is used. May run in any
        thread. O(prompts + prompt), and O(text) for each of a few prompts if none shares a prefix.
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
        """Explain the prompt of a response.

        Return None if an id is unknown, or if the responses belong to different callers.
        """
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
        """Return ``found`` with the common prefix and the first difference of the prompts.

        Also return the cause of the cache miss, if the comparison shows it, else None.
        """
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
            options_changed=frozenset(
                name for name, _ in prompt.note.options.items() ^ other.note.options.items()
            ),
            is_shorter=len(prompt.note.parts) < len(other.note.parts),
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
        """Return the cause if it is known without a comparison of prompts, else None. O(1)."""
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
        """Return why and where a follow-up prompt departs from the answer to the earlier prompt.

        Both are None if the prompt contains all tokens of the answer, or if it continues with
        other text than the answer. O(answer).
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
        """Return the cause and the token change of a difference at ``position``.

        The cause is "thinking_stripped" if the prompt lost reasoning there, else None. ``before``:
        the tokens of the earlier prompt or of its answer from ``position`` on.
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
        """Return the first difference of the parts, or of the decoded tokens if no part differs."""
        is_same_talk = _extends(now.note.parts, before.note.parts)
        if not (is_same_talk and at < before.num_tokens - TAIL_TOKENS):
            found = first_difference(before.note.parts, now.note.parts)
            if found is not None or at == now.num_tokens == before.num_tokens:
                return found
        first, last = at - AROUND_TOKENS, at + AROUND_TOKENS
        texts = [self._decode(each.ids(first, last))[: 2 * AROUND] for each in (before, now)]
        return Difference("prompt", "prompt", *texts)


def _was_written(other: Remembered, prompt: Remembered) -> bool:
    """Whether ``other`` had already been computed and cached when ``prompt`` arrived."""
    usage = other.usage
    wait = usage.time_to_first_token
    if not wait and usage.cached_tokens + usage.cache_write_tokens:  # computed without an answer
        wait = usage.total_time
    return other.writes and 0 < wait <= prompt.time - other.time


def _grew(now: Remembered, before: Remembered, reusable: int) -> bool:
    """Whether the prompt ``now`` continues the prompt ``before``.

    The last tokens of ``before``, which open its answer, may differ.
    """
    return reusable == before.num_tokens or (
        reusable >= before.num_tokens - TAIL_TOKENS and _extends(now.note.parts, before.note.parts)
    )


def _extends(now: Sequence[Part], before: Sequence[Part]) -> bool:
    return bool(before) and list(now[: len(before)]) == list(before)


def _loses_thought(marks: Thinking, head: str, before: str, now: str) -> bool:
    """Whether reasoning begins after ``head`` in the text ``before`` but not in the text ``now``.

    Both texts begin with ``head``. If ``head`` opens the reasoning and ``now`` closes it at once,
    the reasoning counts as removed.
    """
    if _begins(marks.begin, head, before):
        return not _begins(marks.begin, head, now)
    is_open = head.rstrip().endswith(marks.begin + marks.label)
    return is_open and _begins(marks.end, head, now) and not _begins(marks.end, head, before)


def _begins(mark: str, head: str, text: str) -> bool:
    """Whether ``mark`` follows ``head`` in ``text``, or straddles the end of ``head``.

    White space before the delimiter is ignored. ``text`` begins with ``head``.
    """
    at = text.find(mark, max(0, len(head) - len(mark) + 1))
    return at >= 0 and not text[len(head) : at].strip()


def _unexplained(prompt: Remembered) -> Explanation:
    cached = prompt.usage.cached_tokens
    return Explanation(cause="first_seen", prompt_tokens=prompt.num_tokens, cached_tokens=cached)


def first_pair(
    before: Sequence[Part], now: Sequence[Part]
) -> tuple[Part | None, Part | None] | None:
    """Return the first pair of parts that differ; None if all parts are equal.

    A part of the pair is None if its prompt has fewer parts.
    """
    for old, new in zip_longest(before, now):
        if old != new:
            return old, new
    return None


def change_of(before: Sequence[Part], now: Sequence[Part]) -> tuple[Cause, str | None]:
    """Return the cause of a difference, and the ``--normalize`` rule that would remove it.

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
    """Return the first differing part with the text around it; None if all parts are equal."""
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


# maximum number of comparisons that wait for the thread; further misses are not counted by cause
MAX_COMPARISONS = 8


class MissCauses:
    """Counts prompts by the cause of their cache miss, which a comparison with others may show."""

    def __init__(self, prompts: PromptLog) -> None:
        self.counts: dict[str, int] = dict.fromkeys(CAUSES, 0)  # number of prompts by cause
        self._prompts = prompts
        self._tasks: set[asyncio.Task[None]] = set()
        # A separate thread, so that tokenization does not wait for comparisons.
        self._worker = Worker("foretoken-causes")

    def count(self, prompt: Remembered, explainer: Explainer, page_size: int) -> None:
        """Count the cause of a prompt's cache miss.

        If it needs a comparison with earlier prompts, that runs in the background.
        """
        known = explainer.known_cause(prompt)
        if known is not None:
            self.counts[known] += 1
            return
        task = asyncio.create_task(self._compare(prompt, explainer, page_size))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(self, prompt: Remembered, explainer: Explainer, page_size: int) -> None:
        """Count the cause that a comparison with earlier prompts shows.

        A long comparison runs in a thread. If too many comparisons wait for it, nothing is counted.
        """
        earlier = self._prompts.earlier(prompt)
        explain = partial(explainer.explain_among, prompt, earlier)
        if sum(each.num_compared_bytes for each in (prompt, *earlier)) <= APART_BYTES:
            found = explain()
        elif self._worker.num_waiting < MAX_COMPARISONS:
            found = await asyncio.wrap_future(self._worker.submit(explain))
        else:
            return
        is_new = found.cause == "first_seen"
        if is_new and self._prompts.has_in_other_salt(prompt, page_size):
            self.counts["other_salt"] += 1
        else:
            self.counts[found.cause] += 1

    def close(self) -> None:
        """Cancel the comparisons, and end their thread."""
        for task in self._tasks:
            task.cancel()
        self._worker.close()


# -- fields of the providers' own APIs ------------------------------------------------------------


def openai_diagnostics(found: Explanation | None) -> Body:
    """Return the ``prompt_cache_diagnostics`` of a Responses body.

    ``found``: the explanation; None if the response to compare with is unknown. Causes that
    OpenAI's API lacks, such as evicted, are reported as "unavailable"; the field ``explanation``
    names them.
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
        # Another key is another session, whose pins do not keep these pages.
        is_other = found.cache_key_changed and found.cause == "evicted"
        return "prompt_cache_key_changed" if is_other else None
    kind = _kind(found)
    if kind == "prompt" and found.options_changed & EFFORT:
        return "reasoning_effort_changed"
    if kind == "messages" and found.is_shorter:
        return "context_compacted"
    return {"tools": "tools_changed", "format": "text_format_changed"}.get(kind, "input_changed")


def _kind(found: Explanation) -> Kind:
    """Return the kind of the first part that differs; "prompt" if no part does."""
    return "prompt" if found.first_difference is None else found.first_difference.kind


def anthropic_diagnostics(found: Explanation | None) -> Body | None:
    """Return the ``diagnostics`` of an Anthropic message; None if the prompts do not diverge.

    ``found``: the explanation; None if the message to compare with is unknown. Causes that
    Anthropic's API lacks are reported as "unavailable", as are changes of other fields, such as
    ``thinking``.
    """
    if found is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if found.cause == "hit":
        return None
    is_option = _kind(found) == "prompt" and bool(found.options_changed)
    if not found.model_changed and (found.cause not in CHANGED or is_option):
        return {"cache_miss_reason": {"type": "unavailable"}}
    missed = max(0, min(found.compared_tokens, found.prompt_tokens) - found.cached_tokens)
    reason = {"type": _anthropic_type(found), "cache_missed_input_tokens": missed}
    return {"cache_miss_reason": reason}


def _anthropic_type(found: Explanation) -> str:
    if found.model_changed:
        return "model_changed"
    known = {"tools": "tools_changed", "system": "system_changed"}
    return known.get(_kind(found), "messages_changed")
