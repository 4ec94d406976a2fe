"""Replicas behind one router in virtual time, as the driver of a load, and figures of a run."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

from ...api.cluster.front.dispatcher import PREFILL_TOKENS
from ...api.cluster.front.routing import Choice, Route, Router
from ...api.cluster.wire.messages import KEY_BYTES
from ...core.errors import ForetokenError
from ...core.interface.extras.request_extras import Transfer
from ...core.interface.extras.transfers import PageOffer
from ...core.interface.request import Delta, Request
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ...core.tiers.keys import StoredPages
from ...radix_cache.node import Cause
from ..load.figures import Record, summary
from ..load.generator import Content, Job, Load, Session
from ..load.http import Failure
from ..load.openai import joined
from .costs import StepCosts
from .drafts import NO_DRAFTS, Drafts
from .replica import FINGERPRINT, PlannedReplica, Role, Tier
from .transfers import Network
from .virtual_time import VirtualLoop, run_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A cluster to plan. ``kv_bytes``, ``tiers`` and ``max_running`` are per replica.

    ``num_prefill`` replicas compute prompts for the others, which read one of their pages in
    ``transfer_s`` seconds. ``arrival_s``: seconds from a client to an engine's queue, including the
    way back of the first token.
    """

    num_replicas: int
    kv_bytes: int
    max_running: int
    tiers: Sequence[Tier] = ()
    route: Route = Route.KV
    arrival_s: float = 0.0
    drafts: Drafts = NO_DRAFTS
    num_prefill: int = 0  # Number of prefill replicas among the replicas.
    transfer_s: float = 0.0


class _News:
    """Reports the pages of a replica to the router; a `KeyObserver`."""

    def __init__(self, router: Router[int], replica: int) -> None:
        self._router, self._replica = router, replica

    def stored(self, pages: StoredPages) -> None:
        self._router.stored(self._replica, [key[:KEY_BYTES] for key in pages.keys])

    def dropped(self, namespace: str | None, keys: list[bytes], cause: Cause) -> None:
        del namespace, cause
        self._router.dropped(self._replica, [key[:KEY_BYTES] for key in keys])


class PlannedCluster:
    """A `Driver` over replicas in virtual time; create it inside the loop that it runs on."""

    def __init__(self, costs: StepCosts, shape: Shape) -> None:
        network = Network(shape.transfer_s)
        self.roles: list[Role | None] = [
            None if not shape.num_prefill else "prefill" if n < shape.num_prefill else "decode"
            for n in range(shape.num_replicas)
        ]
        self.replicas = [
            PlannedReplica(
                costs,
                kv_bytes=shape.kv_bytes,
                max_running=shape.max_running,
                tiers=shape.tiers,
                drafts=shape.drafts,
                role=role,
                network=network,
            )
            for role in self.roles
        ]
        self.num_requests = [0] * shape.num_replicas
        self.num_loaded = 0  # Prompt tokens that were read from a tier or from another replica.
        self.num_prefilled = 0  # Prompts that were computed by a prefill replica.
        self._router = Router[int](shape.route, fingerprint=FINGERPRINT)
        for number, replica in enumerate(self.replicas):
            self._router.join(number, page_size=costs.page_size, fingerprint=None)
            replica.keys.add_observer(_News(self._router, number))
        self._for_prompts = {n for n, role in enumerate(self.roles) if role == "prefill"}
        self._for_answers = set(range(shape.num_replicas)) - self._for_prompts
        self._arrival_s = shape.arrival_s
        self._clock = asyncio.get_running_loop().time
        self._ids = map(str, count())

    async def start(self) -> None:
        """Start all engines."""
        for replica in self.replicas:
            await replica.engine.start()

    async def close(self) -> None:
        """Close all engines."""
        for replica in self.replicas:
            await replica.engine.close()

    async def settle(self) -> None:
        """Do nothing: the records are complete."""

    async def ask(self, job: Job, record: Record) -> Content:
        """Read one answer. Raises `Failure`, whose kind is the name of the engine's error."""
        try:
            return await self._ask(job, record)
        except ForetokenError as error:
            raise Failure(type(error).__name__, str(error)) from None

    async def _ask(self, job: Job, record: Record) -> Content:
        await asyncio.sleep(self._arrival_s)
        tokens = array("q", cast("list[int]", joined(job.prompt)))
        offer, num_cached = await self._prefilled(tokens)
        choice = self._choose(tokens, self._for_answers)
        request = _request(next(self._ids), tokens, job.output_len)
        request.transfer = Transfer(offer=offer)
        said: list[int] = []
        async with aclosing(self._deltas(choice, request)) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    record.times.append(self._clock())
                    record.counts.append(len(delta.token_ids))
                    said += delta.token_ids
        usage = request.usage
        record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        # Tokens that the prefill replica has just computed are not hits.
        if offer is not None:
            record.cached_tokens = max(0, usage.cached_tokens + num_cached - usage.prompt_tokens)
        return said

    async def _prefilled(self, tokens: array[int]) -> tuple[PageOffer | None, int]:
        """Let a prefill replica compute a prompt, as `Dispatcher` does.

        Returns an offer of its pages, and the number of cached tokens. There is no offer without
        prefill replicas, with too few tokens to compute, or without room to hold the pages.
        """
        if not self._for_prompts:
            return None, 0
        expected = self._choose(tokens, self._for_answers, is_sent=False)
        if expected.num_tokens - expected.hit_tokens < PREFILL_TOKENS:
            return None, 0
        choice = self._choose(tokens, self._for_prompts)
        request = _request(next(self._ids), tokens[:], 1)
        request.transfer = Transfer(hands_over=True)
        async for _ in self._deltas(choice, request):
            pass
        offer = self.replicas[choice.replica].offer(request)
        self.num_prefilled += offer is not None
        return offer, request.usage.cached_tokens

    def _choose(self, tokens: array[int], among: set[int], *, is_sent: bool = True) -> Choice[int]:
        excluded = set(range(len(self.replicas))) - among
        choice = self._router.choose(
            tokens, None, session=None, now=self._clock(), excluded=excluded, is_sent=is_sent
        )
        if choice is None:
            raise Failure("no replica", "no replica can take the request")
        return choice

    async def _deltas(self, choice: Choice[int], request: Request) -> AsyncGenerator[Delta]:
        """Let a replica compute a request; yield its deltas."""
        stream = self.replicas[choice.replica].engine.submit(request)
        self._router.begin(request.request_id, choice)
        self.num_requests[choice.replica] += 1
        is_computed = False
        try:
            async for delta in stream:
                if delta.token_ids and not is_computed:
                    is_computed = True
                    self._router.progress(request.request_id, len(request.tokens))
                yield delta
        finally:
            self._router.end(request.request_id)
            self.num_loaded += request.usage.loaded_tokens


