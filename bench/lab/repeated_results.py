"""How often a tool's result is known before the tool has run: recorded sessions, no model.

`python -m foretoken.bench.lab.repeated_results bench/recordings` reads recordings (the format of
``--record`` of the replay bench) or traces with a ``messages`` field in each line. A result is
*repeated* if the session had the same call, with equal arguments, and this call's last result was
equal. Such a result could be computed while the tool runs. Sizes are in characters. *New* are the
characters that turns begin with: results and messages that are not the model's.
"""

from __future__ import annotations

import argparse
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..common.report import table

Item = dict[str, Any]


@dataclass(slots=True)
class Counts:
    """Counts of a session's tool results."""

    results: int = 0
    same_calls: int = 0  # results of a call that the session had before
    repeated: int = 0
    repeated_chars: int = 0
    wasted_chars: int = 0  # characters of earlier results that were expected and did not come
    new_chars: int = 0


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="files, or folders of files")
    options = parser.parse_args(argv)
    rows = []
    for path in options.paths:
        for each in sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]:
            counts = counted(read(each))
            rows.append(
                {
                    "session": each.name.partition(".jsonl")[0],
                    "results": counts.results,
                    "same call": counts.same_calls,
                    "repeated": counts.repeated,
                    "repeated / new": f"{counts.repeated_chars / max(1, counts.new_chars):.3f}",
                    "wasted / new": f"{counts.wasted_chars / max(1, counts.new_chars):.3f}",
                }
            )
    print(table(rows))


def read(path: Path) -> list[list[Item]]:
    """Return the conversations of a file: the longest ones, which no other one continues."""
    data = path.read_bytes()
    lines = (lzma.decompress(data) if path.suffix == ".xz" else data).splitlines()
    found: list[list[Item]] = []
    for line in lines:
        body = msgspec.json.decode(line)
        body = body.get("body", body)
        items = body.get("messages", body.get("input"))
        if not isinstance(items, list):
            continue
        found = [each for each in found if _first(each) != _first(items) or len(each) > len(items)]
        if all(_first(each) != _first(items) for each in found):
            found.append(items)
    return found


def _first(items: Sequence[Item]) -> object:
    return next((item.get("content") for item in items if item.get("role") == "user"), None)


def counted(conversations: Sequence[Sequence[Item]]) -> Counts:
    """Count the results of conversations, which share what they know."""
    counts = Counts()
    known: dict[str, str] = {}  # last result by call
    for items in conversations:
        calls: dict[str, str] = {}
        for item in items:
            for call_id, call in _calls(item):
                calls[call_id] = call
            for call_id, result in _results(item):
                call = calls.get(call_id, call_id)
                counts.results += 1
                counts.new_chars += len(result)
                if call in known:
                    counts.same_calls += 1
                    if known[call] == result:
                        counts.repeated += 1
                        counts.repeated_chars += len(result)
                    else:
                        counts.wasted_chars += len(known[call])
                known[call] = result
            if item.get("role") == "user" and isinstance(item.get("content"), str):
                counts.new_chars += len(item["content"])
    return counts


def _calls(item: Item) -> Iterator[tuple[str, str]]:
    """Yield the id of each call, and its name with its arguments."""
    for call in item.get("tool_calls") or ():
        function = call["function"]
        yield call["id"], _text([function["name"], _object(function["arguments"])])
    if item.get("type") in ("function_call", "custom_tool_call"):
        given = item.get("arguments", item.get("input"))
        yield item["call_id"], _text([item["name"], _object(given)])
    for block in _blocks(item):
        if block.get("type") == "tool_use":
            yield block["id"], _text([block["name"], block["input"]])


def _results(item: Item) -> Iterator[tuple[str, str]]:
    """Yield the call's id and the text of each result."""
    if item.get("role") == "tool":
        yield item.get("tool_call_id", ""), _text(item["content"])
    if item.get("type") in ("function_call_output", "custom_tool_call_output"):
        yield item["call_id"], _text(item["output"])
    for block in _blocks(item):
        if block.get("type") == "tool_result":
            yield block["tool_use_id"], _text(block.get("content"))


def _blocks(item: Item) -> Sequence[Item]:
    content = item.get("content")
    return [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []


def _object(arguments: object) -> object:
    try:
        return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except msgspec.DecodeError:
        return arguments


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value, order="deterministic").decode()


if __name__ == "__main__":
    main()
