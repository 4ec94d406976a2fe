"""Reports of several replicas merged into one: counts are summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...types.results import Body

Bodies = Sequence[Mapping[str, Any]]
SUMMED_IN_CACHE = (
    "total_pages", "free_pages", "evictable_pages", "pinned_pages", "num_pins", "num_sessions",
    "queried_tokens", "hit_tokens", "evicted_answer_tokens",
)  # fmt: skip
SUMMED_IN_OVERVIEW = (
    "running", "max_running", "waiting", "tokens", "steps", "drafts", "trees", "num_proposed",
    "prefix_queries", "prefix_hits",
)  # fmt: skip
COUNTS_IN_OVERVIEW = ("proposed", "accepted", "pages", "parts")
NO_PAGES = {"held": 0, "pinned": 0, "cached": 0, "free": 0}


def merged_cache(page_size: int, bodies: Bodies) -> Body:
    """Return one `ServingEngine.cache_info` for all replicas."""
    body: Body = {"page_size": page_size}
    body |= {name: _sum(bodies, name) for name in SUMMED_IN_CACHE}
    total = _sum(bodies, "total_pages")
    used = sum(each.get("usage", 0.0) * each.get("total_pages", 0) for each in bodies)
    body["usage"] = used / total if total else 0.0
    body["pins"] = _chained(bodies, "pins")
    body["tiers"] = _chained(bodies, "tiers")
    return body


def merged_overview(views: Mapping[int, Mapping[str, Any]]) -> Body:
    """Return one `ServingEngine.overview` for all replicas, given by number.

    The drawings of their prefix trees are placed side by side.
    """
    bodies = list(views.values())
    body: Body = {name: _sum(bodies, name) for name in SUMMED_IN_OVERVIEW}
    body |= {name: _added(each.get(name, {}) for each in bodies) for name in COUNTS_IN_OVERVIEW}
    body["pages"] = body["pages"] or NO_PAGES
    drafts = _sum(bodies, "drafts")
    lengths = sum(each.get("acceptance_length", 0.0) * each.get("drafts", 0) for each in bodies)
    body["acceptance_length"] = lengths / drafts if drafts else 0.0
    body["row"] = next((row for each in bodies if (row := each.get("row"))), None)
    boxes: list[list[int]] = []
    requests: list[Body] = []
    for number, each in views.items():
        first, start = len(boxes), max((box[0] + box[2] for box in boxes), default=0)
        boxes += [[box[0] + start, *box[1:]] for box in each.get("tree", ())]
        requests += [
            {**one, "replica": number, "boxes": [first + place for place in one["boxes"]]}
            for one in each.get("requests", ())
        ]
    return body | {"tree": boxes, "requests": requests}


def merged_audit(audits: Mapping[int, Mapping[str, Any]]) -> Body:
    """Return one `ServingEngine.audit` for all replicas, given by number.

    "ok" is true only if it is true for every replica.
    """
    bodies = list(audits.values())
    body: Body = {
        "ok": all(each.get("ok") is True for each in bodies),
        "pages": _added(each.get("pages", {}) for each in bodies),
        "requests": _added(each.get("requests", {}) for each in bodies),
        "replicas": [{"number": number, **each} for number, each in audits.items()],
    }
    if states := _added(each.get("states", {}) for each in bodies):
        body["states"] = states
    wrong = [
        f"replica {number}: {each['violation']}"
        for number, each in audits.items()
        if each.get("violation")
    ]
    return body | ({"violation": "; ".join(wrong)} if wrong else {})


def _sum(bodies: Bodies, name: str) -> Any:  # noqa: ANN401 - the type of the values, int or float
    return sum(each.get(name, 0) for each in bodies)


def _added(counts: Iterable[Mapping[str, Any]]) -> Body:
    total: dict[str, Any] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return dict(total)


def _chained(bodies: Bodies, name: str) -> list[object]:
    return [one for each in bodies for one in each.get(name, ())]
