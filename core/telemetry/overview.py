"""Description of an engine for the live page (`Engine.overview`).

It has counts, sizes and ids of requests, but never their texts or tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable
from itertools import chain, islice
from typing import NamedTuple

from ...radix_cache import Node, PrefixCache
from ..interface.request import Request
from ..scheduling.scheduler import Scheduler
from .metrics import EngineMetrics

MAX_BOXES = 400  # maximum number of boxes, without the paths of the latest requests
MAX_LEVELS = 16
MAX_REQUESTS = 16  # number of latest requests whose paths are reported
MAX_PATH = 64  # maximum number of boxes in one path


class RecentRequest(NamedTuple):
    """Record of a request, for the report of its path through the radix tree."""

    request_id: str
    tokens: array[int]  # the request's own array; read only
    namespace: str | None
    num_given: int  # number of tokens of the prompt and of a recorded answer to compare
    num_cached: int  # number of prompt tokens that were cached

    @classmethod
    def of(cls, request: Request) -> RecentRequest:
        """Make the record of a request, without a reference to the request."""
        cached = request.usage.cached_tokens
        about = (request.request_id, request.tokens, request.namespace)
        return cls(*about, request.num_given, cached)


def describe_engine(
    scheduler: Scheduler, metrics: EngineMetrics, finished: Iterable[RecentRequest] = ()
) -> dict[str, object]:
    """Return an engine's counts since its start, and its current state. O(`MAX_BOXES`)."""
    cache, stats = scheduler.cache, metrics.spec_stats
    running = map(RecentRequest.of, islice(scheduler.running.values(), MAX_REQUESTS))
    paths = [(each, path(cache, each)) for each in chain(finished, running)]
    kept = {id(node) for _, nodes in paths for node in nodes}
    boxes, places = icicle([*cache.tree.roots()], kept)
    free, cached, pinned = cache.num_free_pages, cache.num_evictable_pages, cache.num_pinned_pages
    price = scheduler.speculator.row_price(len(scheduler.running))
    return {
        "running": len(scheduler.running),
        "max_running": scheduler.limits.max_running,
        "waiting": len(scheduler.waiting),
        "tokens": stats.num_tokens,
        "steps": stats.num_steps,
        "drafts": stats.num_drafts,
        "trees": stats.num_trees,
        "num_proposed": stats.num_proposed,
        "acceptance_length": stats.acceptance_length,
        "proposed": dict(stats.proposed),
        "accepted": dict(stats.accepted),
        "prefix_queries": cache.num_queries,
        "prefix_hits": cache.num_hits,
        "pages": {
            "held": max(0, cache.num_total_pages - free - cached - pinned),
            "pinned": pinned,
            "cached": cached,
            "free": free,
        },
        "parts": metrics.part_seconds(),
        "row": None if price is None else price._asdict(),
        "tree": boxes,
        "requests": [
            {
                "id": each.request_id,
                "prompt_tokens": each.num_given,
                "cached_tokens": each.num_cached,
                "boxes": [places[id(node)] for node in nodes],
            }
            for each, nodes in paths
        ],
    }


def path(cache: PrefixCache, request: RecentRequest) -> list[Node]:
    """Return the first `MAX_PATH` nodes of the tree that match a request's tokens. O(tokens)."""
    found = cache.tree.match(request.tokens, namespace=request.namespace)
    return [] if found.node is None else found.node.path()[1 : 1 + MAX_PATH]


def icicle(roots: list[Node], kept: Container[int] = ()) -> tuple[list[list[int]], dict[int, int]]:
    """Return the boxes of some trees, and the index of each node's box by the node's id.

    A box is (place, level, width, tokens, whether in use, hits). A parent spans its children. Boxes
    beyond `MAX_BOXES` or `MAX_LEVELS` are left out, unless the id of their node is in ``kept``,
    which must include all nodes above it.
    """
    boxes: list[list[int]] = []
    places: dict[int, int] = {}
    start = 0
    for node in (child for root in roots for child in root.children.values()):
        start += _lay(node, 0, start, boxes, places, kept)
    return boxes, places


def _lay(
    node: Node,
    level: int,
    start: int,
    boxes: list[list[int]],
    places: dict[int, int],
    kept: Container[int],
) -> int:
    """Append the boxes of a node and of all nodes below it; return their width."""
    if (len(boxes) >= MAX_BOXES or level >= MAX_LEVELS) and id(node) not in kept:
        return 0
    box = [start, level, 0, len(node.key), int(node.ref_count > 0), node.num_hits]
    places[id(node)] = len(boxes)
    boxes.append(box)
    width = 0
    for child in node.children.values():
        width += _lay(child, level + 1, start + width, boxes, places, kept)
    box[2] = max(1, width)
    return box[2]
