"""A comparison in words, and as JSON."""

from __future__ import annotations

import json
import shlex
from typing import Any

import msgspec

from ..._version import __version__
from .answering import Answering, Opened
from .runner import Found, Pair, Plan, Scored
from .statistics import ConfidenceSequence
from .tasks import TaskFile
from .variants import Variant

MOST_LISTED = 5  # tasks without a score that the report lists


def verdict_line(found: Found, plan: Plan) -> str:
    """Return the verdict in one line. Points are hundredths of a score."""
    difference, (low, high) = found.difference, found.interval
    after = f"after {len(found.pairs)} of {found.num_tasks} tasks"
    if found.verdict == "A better":
        difference, low, high = -difference, -high, -low
    interval = f"({100 * plan.level:.12g}%: {_points(low)} to {_points(high)})"
    if found.verdict in ("A better", "B better"):
        return f"{found.verdict} by {_points(difference)} points {interval} {after}"
    signed = f"B - A is {100 * difference:+.1f} points {interval} {after}"
    if found.verdict == "equivalent":
        return f"no difference of more than {_points(plan.margin or 0.0)} points: {signed}"
    return f"undecided: {signed}"


def progress_line(look: ConfidenceSequence, num_tasks: int) -> str:
    """Return a look in one line."""
    low, high = look.interval
    difference = f"B - A is {100 * look.mean:+.1f} points ({_points(low)} to {_points(high)})"
    return f"{look.num} of {num_tasks} tasks: {difference}"


def detail_lines(found: Found, opened: Opened) -> list[str]:
    """Return the mean scores, and how many answers differ, were cut or have no score."""
    num = sum(len(each.a.answers) for each in found.pairs)
    differing = sum(each.num_differing for each in found.pairs)
    exact = "" if is_exact(opened) else "; exact: false, answers may depend on other requests"
    lines = [
        f"A {_points(_mean(found, 'a'))}, B {_points(_mean(found, 'b'))} points",
        f"{differing} of {num} answers differ{exact}",
    ]
    cut = {name.upper(): _num_cut(found, name) for name in ("a", "b")}
    if any(cut.values()):
        told = ", ".join(f"{count} of {name}" for name, count in cut.items() if count)
        lines.append(f"answers that reached the limit on tokens: {told}")
    if found.failed:
        lines.append(f"{len(found.failed)} tasks left out, whose scorers failed:")
        lines += [f"  {each.why}" for each in found.failed[:MOST_LISTED]]
        if len(found.failed) > MOST_LISTED:
            lines.append(f"  and {len(found.failed) - MOST_LISTED} more")
    return lines


def is_exact(opened: Opened) -> bool:
    """Whether each answer depends on the variant, the task and the seed alone."""
    return opened.a.exact and opened.b.exact


def json_of(found: Found, plan: Plan, opened: Opened, file: TaskFile) -> str:
    """Return the whole result as a JSON text. Scores are from 0 to 1."""
    num = sum(len(each.a.answers) for each in found.pairs)
    names = [each.variant.text for each in (opened.a, opened.b)]
    value = {
        "foretoken": __version__,
        "command": shlex.join(["foretoken", "compare", *names]),
        "verdict": found.verdict,
        "text": verdict_line(found, plan),
        "exact": is_exact(opened),
        "difference": found.difference,
        "interval": list(found.interval),
        "level": plan.level,
        "margin": plan.margin,
        "scores": {"a": _mean(found, "a"), "b": _mean(found, "b")},
        "variance": {"paired": found.paired_variance, "unpaired": found.unpaired_variance},
        "answers": num,
        "differing_answers": sum(each.num_differing for each in found.pairs),
        "cut_answers": {"a": _num_cut(found, "a"), "b": _num_cut(found, "b")},
        "tasks": {
            "file": file.path,
            "sha256": file.sha256,
            "used": len(found.pairs),
            "all": found.num_tasks,
        },
        "failed": msgspec.to_builtins(found.failed),
        "seed": plan.seed,
        "samples": plan.num_samples,
        "variants": {"a": _about(opened.a), "b": _about(opened.b)},
        "pairs": [_pair(each) for each in found.pairs],
    }
    return json.dumps(value, indent=1) + "\n"


def _points(score: float) -> str:
    return f"{100 * score:.1f}"


def _scored(pair: Pair, name: str) -> Scored:
    return pair.a if name == "a" else pair.b


def _mean(found: Found, name: str) -> float:
    scores = [_scored(each, name).score for each in found.pairs]
    return sum(scores) / len(scores)


def _num_cut(found: Found, name: str) -> int:
    return sum(answer.is_cut for each in found.pairs for answer in _scored(each, name).answers)


def _about(answering: Answering) -> dict[str, Any]:
    variant: Variant = answering.variant
    return {"exact": answering.exact, **msgspec.to_builtins(variant, str_keys=True)}


def _pair(pair: Pair) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(pair)
    return {**plain, "difference": pair.difference}
