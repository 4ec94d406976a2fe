"""Mistakes in the ledger of recurrent states: who goes on from which state."""

from __future__ import annotations

from ..mutation import Mutation

_CROWD = "test_a_crowd_of_requests_goes_on_from_no_state_but_its_own_prefix"
_SEEDS = "test_whatever_a_seed_brings_no_token_comes_from_another_state"

MUTATIONS = (
    Mutation(
        "states-resume-where-none-was-kept",
        "PrefixCache._num_resumable",
        "return len(page_ids) if self.states is None else self.states.num_resumable(page_ids)",
        "return len(page_ids)",
        ("test_a_request_goes_on_from_the_deepest_page_that_has_a_state",),
        "a request goes on from a kept state, or from the beginning",
    ),
    Mutation(
        "states-are-kept-a-page-early",
        "PrefixCache._attach_keeps",
        "lease.page_ids[position // self.page_size - 1]",
        "lease.page_ids[max(0, position // self.page_size - 2)]",
        (_CROWD, "test_a_request_goes_on_from_the_deepest_page_that_has_a_state"),
        "a state is attached to the page at whose end it stands",
    ),
    Mutation(
        "states-stand-behind-the-last-row",
        "PrefixCache.settle_state",
        "(stop - 1) // self.page_size",
        "stop // self.page_size",
        (_CROWD, _SEEDS),
        "a state stands at the last page's end before the last row",
    ),
    Mutation(
        "states-are-attached-before-they-are-computed",
        "PrefixCache._attach_keeps",
        "if position <= num_computed:",
        "if position <= len(lease.page_ids) * self.page_size and num_computed >= 0:",
        (
            "test_a_step_that_is_not_committed_attaches_nothing",
            "test_what_a_step_was_to_keep_and_did_not_compute_is_freed",
        ),
        "a state is attached at commit",
    ),
    Mutation(
        "states-of-failed-chunks-are-attached",
        "Scheduler.take_back_chunks",
        "self.cache.void_state(request.lease)",
        "assert request.lease.state",
        ("test_a_failed_chunk_leaves_no_state_that_moved_too_far",),
        "a state that a failed step moved is void",
    ),
    Mutation(
        "states-are-evicted-before-they-are-copied",
        "StateSlots.take",
        "if kept.num_readers:",
        "if kept.num_readers < 0:",
        ("test_a_state_is_not_evicted_before_it_was_copied",),
        "a source is kept until the step that copies it is committed",
    ),
    Mutation(
        "states-of-the-grid-push-out-used-ones",
        "StateSlots.take",
        "if rank is not None and kept.rank > rank:",
        "if rank is not None and kept.rank > rank + 1:",
        ("test_states_on_a_grid_give_way_first_and_to_each_other_alone",),
        "what is kept in any case does not push out what was used",
    ),
    Mutation(
        "states-of-pins-give-way-like-others",
        "StateSlots.take",
        "if kept.page_id not in pinned:",
        "if kept.page_id >= 0:",
        ("test_the_state_at_the_end_of_a_pin_goes_last_and_makes_room_for_a_request_alone",),
        "the end of a pin is kept longest",
    ),
    Mutation(
        "states-outlive-their-pages",
        "StateSlots.dropped",
        "self._free.append(self._detach(kept))",
        "self._free.append(kept.slot)",
        ("test_pages_that_leave_the_cache_free_their_slots",),
        "an attached slot's page is in the tree",
    ),
    Mutation(
        "states-of-two-requests-part-too-late",
        "claim_states",
        "shared > other.num_computed",
        "shared > 0",
        ("test_a_prompt_does_not_wait_for_one_that_is_beyond_where_they_part",),
        "no request waits for a state that will not be kept",
    ),
    Mutation(
        "states-move-on-in-a-step-ahead",
        "_moves_states",
        "return any(scheduled.stop % page_size == 0 for scheduled, _ in here)",
        "return any(scheduled.stop < 0 for scheduled, _ in here)",
        ("test_a_step_in_which_a_state_moves_on_is_not_planned_ahead", _SEEDS),
        "where a state stands does not depend on whether a step has begun",
    ),
    Mutation(
        "states-take-drafts-that-branch",
        "as_chain",
        "plan.draft.trunk().first(MAX_STATE_DRAFT)",
        "plan.draft.first(MAX_STATE_DRAFT)",
        ("test_a_draft_is_cut_to_a_chain_that_a_log_has_room_for",),
        "the log of a state holds a chain",
    ),
    Mutation(
        "states-chunks-are-run-again",
        "_moved_state",
        "scheduled.state is not None and scheduled.stop - scheduled.start > 1",
        "scheduled.state is not None and scheduled.stop < scheduled.start",
        ("test_a_chunk_is_never_run_again_as_it_was", _SEEDS),
        "a chunk whose state moved on is not run again",
    ),
    Mutation(
        "states-suspects-share-a-step",
        "without_suspects",
        "return [first] if first.is_suspect else [each for each in prompts if not each.is_suspect]",
        "return prompts",
        ("test_a_prompt_that_moves_its_state_and_fails_takes_no_neighbour_with_it",),
        "a request ends for a failure of its own alone",
    ),
    Mutation(
        "states-begin-with-what-was-there",
        "ModelRunner._place_states",
        "elif scheduled.start == 0:",
        "elif scheduled.start < 0:",
        (_SEEDS,),
        "a request begins with an empty state",
    ),
    Mutation(
        "states-rows-of-drafts-are-final",
        "segment_state",
        "SegmentState(state.slot, state.log, scheduled.stop, state.keeps)",
        "SegmentState(state.slot, state.log, scheduled.stop + 1, state.keeps)",
        (_SEEDS,),
        "a draft that is not accepted leaves no trace in a state",
    ),
)
