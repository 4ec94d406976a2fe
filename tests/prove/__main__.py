"""``make prove``: every mutation, listed or generated, must make some test fail."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from foretoken.bench.common.report import machine, write_json

from .code import Code
from .mutation import Mutation
from .mutations import MUTATIONS
from .run import Verdict, prove
from .targets import generated_mutations
from .workplace import Workplace

ROOT = Path(__file__).resolve().parents[2]


def main(args: Sequence[str] | None = None) -> int:
    """The exit status: 1 unless all were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the mutations and end")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="this one; * stands for anything"
    )
    parser.add_argument("--sample", metavar="N", type=int, help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(args)
    every = [*MUTATIONS, *generated_mutations(Code(ROOT))]
    chosen = [each for each in every if _is_chosen(each, options.only)]
    if not chosen:
        parser.error(f"no mutation is named {' or '.join(options.only)}")
    if options.sample is not None and options.sample < len(chosen):
        chosen = random.Random(options.seed).sample(chosen, options.sample)
    if options.list:
        print(*(f"{each.name:34} {each.place}: {each.breaks}" for each in chosen), sep="\n")
        return 0
    return _run(chosen, options.json)


def _is_chosen(mutation: Mutation, names: Sequence[str] | None) -> bool:
    return names is None or any(fnmatch.fnmatch(mutation.name, name) for name in names)


def _run(mutations: Sequence[Mutation], target: Path | None) -> int:
    began = time.monotonic()
    verdicts: list[Verdict] = []
    with (
        tempfile.TemporaryDirectory(prefix="foretoken-prove-") as folder,
        contextlib.closing(Workplace(ROOT, Path(folder))) as workplace,
    ):
        for verdict in prove(workplace, mutations):
            verdicts.append(verdict)
            _show(verdict)
    seconds = time.monotonic() - began
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()), end=" ")
    print(f"of {len(verdicts)} in {seconds:.0f} s")
    if target is not None:
        write_json(target, _report(verdicts, seconds))
    return 0 if counts["caught"] == len(verdicts) else 1


def _show(verdict: Verdict) -> None:
    name, said = verdict.mutation.name, verdict.caught_by.rpartition("/")[2]
    print(f"{verdict.outcome:10} {verdict.seconds:5.1f} s  {name:34} {said}", flush=True)
    if verdict.outcome != "caught":
        print(f"  it breaks: {verdict.mutation.breaks}\n{verdict.detail}", file=sys.stderr)


def _report(verdicts: Sequence[Verdict], seconds: float) -> dict[str, object]:
    return {
        "command": "make prove",
        "machine": machine(),
        "seconds": round(seconds, 1),
        "num_mutations": len(verdicts),
        "outcomes": Counter(verdict.outcome for verdict in verdicts),
        "mutations": [
            {
                "name": verdict.mutation.name,
                "place": verdict.mutation.place,
                "breaks": verdict.mutation.breaks,
                "outcome": verdict.outcome,
                "caught_by": verdict.caught_by,
                "seconds": round(verdict.seconds, 1),
            }
            for verdict in verdicts
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
