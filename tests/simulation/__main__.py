"""``python -m simulation --seeds 20000 --from 0``: many seeds by hand; status 1 for a finding."""

from __future__ import annotations

import argparse
import logging
import signal
import time
import traceback
from collections import Counter
from typing import NoReturn

from .loop import Stuck
from .world import Findings, live

SEED_SECONDS = 60


def main() -> int:
    """Run seeds until they, or the seconds, are over."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of real time, at most")
    parser.add_argument("--most", type=int, default=10, help="findings after which to stop")
    parser.add_argument(
        "--slots", type=int, help="of recurrent states, which every model then has; 0: none has"
    )
    parser.add_argument("--log", action="store_true", help="show what the engine logs")
    options = parser.parse_args()
    forced = {} if options.slots is None else {"num_slots": options.slots, "has_tiers": False}
    if not options.log:
        logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _overdue)
    total, began, num_run, found = Totals(), time.monotonic(), 0, []
    for seed in range(options.first, options.first + options.seeds):
        if time.monotonic() - began > options.seconds or len(found) == options.most:
            break
        num_run += 1
        signal.alarm(SEED_SECONDS)  # against code that never comes back to the loop
        try:
            total.add(live(seed, **forced))
        except Exception as error:
            found.append(seed)
            print(f"seed {seed}:", *traceback.format_exception(error), flush=True)
    signal.alarm(0)
    print(f"{num_run} seeds from {options.first} in {time.monotonic() - began:.0f} s. {total}")
    print(f"findings: {found or 'none'}")
    return 1 if found else 0


def _overdue(*_: object) -> NoReturn:
    raise Stuck(f"a seed takes more than {SEED_SECONDS} s of real time")


class Totals:
    """Sums over seeds."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()

    def add(self, findings: Findings) -> None:
        """One seed more."""
        for name in (
            "num_requests",
            "num_steps",
            "num_ahead",
            "num_preemptions",
            "num_accepted",
            "num_resumed",
        ):
            self._counts[name.removeprefix("num_")] += getattr(findings, name)
        self._ends += findings.ends
        self._faults += findings.faults

    def __str__(self) -> str:
        lines = [dict(self._counts), dict(self._ends.most_common()), dict(self._faults)]
        return "\n".join(map(str, lines))


if __name__ == "__main__":
    raise SystemExit(main())
