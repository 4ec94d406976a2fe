"""Mistakes in what happens to a request before the engine has it."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "worker-does-the-work-of-who-left",
        "Worker.run",
        "                self._waiting.drop(future)\n",
        "                pass\n",
        (
            "test_cancelled_jobs_leave_the_queue",
            "test_who_leaves_while_its_text_waits_is_not_waited_for",
        ),
        "who leaves frees what he had",
    ),
    Mutation(
        "template-goes-on-for-nobody",
        "Budget.end",
        "        self._ends_at = 0.0\n",
        "        pass\n",
        ("test_a_template_that_nobody_waits_for_ends",),
        "a template that never ends holds no thread",
    ),
    Mutation(
        "template-has-all-the-time",
        "Budget.check_time",
        "        if time.monotonic() > self._ends_at:\n",
        "        if time.monotonic() < 0:\n",
        ("test_a_template_that_never_ends_fails_its_request_and_stalls_nobody",),
        "a template that never ends holds no thread",
    ),
    Mutation(
        "worker-serves-who-asks-most",
        "Waiting.take",
        "        self._by_caller.move_to_end(caller)\n",
        "",
        ("test_callers_are_served_in_turn",),
        "nobody delays others by how much he asks",
    ),
    Mutation(
        "worker-lets-all-wait",
        "_is_over",
        "    return num_waiting > 0 and num_waiting + num_bytes > limit\n",
        "    return False\n",
        (
            "test_a_caller_fills_its_share_and_all_of_them_the_whole",
            "test_more_than_may_wait_is_refused",
        ),
        "what waits is bounded",
    ),
    Mutation(
        "deadlines-count-from-the-engine",
        "seconds_left",
        "    left = since + min(given) - time.monotonic()\n",
        "    left = min(given)\n",
        ("test_a_deadline_counts_from_when_the_request_arrived",),
        "the wait is part of what a request may take",
    ),
    Mutation(
        "who-waits-has-no-deadline",
        "Service.wanted",
        "        return UnlessGone(receive, left)\n",
        "        return UnlessGone(receive)\n",
        ("test_a_deadline_of_the_caller_counts_while_it_waits",),
        "the wait is part of what a request may take",
    ),
    Mutation(
        "chat-opens-for-who-left",
        "UnlessGone._watch",
        "            self._timeout.reschedule(0)",
        "            self._timeout.reschedule(None)",
        ("test_who_leaves_while_a_large_body_is_read_is_not_waited_for",),
        "who leaves frees what he had",
    ),
)
