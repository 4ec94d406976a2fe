"""A certificate as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .certificate import Certificate, Difference
from .conditions import BATCHES

COLUMNS = {
    "pass": "name", "requests": "requests", "tokens": "tokens", "differ": "differing_tokens",
    "cached": "cached_tokens", "loaded": "loaded_tokens", "drafted": "proposed_tokens",
    "accepted": "accepted_tokens", "preempted": "preemptions", "seconds": "seconds",
}  # fmt: skip


def markdown(found: Certificate) -> str:
    """Return the whole report."""
    return "\n".join([*_parts(found), ""])


def verdict(found: Certificate) -> str:
    """Return the result in one sentence."""
    if not found.exact:
        return f"exact: false: {found.reason}"
    answers = f"{found.answers:,} answers of {found.tokens:,} tokens"
    if found.differing_tokens:
        return f"{found.differing_tokens:,} tokens differ in {answers}"
    return f"0 tokens differ in {answers}"


def _parts(found: Certificate) -> Iterator[str]:
    yield f"# Certificate: {found.model}"
    yield f"\n**{verdict(found)}.**"
    if found.exact:
        sizes = ", ".join(map(str, BATCHES))
        yield (
            f"\n{found.num_requests:,} requests went through each pass. The reference of each is "
            "plain decoding: alone, without drafts and without the cache. A pass has requests in "
            f"batches of {sizes}; its name is KV cache data type / drafter / state. "
            "Equal means the same token ids and the same finish reason."
        )
    yield f"\n```sh\n{found.command}\n```"
    yield from _section("Made by", _facts(found))
    yield from _section(
        "Weights", [f"`{each['file']}` {each['bytes']} bytes, SHA-256 {each['sha256']}"
                    for each in found.weights]
    )  # fmt: skip
    if found.passes:
        yield "\n## Passes\n"
        yield from _table(found)
        yield from _section("Requests by kind", [", ".join(_pairs(found.kinds))])
    yield from _section("Skipped", _pairs(found.skipped))
    yield from _section("Requests that the model refuses", _pairs(found.refused))
    if found.unproven:
        yield from _section("Did not occur (nothing to cache, to draft or to preempt)",
                            [f"`{name}`" for name in found.unproven])  # fmt: skip
    if found.first_difference is not None:
        yield from _difference(found.first_difference)


def _facts(found: Certificate) -> list[str]:
    options = ", ".join(f"{name} {value}" for name, value in found.options.items())
    libraries = ", ".join(f"{name} {version}" for name, version in found.libraries.items())
    machine = [f"{name}: {value}" for name, value in found.machine.items() if value]
    return [
        f"foretoken {found.foretoken}; {libraries}",
        f"kernels: {found.kernels}; options: {options}",
        *machine,
        f"time: {found.seconds:.0f} s",
    ]


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"\n## {title}\n"
        yield from (f"- {line}" for line in lines)


def _pairs(named: Mapping[str, object]) -> list[str]:
    return [f"{name}: {value}" for name, value in named.items()]


def _table(found: Certificate) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{' --- |' * len(COLUMNS)}"
    for each in found.passes:
        cells = (f"{getattr(each, field)}" for field in COLUMNS.values())
        yield f"| {' | '.join(cells)} |"


def _difference(first: Difference) -> Iterator[str]:
    request = first.request
    yield "\n## The first difference\n"
    yield f"- pass `{first.condition}`, {first.batch} requests at a time"
    yield f"- request {first.index} ({first.kind}), choice {first.choice}, seed {request.seed}"
    yield f"- parameters: `{request.params}`"
    yield f"- prompt: `{request.prompt}`"
    yield f"- expected, finish reason {request.finish_reason}: `{request.tokens}`"
    yield f"- found, finish reason {first.found_finish_reason}: `{first.found}`"
    yield f"- first difference at token {first.position} of the answer"
    if first.error:
        yield f"- error instead of an answer: {first.error}"
    yield f"- options of the engine: `{first.options}`"
    yield f"\nTo reproduce:\n\n```sh\n{first.repeat}\n```"
