"""LiveRequest: a request between its caller and the replica that computes it.

The replica decides the tokens and the end. The front has the text, the stream, and the usage summed
over all replicas that served the request.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import TypeVar

from ....core.engine.inbox import TokenStream
from ....core.errors import ForetokenError
from ....core.interface.request import Delta, FinishReason, Request, Usage
from ...types.results import Body, add_counts
from ..wire.forms import usage_of
from ..wire.messages import Drop

logger = logging.getLogger(__name__)
MAX_LOSSES = 3  # losses after which a request is ended, since it may cause them
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    """The KV of a prompt that one replica holds for another one."""

    transfer: bytes  # parameters for reading the KV, JSON
    holder: bytes  # peer that holds the KV until it is read or dropped
    drop: Drop  # message by which the holder frees the KV


class LiveRequest:
    """A request that has not ended. Only `Dispatcher` sends it to replicas."""

    def __init__(self, request: Request, session: str | None, now: float) -> None:
        self.request = request
        self.session = session
        self.stream = TokenStream(request)
        self.num_losses = 0
        self.is_aborted = False
        self.is_prefilling = False  # a prefill replica computes its prompt
        self.was_prefilled = False  # prefill on another replica was tried; it is tried once
        self.held: HeldPrompt | None = None  # KV of the prompt, until another replica reads it
        self.reader: bytes | None = None  # peer that reads the prompt's KV as it is computed
        self.part: HeldPrompt | None = None  # the latest part of the prompt sent to the reader
        self.waits_since = now  # start of its wait for a replica
        self._sent = now
        self._before: Usage | None = None  # usage on the lost replicas
        request.arrival_time = now
        request.usage.prompt_tokens = request.num_given
        request.usage.image_tokens = sum(image.num_rows for image in request.extras.images)

    def elapsed(self, now: float) -> float:
        """Return the seconds since the request's arrival."""
        return now - self.request.arrival_time

    def is_late(self, now: float) -> bool:
        """Whether the request's deadline has passed."""
        deadline = self.request.deadline
        return deadline is not None and self.elapsed(now) >= deadline

    def describe(self, now: float) -> Body:
        """Describe the request for a dump: its numbers of tokens, its age in seconds, and how many
        replicas that computed it were lost.
        """
        return {
            "id": self.request.request_id,
            "prompt_tokens": self.request.num_given,
            "output_tokens": len(self.request.tokens) - self.request.num_given,
            "age_seconds": self.elapsed(now),
            "losses": self.num_losses,
        }

    @property
    def may_be_prefilled(self) -> bool:
        """Whether a prefill replica may compute the prompt for the replica of the answer."""
        request, sampling = self.request, self.request.sampling
        is_plain = sampling.pooling is None and sampling.params.prompt_logprobs is None
        is_new = not (self.was_prefilled or request.num_output)
        # Idle time is for the replica that has the pages before.
        is_asked = not request.extras.is_idle_prefill
        return is_new and is_plain and is_asked and not request.cache.is_private

    def sent(self, now: float) -> None:
        """Record that the request was sent to a replica."""
        self._sent = now

    def lose(self, now: float) -> None:
        """Record that the replica was lost; its usage is added to the next replica's."""
        self.num_losses += 1
        self.waits_since = now
        self._before = deepcopy(self.request.usage)
        self._before.moves += 1
        self._set_usage(self._summed(Usage()))

    def take(self, delta: Delta, form: Usage | None, now: float) -> None:
        """Add a step's tokens to the request, its text and its usage.

        ``form``: the replica's usage, if it sent one. If reading the text fails, the delta becomes
        an error.
        """
        request = self.request
        request.tokens.extend(delta.token_ids)
        request.num_prompt_logprobs += len(delta.prompt_logprobs)
        if form is None:
            _count(request.usage, delta)
        else:
            self._set_usage(self._summed(usage_of(form, now)))
        usage = request.usage
        usage.completion_tokens = request.num_output if request.sampling.generates else 0
        if delta.token_ids and not usage.time_to_first_token:
            usage.time_to_first_token = self.elapsed(now)
        if delta.terminal:
            usage.total_time = self.elapsed(now)
        try:
            self._watch(delta)
        except Exception:
            logger.exception("request %s failed while its tokens were read", request.request_id)
            delta.finish_reason = delta.stop_reason = None
            delta.error = ForetokenError("the answer could not be decoded")

    def _watch(self, delta: Delta) -> None:
        """Pass tokens to ``on_token`` if the request has one, without stop ids."""
        if (on_token := self.request.on_token) is None:
            return
        for token_id in delta.token_ids:
            if token_id not in self.request.stop_ids:
                on_token(token_id)

    def _set_usage(self, usage: Usage) -> None:
        """Copy ``usage`` into the request's usage object, which other objects refer to."""
        for each in fields(Usage):
            setattr(self.request.usage, each.name, getattr(usage, each.name))

    def _summed(self, run: Usage) -> Usage:
        """Return the usage summed over all replicas that served the request.

        Cache counts and the queue time are not summed: they come from the replica that generated
        the first token.
        """
        before, first = self._before, self.request.usage
        run.prompt_tokens = self.request.num_given
        run.time_to_first_token, run.moves = first.time_to_first_token, 0
        run.queue_time += self._sent - self.request.arrival_time
        if before is None:
            return run
        total = Usage(prompt_tokens=run.prompt_tokens, time_to_first_token=run.time_to_first_token)
        whose = before if before.completion_tokens else run
        total.cached_tokens, total.matched_tokens = whose.cached_tokens, whose.matched_tokens
        total.loaded_tokens = whose.loaded_tokens
        total.cache_write_tokens, total.cache_loss = whose.cache_write_tokens, whose.cache_loss
        total.queue_time = whose.queue_time
        for each in (before, run):
            add_counts(total, each)
        # Both replicas may evict the KV of the same tokens.
        total.evicted_tokens = max(before.evicted_tokens, run.evicted_tokens)
        return total


def _count(usage: Usage, delta: Delta) -> None:
    """Add a step's counts to a usage, as far as its delta shows them. O(tokens).

    The replica's own usage replaces them when it arrives.
    """
    if not delta.token_ids:
        return
    num_accepted = len(delta.accepted_sources)
    usage.verify_steps += 1
    usage.proposed_tokens += delta.num_proposed
    usage.accepted_tokens += num_accepted
    usage.draft_steps += bool(delta.num_proposed)
    _add_one(usage.steps_by_accepted, num_accepted)
    for source in delta.proposed_sources:
        _add_one(usage.proposed_by_source, source)
    for source in delta.accepted_sources:
        _add_one(usage.accepted_by_source, source)


def _add_one(counts: dict[K, int], key: K) -> None:
    counts[key] = counts.get(key, 0) + 1


def aborted() -> Delta:
    """Return the last delta of an aborted request."""
    return Delta(finish_reason=FinishReason.ABORT)
