"""What keeps the controller honest: a guard against wrong predictions, and probes.

Both count in steps and in seconds of plain decoding, so they mean the same on any machine.
"""

from __future__ import annotations

from math import exp, log

BASE_MARGIN = 0.01  # predicted gain that drafting must bring at least
FIRST_MARGIN, MAX_MARGIN = 0.1, 1.0
PATIENCE, MAX_PATIENCE = 350, 11_200  # steps that halve what is above the base
TOLERANCE = 0.99  # of plain decoding's speed, before a step counts as a loss
MAX_LOSS = 6.0  # plain steps lost, net of what was won since, that sound the alarm
STALL = 1.5  # times the prediction; what a step took beyond it is the machine's fault

FIRST_INTERVAL, LAST_INTERVAL, KEEN_INTERVAL = 32, 512, 2  # steps between probes
PROBE_SHARE = 0.002  # of the time that probes may cost
FIRST_SAVED, MAX_SAVED = 1.0, 4.0  # plain steps that probes may cost, at first and at most
REFRESH_STEPS = 64  # passes after which the price of a plain step is stale
REFRESH_SHARE = 0.005  # of the speed that refreshing it may cost


class Guard:
    """Compares what drafting achieved with plain decoding, and demands more after losses.

    A cumulative sum (Page 1954): a large loss is noticed in a few steps, a small one in hundreds,
    and luck evens out. Who loses again and again is forgiven ever more slowly.
    """

    def __init__(self) -> None:
        self.margin = BASE_MARGIN
        self.num_alarms = 0
        self._loss = 0.0  # plain steps
        self._won = 0.0  # plain steps since the last alarm
        self._patience = PATIENCE
        self._slowness = 0.0  # log of the time that steps take over the expected

    def relax(self, num_steps: int = 1) -> None:
        """Steps passed; forgive a little."""
        if self.margin > BASE_MARGIN:
            self.margin = BASE_MARGIN + (self.margin - BASE_MARGIN) * 0.5 ** (
                num_steps / self._patience
            )

    def observe(self, worth: float, spent: float, expected: float) -> None:
        """A step with drafts took ``spent``; its tokens are worth ``worth`` plain steps.

        ``spent`` and ``expected`` are times in plain steps too.
        """
        # a stall is what is slow even for a machine that is slower than expected throughout
        error = log(max(1e-3, spent / expected)) - self._slowness
        self._slowness = max(0.0, self._slowness + 0.2 * min(1.0, max(-1.0, error)))
        loss = TOLERANCE * min(spent, STALL * exp(self._slowness) * expected) - worth
        self._loss = max(0.0, self._loss + loss)
        self._won -= loss
        if self._won > MAX_LOSS:
            self._patience = PATIENCE
        if self._loss > MAX_LOSS:
            self.num_alarms += 1
            self._loss = self._won = 0.0
            self._patience = min(MAX_PATIENCE, 2 * self._patience)
            self.margin = min(MAX_MARGIN, max(FIRST_MARGIN, 2.0 * self.margin))


class Prober:
    """Decides when a draft model that is not in use is tried on one token of one request.

    A share of all time is saved up for probes. A probe that came true pays it back and is
    soon followed by another; one that did not doubles the interval.
    """

    def __init__(self) -> None:
        self.interval = FIRST_INTERVAL
        self._is_keen = False  # the last probe came true
        self._num_idle = 0  # steps since the draft model was last asked
        self._saved = FIRST_SAVED  # plain steps

    @property
    def is_ripe(self) -> bool:
        """Whether a probe may be made at all by now."""
        interval = KEEN_INTERVAL if self._is_keen else self.interval
        return self._num_idle >= interval and self._saved > 0.0

    def is_due(self, cost: float) -> bool:
        """Whether a probe may be made that costs so many plain steps."""
        return self.is_ripe and cost <= self._saved

    def idle(self, num_steps: int = 1) -> None:
        """Steps passed without the draft model."""
        self._num_idle += num_steps
        self._saved = min(MAX_SAVED, self._saved + num_steps * PROBE_SHARE)

    def used(self) -> None:
        """The draft model drafted in earnest."""
        self._num_idle = 0
        self._is_keen = False
        self.interval = FIRST_INTERVAL

    def probed(self, cost: float, num_drafted: int, num_hits: int, num_requests: int) -> None:
        """A probe was made; until a token was drafted (KV is caught up with first) it goes on."""
        self._saved += num_hits / num_requests - cost
        if num_drafted:
            self._num_idle = 0
            self._is_keen = num_hits > 0
            interval = self.interval // 2 if num_hits else 2 * self.interval
            self.interval = min(LAST_INTERVAL, max(FIRST_INTERVAL, interval))


def refresh_interval(plain_share: float) -> float:
    """Passes after which a plain step refreshes its price.

    ``plain_share``: the speed of plain decoding over that of drafting. The more drafting brings,
    the dearer is a step without, and the less hangs on its exact price.
    """
    return max(REFRESH_STEPS, (1.0 - plain_share) / REFRESH_SHARE)
