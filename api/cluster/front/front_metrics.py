"""FrontMetrics: a front's own metrics, and its replicas' metrics with the label ``replica``."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ....core.interface.request import Delta, FinishReason, Request
from ....core.telemetry.families import PREFIX, Reader, gauge
from ....core.telemetry.observers import Observers

logger = logging.getLogger(__name__)
LABEL = "replica"
CAUSES = ("closed", "silent", "left", "died", "wrong")
"""Causes of a loss: connection closed, no beats, it left, dead engine, invalid messages."""

Texts = Mapping[str, bytes]
"""The metrics of each replica by its number, in the text format of Prometheus."""


class ReplicaFamilies(Collector):
    """The latest metric families of all replicas; each sample has its replica's label."""

    def __init__(self) -> None:
        self._families: list[Metric] = []

    def put(self, texts: Texts) -> None:
        """Replace all families. A text that cannot be parsed is logged and left out."""
        families: dict[str, Metric] = {}
        for number, text in texts.items():
            try:
                found = list(text_string_to_metric_families(text.decode()))
            except ValueError:
                logger.warning("cannot read the metrics of replica %s", number)
                continue
            for each in found:
                family = families.setdefault(
                    each.name, Metric(each.name, each.documentation, each.type)
                )
                for sample in each.samples:
                    labels = {**sample.labels, LABEL: number}
                    family.samples.append(sample._replace(labels=labels))
        self._families = list(families.values())

    def collect(self) -> Iterable[Metric]:
        """Return the families; called by the registry."""
        return self._families


class FrontMetrics:
    """The metrics of a front.

    ``read`` returns for each replica the tokens left to compute and the number of requests.
    ``fetch`` returns the metrics of all replicas as text.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, tuple[int, int]]],
        fetch: Callable[[], Awaitable[Texts]],
    ) -> None:
        self.registry = CollectorRegistry()
        self._read, self._fetch = read, fetch
        self._families = ReplicaFamilies()
        for collector in (Reader(self._read_replicas), self._families):
            self.registry.register(collector)
        self.moved = self._count(
            "requests_moved", "Requests moved to another replica because their replica was lost"
        )
        self._hit_tokens = self._count(
            "route_hit_tokens", "Prompt tokens expected to be cached in the chosen replica"
        )
        self._lost = self._count("replicas_lost", "Lost replicas by cause", "cause")
        for cause in CAUSES:
            self._lost.labels(cause)
        self.not_replaced = Gauge(
            PREFIX + "replicas_not_replaced",
            "1 while Ray cannot be reached or cannot replace lost replicas",
            registry=self.registry,
        )
        failures = self._count(
            "front_observer_failures", "Calls of the front's observers that raised an exception"
        )
        self.notify = Observers(failures.inc)
        self.observers = self.notify.members

    def _count(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    # Prompts that are computed in idle time are left out, as in `EngineMetrics`.

    def observe_arrival(self, request: Request, now: float) -> None:
        """Pass an accepted request to the observers."""
        if not request.extras.is_idle_prefill:
            self.notify.begin(request, now)

    def observe_place(self, request: Request, hit_tokens: int) -> None:
        """Count the tokens of a request that are probably cached in the chosen replica."""
        if not request.extras.is_idle_prefill:
            self._hit_tokens.inc(hit_tokens)

    def observe_delta(
        self, request: Request, delta: Delta, now: float, *, replica: int | None = None
    ) -> None:
        """Pass served tokens, or a request's end, to the observers.

        ``replica``: number of the replica that sent the delta; None if the front made it.
        """
        if not request.extras.is_idle_prefill:
            self.notify.observe_delta(request, delta, now)
        elif replica is not None and delta.finish_reason is FinishReason.LENGTH:
            self.notify.observe_idle_chunk(replica)

    def lost(self, cause: str) -> None:
        """Count a loss; ``cause`` is one of `CAUSES`."""
        self._lost.labels(cause).inc()

    def _read_replicas(self) -> Iterator[Metric]:
        replicas = self._read()
        yield gauge("replicas", "Connected replicas", len(replicas))
        for place, name, text in (
            (0, "replica_owed_tokens", "Prompt tokens left to compute for a replica's requests"),
            (1, "replica_requests", "Running and waiting requests of a replica"),
        ):
            family = GaugeMetricFamily(PREFIX + name, text, labels=[LABEL])
            for number, values in replicas.items():
                family.add_metric([number], values[place])
            yield family

    async def refresh(self) -> None:
        """Read the replicas' metrics; replicas that do not answer are left out."""
        self._families.put(await self._fetch())

    def render(self) -> tuple[bytes, str]:
        """Return body and content type, in the text format of Prometheus."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
