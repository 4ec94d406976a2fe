"""Rest: steps in which nobody drafts, and what is done behind them.

A step that rests should take what it takes without speculation. So a few steps at a time rest
whatever they find; what may end the rest is looked at behind the kernels of a step, where nobody
waits for it; and text is read by the bite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.request import Request
from .calibration import Calibration
from .meter import Meter
from .peek import TELLING, Peek
from .reader import Reader
from .source import CarefulSource
from .track import Drafters, Track

MOST_LEFT = 8  # ended requests whose tokens a step takes in, a tenth of a millisecond each
BITE = 32  # tokens of an answer that are worth a call where nobody drafts
REST_BITE = 128  # the same in a rest, whose last step may have no time for all
NEWS_EVERY = TELLING - 1  # steps of a rest between two in which something is taken in
REST_EVERY = 64  # the same while nobody came, and few left


class Rest:
    """Says which steps rest, looks for reasons to end that, and has text taken in.

    ``is_forced``: whether a request's constraint tells what follows.
    """

    def __init__(
        self,
        drafters: Drafters,
        meter: Meter,
        sources: Sequence[CarefulSource],
        calibration: Calibration,
        is_forced: Callable[[Track], bool],
    ) -> None:
        self._num_idle = 0  # steps, and requests that left, since text was last taken in
        self._drafters, self._meter, self._is_forced = drafters, meter, is_forced
        self._has_sources = bool(sources)
        self._glance = Peek(sources, calibration)
        self._reader = Reader(sources)
        self._alone: Request | None = None  # who came to nobody, and was not looked at yet

    # -- steps ----------------------------------------------------------------------------------

    def num_steps(self) -> int:
        """Steps that rest, from the one that is planned on; 0 where somebody may draft in it."""
        self._num_idle += 1
        who, meter = self._drafters, self._meter
        if not who.tracks:
            return 1
        if not meter.is_resting:
            self._alone = None  # the step decides
            return 0
        if who.constrained and any(map(self._is_forced, who.decoding(who.constrained))):
            meter.end_rest()
        if who.own_depth and any(who.decoding(who.own_depth)):
            return 0
        if not meter.rests():
            return 0
        is_watched = who.constrained or self._alone or self._is_reading()
        return 1 if is_watched else 1 + meter.run()

    def passed(self, num_steps: int, seconds: float) -> None:
        """So many steps are over that nobody asked about, and took so long."""
        self._num_idle += num_steps
        self._meter.passed(num_steps, seconds)

    # -- behind them ----------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Always but in a rest, where who came or left waits for a few others: see `work`."""
        meter = self._meter
        if self._is_reading():
            return True
        if not self._drafters.tracks:
            return False
        if meter.is_ending or not self._has_sources:
            return meter.is_ending
        is_new = self._alone is not None and self._alone.num_output > 0
        return meter.is_resting and (meter.may_peek or is_new)

    def _is_reading(self) -> bool:
        """Whether text is to be taken in. Of who left only before others come, or many have."""
        if not self._drafters.tracks:
            return self._has_news or self._reader.num_left > 0
        if not self._meter.is_resting or self._drafters.own_depth:
            return True
        return self._num_idle >= (NEWS_EVERY if self._has_news else REST_EVERY)

    @property
    def _has_news(self) -> bool:
        return self._reader.has_prompts or self._reader.num_left >= MOST_LEFT

    def work(self, *, is_drafting: bool) -> None:
        """Take in what was said, then look for a reason to end a rest.

        Of requests that ended, then of those that run. In a rest nobody looks up but at a glance:
        prompts are enough, and answers wait for its end. Even then they are taken in by the bite,
        unless drafts are made of them. Who fixed how deep to draft never rests.
        """
        who, meter = self._drafters, self._meter
        self._reader.keep(MOST_LEFT if who.tracks else None)
        bite = REST_BITE if meter.is_resting else 1 if is_drafting else BITE
        self._reader.read(bite, eager=who.own_depth)
        self._num_idle = NEWS_EVERY if self._has_news else 0  # what is left comes next
        if not self._has_sources or not who.tracks:
            return
        if self._alone is not None:
            self._look_at(self._alone)
        while meter.is_resting and meter.may_peek:
            self._peek()

    def _look_at(self, request: Request) -> None:
        """End the rest for who came to nobody and begins with what was said before.

        One look for each is cheap enough to be made at once: a whole request that is asked again
        may be short.
        """
        if not request.num_output or not self._meter.is_resting:
            return
        self._alone = None
        began = self._meter.clock()
        if self._glance.promises(request):
            self._meter.peeked(self._meter.clock() - began, found=True)

    def _peek(self) -> None:
        """End the rest where a look-up promises something, or for who came, which is rarer."""
        meter = self._meter
        began = meter.clock()
        newcomer = self._glance.newcomer()
        request = newcomer or self._glance.in_turn()
        found = request is not None and self._glance.promises(request)
        meter.peeked(meter.clock() - began, found=found)
        if newcomer is not None and not found:
            meter.cut_rest()

    # -- who is there ---------------------------------------------------------------------------

    def join(self, request: Request, *, may_peek: bool) -> None:
        """Its prompt is read soon, and if it may, it is glanced at when it has begun to answer."""
        self._alone = None
        if may_peek:
            self._glance.join(request)
            self._alone = request if self._has_sources and not self._drafters.tracks else None
        self._reader.join(request)

    def leave(self, request: Request) -> None:
        """Its tokens are kept later."""
        self._glance.leave(request.request_id)
        self._alone = None
        self._reader.leave(request)
        self._num_idle += 1  # nobody need decode for that

    def keep(self) -> None:
        """Take in all that ended requests have said."""
        self._reader.keep()
