"""Mistakes in steps that are planned, or launched, while the one before them is under way."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "ahead-lends-the-page-table",
        "plan_next",
        "lease.page_ids[:]",
        "lease.page_ids",
        ("test_the_page_table_reaches_the_new_token_and_is_nobodys_but_the_plans",),
        "what a step was lent does not change under it",
    ),
    Mutation(
        "extend-grows-the-table-that-was-lent",
        "PrefixCache.extend",
        "lease.page_ids = lease.page_ids + taken",
        "lease.page_ids += taken",
        ("test_the_page_table_reaches_the_new_token_and_is_nobodys_but_the_plans",),
        "what a step was lent does not change under it",
    ),
    Mutation(
        "ahead-of-who-waits",
        "_continuing",
        "or (len(scheduler.waiting) and has_places):",
        "or False:",
        ("test_who_waits_and_has_a_place_comes_first",),
        "a newcomer waits for no step that was not begun",
    ),
    Mutation(
        "ahead-of-rows-that-read-the-text",
        "StepPlan.is_decode_only",
        "if not is_decode or scheduled.sampling.needs_history:",
        "if not is_decode:",
        ("test_nothing_is_planned_where_a_row_reads_the_text",),
        "penalties see every token",
    ),
    Mutation(
        "log-probabilities-read-no-text",
        "SamplingMetadata.__post_init__",
        "wants_logprobs = params.logprobs is not None or",
        "wants_logprobs =",
        ("test_nothing_is_planned_where_a_row_reads_the_text",),
        "what the host must see is computed step by step",
    ),
    Mutation(
        "ahead-asks-no-speculator",
        "plan_next",
        "if not continuing or not scheduler.speculator.drafts_nothing(requests, num_new_tokens=1):",
        "if not continuing:",
        ("test_nothing_is_planned_where_one_request_may_draft_after_this_token",),
        "overlap costs no drafts",
    ),
    Mutation(
        "flight-drafts-on-the-event-loop",
        "StepPlan.is_short",
        "if not is_decode or is_asked or",
        "if not is_decode or",
        ("test_only_short_launches_of_a_device_are_made_on_the_event_loop",),
        "the event loop never waits for the device",
    ),
    Mutation(
        "flight-packs-on-the-event-loop",
        "ScheduledExtras.delays_launch",
        "if self.pack is not None or self.adapter is not None:",
        "if self.adapter is not None:",
        ("test_only_short_launches_of_a_device_are_made_on_the_event_loop",),
        "the event loop never waits for the device",
    ),
    Mutation(
        "launch-on-the-loop-is-not-watched",
        "StepExecutor._launch",
        "self._watchdog.begin_launch(in_flight.began)",
        "pass",
        ("test_a_launch_is_watched_before_it_begins",),
        "a launch that hangs is reported",
    ),
    Mutation(
        "sampler-blocks-share-their-memory",
        "_Post.reserve",
        "if num_sends * NUM_BUFFERS > self._num_hosts:",
        "if False:",
        ("test_a_launch_of_many_blocks_does_not_wait_for_the_launch_before_it",),
        "the event loop never waits for the device",
    ),
    Mutation(
        "launched-goes-on-from-anothers-token",
        "PendingStep.next_inputs",
        "sources[batch_rows[scheduled.request_id]] = index",
        "sources[batch_rows[scheduled.request_id]] = 0",
        ("test_overlap_engine.py",),
        "law 1: the same tokens whatever overlaps",
    ),
    Mutation(
        "stepper-recovers-while-the-device-computes",
        "StepExecutor._abandon_next",
        "output = await self._compute(in_flight, self._clock())  # a launched step must end first",
        "output = None",
        ("test_nothing_is_run_again_before_what_followed_a_failure_is_over",),
        "no two steps write the same pages at once",
    ),
)