def _request(request_id: str, tokens: array[int], output_len: int) -> Request:
    params = TokenSamplingParams(temperature=0.0, max_tokens=output_len)
    sampling = SamplingMetadata(params=params, seed=0, prompt_len=len(tokens))
    return Request(request_id=request_id, tokens=tokens, sampling=sampling)


# -- a run --------------------------------------------------------------------------------------

Figures = dict[str, Any]
MakeSessions = Callable[[], Sequence[Session]]


def planned(
    costs: StepCosts, shape: Shape, sessions: Sequence[Session], slo: dict[str, float]
) -> Figures:
    """Return the figures of sessions, each at its own time, on a cluster of this shape.

    Raises ValueError if the pool has no room for a page.
    """

    async def main(loop: VirtualLoop) -> Figures:
        cluster = PlannedCluster(costs, shape)
        await cluster.start()
        load = Load(cluster, clock=loop.time)
        await load.open(sessions, [session.at or 0.0 for session in sessions])
        figures = {**summary(load.records, slo), **_of_replicas(cluster, load.records)}
        figures["first_tokens_s"] = first_tokens(load.records)
        await cluster.close()
        return figures

    return run_on(VirtualLoop(), main)


def first_tokens(records: Iterable[Record]) -> list[float]:
    """Return the seconds to the first token of served requests, ordered by due time."""
    return [each.ttft for each in sorted(records, key=lambda each: each.due) if each.times]


def _of_replicas(cluster: PlannedCluster, records: Sequence[Record]) -> Figures:
    """Return figures of engines, pools and tiers; shares are means over the replicas."""
    replicas = cluster.replicas
    number = len(replicas)
    ended = max((record.ended for record in records), default=0.0)
    occupancies = [each.runner.occupancy for each in replicas]
    tiers = [state for each in replicas if each.tiers for state in each.tiers.describe()]
    media = list(dict.fromkeys(state.medium for state in tiers))
    busy = [each.runner.busy_seconds / (ended or 1.0) for each in replicas]
    return {
        "replicas": number,
        "prefill": cluster.roles.count("prefill"),
        "prefilled": cluster.num_prefilled,
        "requests_by_replica": cluster.num_requests,
        "step_seconds": sum(each.runner.busy_seconds for each in replicas),
        "busy": sum(busy) / number,
        "busy_by_replica": busy,
        "preemptions": sum(each.scheduler.num_preemptions for each in replicas),
        "kv_pages": [each.cache.num_total_pages for each in replicas],
        "kv_held": sum(each.held for each in occupancies) / number,
        "kv_most_held": max(each.most_held for each in occupancies),
        "kv_cached": sum(each.cached for each in occupancies) / number,
        "loaded_tokens": cluster.num_loaded,
        "tiers": {
            medium: {
                name: sum(getattr(state, name) for state in tiers if state.medium == medium)
                for name in ("pages", "capacity_pages", "loaded_pages", "saved_pages")
            }
            for medium in media
        },
        "occupancy": [each.samples for each in occupancies],
    }
