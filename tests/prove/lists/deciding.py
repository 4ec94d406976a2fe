"""Mistakes in deciding how much to draft: calibration, controller, guard."""

from __future__ import annotations

from ..mutation import Mutation

CALIBRATION = "tests/draft/test_calibration.py"
CONTROLLER = "tests/draft/test_controller.py"
GRAMMAR = "tests/draft/test_grammar.py"

MUTATIONS = (
    Mutation(
        "calibration-misses-teach-nothing",
        "draft/calibration.py",
        "num_tried = num_hits + missed\n        for bucket",
        "num_tried = num_hits\n        for bucket",
        (CALIBRATION,),
        "chances converge to the truth",
    ),
    Mutation(
        "calibration-hazard-upside-down",
        "draft/calibration.py",
        "(BEND_PRIOR + self.rejections) / (BEND_PRIOR + self.expected)",
        "(BEND_PRIOR + self.expected) / (BEND_PRIOR + self.rejections)",
        (CALIBRATION,),
        "three failures in a row bend a request at once",
    ),
    Mutation(
        "calibration-mixes-positions",
        "draft/calibration.py",
        'np.searchsorted(BUCKETS, np.arange(MAX_LENGTH), side="right") - 1',
        'np.searchsorted(BUCKETS, np.arange(MAX_LENGTH), side="left")[::-1] - 1',
        (CALIBRATION,),
        "positions are learnt apart",
    ),
    Mutation(
        "calibration-never-fades",
        "draft/calibration.py",
        "keep = max(0.0, 1.0 - tried / WINDOW)",
        "keep = 1.0",
        (CALIBRATION,),
        "a collapse is followed within a few hundred tokens",
    ),
    Mutation(
        "calibration-keeps-the-silent-bent",
        "draft/calibration.py",
        "            bend.fade(track.num_scored)\n",
        "            pass\n",
        (CALIBRATION,),
        "a request long silent is trusted again in part",
    ),
    Mutation(
        "calibration-remembers-who-left",
        "draft/calibration.py",
        "track.bends.pop(request_id, None)",
        "track.bends.get(request_id, None)",
        (CALIBRATION,),
        "nothing is kept of requests that left",
    ),
    Mutation(
        "controller-margin-sign",
        "draft/controller.py",
        "least = 1.0 + self.guard.margin + (",
        "least = 1.0 - self.guard.margin + (",
        (CONTROLLER,),
        "drafting never costs speed: the guard ends what does not pay",
    ),
    Mutation(
        "controller-probes-beyond-the-budget",
        "draft/controller.py",
        "if int(num_free.sum()) >= candidates.budget:",
        "if int(num_free.sum()) > candidates.budget:",
        (f"{GRAMMAR}::test_a_probe_of_the_draft_model_stays_within_the_budget",),
        "a probe stays within the budget",
    ),
    Mutation(
        "controller-branches-at-any-price",
        "draft/controller.py",
        "if gain_tokens * self._token_s <= cost * (1.0 + self.guard.margin):",
        "if gain_tokens * self._token_s <= 0.0:",
        (CONTROLLER,),
        "more rows are worth what they bring at the going rate",
    ),
    Mutation(
        "controller-never-refreshes-the-plain-price",
        "draft/controller.py",
        "return self.costs.age(candidates.num_rows) > refresh_interval(plain_share)",
        "return False",
        (CONTROLLER,),
        "long drafting refreshes the price of a plain step",
    ),
    Mutation(
        "guard-loss-sign",
        "draft/watch.py",
        "* exp(self._slowness) * expected) - worth",
        "* exp(self._slowness) * expected) + worth",
        (CONTROLLER,),
        "luck does not alarm the guard",
    ),
    Mutation(
        "guard-never-forgives",
        "draft/watch.py",
        "if self.margin > BASE_MARGIN:",
        "if self.margin > MAX_MARGIN:",
        (CONTROLLER,),
        "after an alarm drafting is tried again",
    ),
    Mutation(
        "prober-rewards-failure",
        "draft/watch.py",
        "self.interval // 2 if num_hits else 2 * self.interval",
        "2 * self.interval if num_hits else self.interval // 2",
        (CONTROLLER,),
        "an idle draft model is tried more rarely after failures",
    ),
    Mutation(
        "allocation-drafts-what-cannot-come",
        "draft/allocation.py",
        "min(int(counts[cap]), int(np.count_nonzero(flat[cap])))",
        "int(counts[cap])",
        (CONTROLLER,),
        "what cannot come is not drafted",
    ),
    Mutation(
        "rests-are-never-looked-into",
        "draft/speculator.py",
        "elif self._sources and self.meter.may_peek():",
        "elif not self._sources and self.meter.may_peek():",
        ("tests/draft/test_speculator.py",),
        "text that begins to repeat is drafted soon",
    ),
    Mutation(
        "rests-end-for-look-ups-that-never-came-true",
        "draft/peek.py",
        "and chance(guess.source, guess.kind, request.request_id) >= PROMISE",
        "and chance(guess.source, guess.kind, request.request_id) >= 0.0",
        ("tests/draft/test_speculator.py",),
        "a promise is what calibration says",
    ),
)
